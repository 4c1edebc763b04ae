"""A rank in a process that is not ours: joins a job, and leaves as it came."""
