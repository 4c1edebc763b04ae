"""Pipelines with a thread for each worker, in the test's own process."""
