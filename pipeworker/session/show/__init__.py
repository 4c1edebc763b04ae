"""What the user sees of a running job: its progress, what it prints, how it ended."""
