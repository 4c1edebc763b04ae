"""What runs were and did, for who looks at them later."""
