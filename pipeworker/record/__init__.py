"""The files of a run: its directory, record, metrics, checkpoints and exported weights."""
