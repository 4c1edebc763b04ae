"""The files that the coordinator writes, and the state from which a new one resumes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from pipeworker.coordinator.effects import Commit
from pipeworker.coordinator.io.files import RunFiles
from pipeworker.coordinator.io.parent import ParentProcess
from pipeworker.coordinator.service import read_start
from pipeworker.facts.step import StepResult
from pipeworker.host.descriptors import DescriptorReserve
from pipeworker.job.options import Options
from pipeworker.record import run_record
from pipeworker.record.metrics import rows
from pipeworker.record.rundir import RunDir
from pipeworker.wire.lines import Configuration, FromCoordinator, Snapshot, Verdict, Warned

OPTIONS = Options("job.py", 2, 8)
COMMIT = Commit(3, None, (), ("0",), (), None)
DONE = Verdict("done", 0, 3, 1.0, (0, 0), 0.5, None)


class Plenty:
    """A reserve of descriptors that is never needed."""

    def run(self, write: Callable[[], None]) -> None:
        write()


class Listener:
    """The parent process, which keeps what it receives."""

    def __init__(self) -> None:
        self.received: list[FromCoordinator] = []

    def send(self, event: FromCoordinator) -> None:
        self.received.append(event)


class Disk:
    """A disk that may be full."""

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
    """The errors that ended the job."""
    return []


@pytest.fixture
def files(run_dir: RunDir, disk: Disk, listener: Listener, broken: list[str]) -> Iterator[RunFiles]:
    made = RunFiles(
        run_dir,
        OPTIONS,
        cast(DescriptorReserve, Plenty()),
        cast(ParentProcess, listener),
        broken.append,
    )
    yield made
    made.close()


def result(step: int) -> StepResult:
    return StepResult(step, 0.5, 8, 0.1, 80.0, 1.0, 0.1, 0.5, 0, None)


def recorded(run_dir: RunDir) -> list[int]:
    return [row["step"] for row in rows.read(run_dir.metrics)]


def test_rows_wait_on_a_full_disk_with_one_warning(
    files: RunFiles, run_dir: RunDir, disk: Disk, listener: Listener, broken: list[str]
) -> None:
    files.write_plan({"number": 1})
    files.add_step(result(1))
    for times, steps in ((1, (2, 3)), (2, (5,))):
        disk.full = True
        for step in steps:
            files.add_step(result(step))
        files.write_plan({"number": 2})
        text = (
            f"{run_dir.metrics}: cannot be written: No space left on device; its rows wait for room"
        )
        assert listener.received.count(Warned(text)) == times
        disk.full = False
        files.write_plan({"number": 3})
        files.add_step(result(steps[-1] + 1))
    assert recorded(run_dir) == [1, 2, 3, 4, 5, 6]
    assert len(listener.received) == 4
    assert '"number": 3' in run_dir.plan.read_text()
    assert broken == []


def test_a_checkpoint_is_complete_only_after_the_rows_of_its_steps(
    files: RunFiles, run_dir: RunDir, disk: Disk
) -> None:
    run_dir.checkpoints.partial(3).mkdir()
    disk.full = True
    files.add_step(result(3))
    with pytest.raises(OSError, match="No space left"):
        files.commit(COMMIT, 2)
    assert run_dir.checkpoints.paths() == []
    disk.full = False
    assert files.commit(COMMIT, 2) == str(run_dir.checkpoints.at(3))
    assert recorded(run_dir) == [3]


def test_a_job_with_a_missing_row_is_not_done(
    files: RunFiles, disk: Disk, run_dir: RunDir, listener: Listener
) -> None:
    disk.full = True
    files.add_step(result(3))
    listener.received.clear()
    verdict = files.write_summary(DONE, 2)
    assert (verdict.status, verdict.exit_status) == ("failed", 1)
    assert verdict.error == f"{run_dir.metrics}: cannot be written: No space left on device"
    disk.full = False
    assert files.write_summary(DONE, 2) == DONE
    assert run_record.read_summary(run_dir)["status"] == "done"


def test_a_lack_of_descriptors_for_the_rows_of_a_summary_is_not_their_defect(
    files: RunFiles, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An `OSError` is what the reserve of descriptors tries again."""
    files.add_step(result(3))

    def lacking(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), name)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", lacking)
        with pytest.raises(OSError, match="Too many open files"):
            rows.last(run_dir.metrics)
    assert files.write_summary(DONE, 2) == DONE


def test_a_summary_whose_rows_became_a_pipe_fails_the_job(files: RunFiles, run_dir: RunDir) -> None:
    files.add_step(result(3))
    run_dir.metrics.unlink()
    os.mkfifo(run_dir.metrics)
    verdict = files.write_summary(DONE, 2)
    assert (verdict.status, verdict.exit_status) == ("failed", 1)
    assert verdict.error == f"{run_dir.metrics}: cannot be read: it is not a regular file"


def test_a_plan_that_cannot_be_written_ends_the_job(
    files: RunFiles, disk: Disk, broken: list[str]
) -> None:
    disk.full = True
    files.write_plan({})
    assert len(broken) == 1


@pytest.mark.parametrize(("steps", "goes_on"), [(4, 3), (3, 3), (2, 0)])
def test_a_new_coordinator_resumes_from_a_snapshot_whose_rows_exist(
    files: RunFiles, run_dir: RunDir, steps: int, goes_on: int
) -> None:
    for step in range(1, steps + 1):
        files.add_step(result(step))
    left = Configuration(
        *(OPTIONS.to_json(), str(run_dir.path), "token", "host"),
        snapshot=Snapshot(3, 1, 2, 0.0, 0),
        causes=("the coordinator was killed",),
    )
    begins = read_start(left, OPTIONS, run_dir)
    assert begins.recorded == steps
    assert (begins.snapshot[0].step if begins.snapshot else 0) == goes_on
