"""Import first, in an interpreter of its own, the modules that forked processes have already."""

import importlib
import os

if preload := os.environ.get("PIPEWORKER_TESTS_PRELOAD"):
    importlib.import_module(preload)
