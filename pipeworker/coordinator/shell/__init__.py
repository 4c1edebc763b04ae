"""What the service acts by: its starter, and the files of the run."""
