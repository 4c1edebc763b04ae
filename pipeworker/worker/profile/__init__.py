"""Facts of layers: each is measured by itself, or its operations are counted."""
