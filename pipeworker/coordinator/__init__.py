"""The coordinator: a pure state machine of a job, and the service that runs it in a process."""
