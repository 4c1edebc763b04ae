"""The page of a run: ``pipeworker report --html``."""
