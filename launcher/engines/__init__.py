"""Engines: ways to start the processes of a job."""
