"""The device that a worker computes on, its memory and its time."""
