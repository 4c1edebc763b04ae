"""Real jobs, their job files and scripts, and comparisons of runs."""
