"""Computes: one process, one or more stages. The only part that runs the user's code."""
