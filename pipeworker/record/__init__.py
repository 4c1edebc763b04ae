"""What is left behind: the run directory, metrics, summary, weights."""
