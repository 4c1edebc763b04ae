"""Ranks in processes of the user's: ``Pipeline`` and ``train``."""
