"""Helpers that test modules share."""
