"""A worker's state: restored at the start, copied while steps run, written to checkpoints."""
