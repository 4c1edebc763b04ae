"""Computes: one process, one stage. This is the only part that runs the user's code."""
