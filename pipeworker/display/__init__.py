"""The terminal's view of a job: progress lines, a progress bar, workers' output, the summary."""
