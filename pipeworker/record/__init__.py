"""The files of a run: its directory, records, metrics, checkpoints and weights."""
