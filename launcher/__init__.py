"""Starts the processes of a job on hosts, and shows what they do."""
