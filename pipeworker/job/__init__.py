"""The user's input: the options of the command, and the job file."""
