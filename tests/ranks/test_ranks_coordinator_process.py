"""The events of rank 0's coordinator, and how long rank 0 waits for its verdict."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeworker.errors import UsageError
from pipeworker.job.options import Options
from pipeworker.ranks import coordinator_process
from pipeworker.ranks.coordinator_process import CoordinatorProcess, failure_text
from pipeworker.record.rundir import RunDir
from pipeworker.runs.begin import PreparedRun
from pipeworker.timings import DEFAULT
from pipeworker.wire.lines import Bound, FromCoordinator, KeepAlive, Verdict, Warned

DONE = Verdict("done", 0, 3, 1.0, (0,), 0.5, None)


class SlowCoordinator:
    """A coordinator that keeps alive for five times the limit before its verdict.

    Each of its lines takes three quarters of the limit, by a clock of its own, and arrives after
    rank 0 has looked at that clock once more.
    """

    pid = 7

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[FromCoordinator] = [Bound("tcp://host:1"), *[KeepAlive(3.0)] * 7, DONE]
        self._looks = threading.Semaphore(0)

    def monotonic(self) -> float:
        if threading.current_thread() is threading.main_thread():
            self._looks.release()
        return self.now

    def receive(self) -> tuple[list[FromCoordinator], bool]:
        line = self.lines.pop(0)
        if not isinstance(line, Bound):
            assert self._looks.acquire(timeout=60)
            self.now += 0.75 * DEFAULT.verdict
        return [line], bool(self.lines)

    def send(self, line: object) -> None: ...

    def close_input(self) -> None: ...

    def wait(self, seconds: float) -> int:
        return 0


class WarningCoordinator(SlowCoordinator):
    """A coordinator that warns before it is bound, and again, with its verdict, at once after."""

    def receive(self) -> tuple[list[FromCoordinator], bool]:
        events: list[FromCoordinator] = []
        if self.lines:
            events = [Warned("before"), Bound("tcp://host:1"), Warned("after"), DONE]
            self.lines = []
        return events, bool(events)


class InterruptedCoordinator(SlowCoordinator):
    """A coordinator while whose start the process is interrupted."""

    closed = False

    def receive(self) -> tuple[list[FromCoordinator], bool]:
        raise KeyboardInterrupt

    def close_input(self) -> None:
        self.closed = True


def test_a_coordinator_whose_start_is_interrupted_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may live on, as that of a notebook, and its traceback may hold the object."""
    started, shown = InterruptedCoordinator(), list[FromCoordinator]()
    monkeypatch.setattr(coordinator_process, "start_coordinator", lambda: started)
    ends = list[Any]()
    run = SimpleNamespace(
        options=Options("job.py", 1, 1),
        run_dir=RunDir(tmp_path),
        close=lambda: ends.append("closed"),
    )
    with pytest.raises(KeyboardInterrupt):
        CoordinatorProcess(cast(PreparedRun, run), "token", "host", shown.append)
    assert (started.closed, ends) == (True, ["closed"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["error"] == "rank 0 was interrupted by KeyboardInterrupt"


def test_a_coordinator_that_waits_for_the_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, shown = SlowCoordinator(), list[FromCoordinator]()
    monkeypatch.setattr(coordinator_process, "start_coordinator", lambda: slow)
    monkeypatch.setattr(coordinator_process, "time", slow)
    options, closed = Options("job.py", 1, 1), list[Any]()
    run = SimpleNamespace(options=options, run_dir=RunDir(tmp_path), close=closed.append)
    process = CoordinatorProcess(cast(PreparedRun, run), "token", "host", shown.append)
    assert process.finish(0) == 0
    assert slow.now > 5 * DEFAULT.verdict
    assert (shown[-1], closed) == (DONE, [DONE])


def test_events_that_arrive_together_with_the_endpoint_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = list[FromCoordinator]()
    monkeypatch.setattr(coordinator_process, "start_coordinator", WarningCoordinator)
    options, closed = Options("job.py", 1, 1), list[Any]()
    run = SimpleNamespace(options=options, run_dir=RunDir(tmp_path), close=closed.append)
    process = CoordinatorProcess(cast(PreparedRun, run), "token", "host", shown.append)
    assert process.endpoint == "tcp://host:1"
    assert process.finish(0) == 0
    assert shown == [Warned("before"), Warned("after"), DONE]
    assert closed == [DONE]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UsageError("--steps: no"), "--steps: no"),
        (KeyboardInterrupt(), "rank 0 was interrupted by KeyboardInterrupt"),
        (ValueError("a defect"), "rank 0 cannot start the job: ValueError: a defect"),
    ],
)
def test_the_reason_that_other_ranks_are_given(error: BaseException, text: str) -> None:
    assert failure_text(error) == text
