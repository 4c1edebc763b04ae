"""The supervisor of a job's processes: a pure state machine that the launcher's loop drives."""
