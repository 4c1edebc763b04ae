"""What a worker computes on: a device, its memory and its time."""
