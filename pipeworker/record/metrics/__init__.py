"""The figures of each step and evaluation: as JSON lines, CSV and TensorBoard files."""
