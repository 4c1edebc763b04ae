"""What tests of decisions and plans share: scripted jobs, orders, messages."""
