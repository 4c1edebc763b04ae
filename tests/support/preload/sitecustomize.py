"""Makes an interpreter of its own import first what forked processes do, from ``PYTHONPATH``."""

import importlib
import os

if preload := os.environ.get("PIPEWORKER_TESTS_PRELOAD"):
    importlib.import_module(preload)
