"""Any module as a sequence of layers: its own forward, run in part on each stage."""
