"""A fixture of several tests of faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.real_jobs.jobs import Jobs, processes_of, steps_of, until
from support.real_jobs.live import ENDLESS, Live
from support.real_jobs.sources import SLEEPERS


@pytest.fixture
def start(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Live]:
    """Return a function that starts an endless job and waits until it trains."""
    temporary = jobs.folder / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))

    def start(*words: str, source: str = SLEEPERS, **options: Any) -> Live:
        shared = set(Path("/dev/shm").iterdir())
        process, path = jobs.start(*ENDLESS, *words, source=source, **options)
        live = Live(process, path, jobs.folder, shared)
        if "child-" in source:  # a layer starts a process, and names a file after it
            until(lambda: steps_of(path) > 2)
            (child,) = jobs.folder.glob("child-*")
            assert int(child.read_text()) in processes_of(jobs.folder)
        return live

    return start
