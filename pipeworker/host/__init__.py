"""The host's part of a job: its agent, process lifetimes, and memory that outlives a worker."""
