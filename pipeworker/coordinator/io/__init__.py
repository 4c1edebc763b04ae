"""The service's input and output: its parent process, and the files of the run."""
