"""A step on one worker: its data, its channels, its program of actions, and the loop over them."""
