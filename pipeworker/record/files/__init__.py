"""Files of any kind: written whole, read with a bound, found through descriptors."""
