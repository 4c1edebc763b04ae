"""Loggers: adapters that pass what a run records on to other programs."""
