"""Weights in the files of other tools: export, and initial weights."""
