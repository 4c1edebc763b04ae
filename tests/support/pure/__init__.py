"""Scripted jobs, compute orders and messages, for tests of decisions and plans."""
