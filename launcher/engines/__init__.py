"""Engines: ways to start the processes of a job. A new module here is a new engine."""
