"""What the user brought: the options of the command and the job file."""
