"""The mini-batches of the job's data: read, skipped, split into micro-batches."""
