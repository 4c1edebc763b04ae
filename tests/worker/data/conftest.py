"""A fixture of all tests that read data in one process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _end_processes_of_loaders() -> Iterator[None]:
    """End the processes of a loader that a test leaves to the garbage collection.

    A collection in a later test would wait five seconds for each of them.
    """
    yield
    left = multiprocessing.active_children()
    for process in left:
        process.terminate()
    for process in left:
        process.join()
