"""From gradients to weights: norms, ties, optimizer."""
