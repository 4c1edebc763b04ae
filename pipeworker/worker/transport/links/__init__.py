"""The mechanisms that move the tensors of an edge, one module each."""
