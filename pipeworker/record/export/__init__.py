"""The weights of a run as plain files for other tools."""
