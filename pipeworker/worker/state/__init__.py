"""What lasts of a worker: copied while steps run, kept in memory and on disk, and put back."""
