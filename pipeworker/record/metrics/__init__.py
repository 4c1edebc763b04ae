"""What is measured, a row a step or an evaluation: as JSON lines, and as others want it."""
