"""Emulated devices that execute work late."""
