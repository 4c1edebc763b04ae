"""Record how many threads a process has when it forks; a module to import first."""

from __future__ import annotations

import os
from pathlib import Path

FILE = "PIPEWORKER_TESTS_FORK_THREADS"
"""The variable with the file that gets a line for each fork."""


def _record() -> None:
    """Record the threads after the fork: before it, libraries end some of their own."""
    with Path(os.environ[FILE]).open("a") as file:
        file.write(f"{len([*Path('/proc/self/task').iterdir()])}\n")


if FILE in os.environ:
    os.register_at_fork(after_in_parent=_record)
