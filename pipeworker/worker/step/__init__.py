"""A step on one worker: its mini-batches, channels and program of actions, and their loop."""
