"""The steps of a job: the state that outlasts a generation of workers. Pure."""
