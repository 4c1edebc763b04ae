"""Processes, their limits, terminals, ports and connections."""
