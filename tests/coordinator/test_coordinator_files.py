"""What the coordinator writes, and from where another one goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from pipeworker.coordinator.effects import Commit
from pipeworker.coordinator.shell.begin import start
from pipeworker.coordinator.shell.files import Files
from pipeworker.coordinator.shell.starter import Starter
from pipeworker.job.options import Options
from pipeworker.record import rundir
from pipeworker.record.metrics import rows
from pipeworker.record.rundir import RunDir
from pipeworker.wire.lines import Configuration, FromCoordinator, Snapshot, Verdict, Warned
from pipeworker.wire.messages.step import StepResult
from pipeworker.wire.strangers import Descriptors

OPTIONS = Options("job.py", 2, 8)
COMMIT = Commit(3, None, (), ("0",), (), None)
DONE = Verdict("done", 0, 3, 1.0, (0, 0), 0.5, None)


class Plenty:
    """Descriptors enough."""

    def spare(self, write: Callable[[], None]) -> None:
        write()


class Listener:
    """Who started the coordinator."""

    def __init__(self) -> None:
        self.heard: list[FromCoordinator] = []

    def tell(self, event: FromCoordinator) -> None:
        self.heard.append(event)


class Disk:
    """One that may be full."""

    full = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "fsync", lambda _: self.check())

    def write(self, handle: int, data: bytes) -> int:
        self.check()
        return self._write(handle, data)

    def check(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "checkpoints").mkdir()
    return RunDir(tmp_path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def broken() -> list[str]:
    """What ended the job."""
    return []


@pytest.fixture
def files(run_dir: RunDir, disk: Disk, listener: Listener, broken: list[str]) -> Iterator[Files]:
    made = Files(
        run_dir,
        OPTIONS,
        cast(Descriptors, Plenty()),
        cast(Starter, listener),
        broken.append,
    )
    yield made
    made.close()


def result(step: int) -> StepResult:
    return StepResult(step, 0.5, 8, 0.1, 80.0, 1.0, 0.1, 0.5, 0, None)


def recorded(run_dir: RunDir) -> list[int]:
    return [row["step"] for row in rows.read(run_dir.metrics)]


def test_on_a_full_disk_rows_wait_which_is_said_once(
    files: Files, run_dir: RunDir, disk: Disk, listener: Listener, broken: list[str]
) -> None:
    files.plan({"number": 1})
    files.step(result(1))
    for times, steps in ((1, (2, 3)), (2, (5,))):
        disk.full = True
        for step in steps:
            files.step(result(step))
        files.plan({"number": 2})
        said = f"cannot write {run_dir.metrics}: No space left on device: its rows wait for room"
        assert listener.heard.count(Warned(said)) == times
        disk.full = False
        files.plan({"number": 3})
        files.step(result(steps[-1] + 1))
    assert recorded(run_dir) == [1, 2, 3, 4, 5, 6]
    assert len(listener.heard) == 4
    assert '"number": 3' in run_dir.plan.read_text()
    assert broken == []


def test_a_checkpoint_is_complete_behind_the_rows_of_its_steps(
    files: Files, run_dir: RunDir, disk: Disk
) -> None:
    run_dir.partial_checkpoint(3).mkdir()
    disk.full = True
    files.step(result(3))
    with pytest.raises(OSError, match="No space left"):
        files.commit(COMMIT, 2)
    assert run_dir.saved() == []
    disk.full = False
    assert files.commit(COMMIT, 2) == run_dir.checkpoint(3)
    assert recorded(run_dir) == [3]


def test_without_a_row_no_job_is_done(
    files: Files, disk: Disk, run_dir: RunDir, listener: Listener
) -> None:
    disk.full = True
    files.step(result(3))
    listener.heard.clear()
    verdict = files.end(DONE, 2)
    assert (verdict.status, verdict.exit_status) == ("failed", 1)
    assert verdict.error == f"cannot write {run_dir.metrics}: No space left on device"
    disk.full = False
    assert files.end(DONE, 2) == DONE
    assert rundir.read_summary(run_dir)["status"] == "done"


def test_a_plan_that_was_never_written_ends_the_job(
    files: Files, disk: Disk, broken: list[str]
) -> None:
    disk.full = True
    files.plan({})
    assert len(broken) == 1


@pytest.mark.parametrize(("steps", "goes_on"), [(4, 3), (3, 3), (2, 0)])
def test_another_coordinator_goes_on_from_a_snapshot_whose_rows_are_there(
    files: Files, run_dir: RunDir, steps: int, goes_on: int
) -> None:
    for step in range(1, steps + 1):
        files.step(result(step))
    left = Configuration(
        *(OPTIONS.to_json(), str(run_dir.path), "token", "host"),
        snapshot=Snapshot(3, 1, 2, 0.0, 0),
        causes=("the coordinator was killed",),
    )
    begins = start(left, OPTIONS, run_dir)
    assert begins.recorded == steps
    assert (begins.snapshot[0].step if begins.snapshot else 0) == goes_on
