"""The executor, and what flows through it in a step."""
