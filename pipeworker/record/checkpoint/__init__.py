"""Checkpoints: their files, the snapshots in memory they are written from, and restoring them."""
