"""Options of the tests, and the hooks around their collection."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Waiting threads spin, which costs most of the time while several test processes run. A job that
# needs more threads specifies them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Measuring layers takes time, and their times decide the balance. A job that is planned says so.
os.environ.setdefault("PIPEWORKER_BALANCE", "even")
os.environ.setdefault("PIPEWORKER_RECOMPUTE", "always")
# What the tests compare was computed on the CPU; test_gpu.py has those of accelerators.
os.environ.setdefault("PIPEWORKER_DEVICE", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cold", action="store_true", help="start every process as an interpreter of its own"
    )
    parser.addoption("--run-slow", action="store_true", help="include the tests that are slow")


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, with torch, in all processes but xdist's own, which runs no test."""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("support.fixtures")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Have one process compile the test modules in a new checkout, before the others load them."""
    compiled = Path(__file__).parent.rglob(f"test_*.{sys.implementation.cache_tag}-*.pyc")
    gc.disable()  # nearly all of what is imported stays
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if sys.dont_write_bytecode or any(compiled):
            fcntl.flock(lock, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            gc.enable()


def pytest_collection_finish() -> None:
    """Exempt all that is imported from garbage collection, which some tests do many times."""
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exempt also what the tests of a module have imported, which for torch.compile is much."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect(1)
        gc.freeze()
