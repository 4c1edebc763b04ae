"""Computes: one process, one or more stages. The only part that runs the user's code.

A docstring lists the exceptions that some caller handles. Any other one ends the worker, which
reports it: what the user's code raised as a UserCodeError, a mistake of the user's as a UsageError,
and what the runtime could not do as another PipeworkerError.
"""
