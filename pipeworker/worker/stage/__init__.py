"""Forward, recompute and backward of one stage."""
