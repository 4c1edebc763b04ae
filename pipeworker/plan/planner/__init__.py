"""The planner: balance, recompute modes and schedule of a network, from the facts of its layers."""
