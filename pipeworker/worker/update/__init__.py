"""From gradients to weights: norms, tied weights, replicas, optimizer."""
