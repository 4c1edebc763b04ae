"""What moves raw, dense tensors over one directed edge, by each of several means."""
