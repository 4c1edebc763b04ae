"""The files that the coordinator writes, and the state from which a new one resumes."""

from __future__ import annotations

import errno
import os
import select
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from pipeworker.coordinator.effects import Commit, JobState
from pipeworker.coordinator.events import CheckpointEnded, EffectFailed, Event
from pipeworker.coordinator.io.files import RunFiles
from pipeworker.coordinator.io.parent import ParentProcess
from pipeworker.coordinator.io.result_thread import ResultThread
from pipeworker.coordinator.service import read_start
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.host.descriptors import DescriptorReserve
from pipeworker.job.options import Options
from pipeworker.record import run_record
from pipeworker.record.files import atomic_file
from pipeworker.record.metrics import rows
from pipeworker.record.rundir import RunDir
from pipeworker.wire.lines import Configuration, FromCoordinator, Snapshot, Verdict, Warned
from support.in_process.checkpoints import complete

OPTIONS = Options("job.py", 2, 8)
COMMIT = Commit(JobState(3), (), ("0",), ())
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
        self._write, self._open = os.write, atomic_file.no_link
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(rows, "no_link", self.open)
        monkeypatch.setattr(os, "fsync", self.check)

    def write(self, handle: int, data: bytes) -> int:
        self.check(handle)
        return self._write(handle, data)

    def open(self, path: Path, flags: int) -> int:
        if self.full and not path.exists():  # it has no inode left
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._open(path, flags)

    def check(self, handle: int) -> None:
        if self.full and stat.S_ISREG(os.fstat(handle).st_mode):
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
def handled() -> list[Event]:
    """The events that the job has handled."""
    return []


@pytest.fixture
def files(
    run_dir: RunDir, disk: Disk, listener: Listener, handled: list[Event]
) -> Iterator[RunFiles]:
    made = RunFiles(
        run_dir,
        OPTIONS,
        cast(DescriptorReserve, Plenty()),
        cast(ParentProcess, listener),
        ResultThread("disk"),
        handled.append,
        lambda: -1,
    )
    yield made
    made.close()


def handle_until(files: RunFiles, condition: Callable[[], object]) -> None:
    """Handle what the disk's thread has done, as the loop does, until a condition holds."""
    while not condition():
        assert select.select([files.disk.reads], [], [], 60)[0]
        files.disk.handle_results()


def finish(files: RunFiles) -> None:
    """Wait until the disk's thread has performed and reported everything."""
    done: list[None] = []
    files.disk.submit(lambda: None, done.append)
    handle_until(files, lambda: done)


def commit(files: RunFiles, handled: list[Event], step: int = 3) -> CheckpointEnded:
    """Commit a checkpoint and return the event of its end."""
    files.commit(replace(COMMIT, state=JobState(step)), 2)
    finish(files)
    (ended,) = [event for event in handled if isinstance(event, CheckpointEnded)]
    handled.clear()
    return ended


def summarize(files: RunFiles) -> Verdict:
    """Write the summary of a job that is done, and return the verdict."""
    verdicts: list[Verdict] = []
    files.write_summary(DONE, 2, verdicts.append)
    handle_until(files, lambda: verdicts)
    return verdicts[0]


def result(step: int) -> StepResult:
    return StepResult(step, 0.5, 8, 0.1, 80.0, 1.0, 0.1, 0.5, 0, None)


def recorded(run_dir: RunDir) -> list[int]:
    return [row["step"] for row in rows.read(run_dir.metrics)]


@pytest.mark.parametrize("own_loop", [True, False])
def test_a_loop_that_went_back_continues_from_what_it_saves_then(
    files: RunFiles, run_dir: RunDir, listener: Listener, handled: list[Event], own_loop: bool
) -> None:
    files.options = replace(OPTIONS, own_loop=own_loop)
    (run_dir.checkpoints.path / "left-step-00000005").mkdir()
    for step in (4, 5, 3):
        run_dir.checkpoints.partial(step).mkdir()
        assert commit(files, handled, step).path == str(run_dir.checkpoints.at(step))
    assert run_dir.checkpoints.last_step() == (3 if own_loop else 5)
    names = sorted(path.name for path in run_dir.checkpoints.path.glob("left-*"))
    expected = ["left-step-00000004", "left-step-00000005", "left-step-00000005-2"]
    assert names == (expected if own_loop else [expected[1]])
    text = (
        "checkpoints: later ones than that of step 3 are kept as left-step-00000004 and "
        "left-step-00000005-2; resume continues after step 3"
    )
    assert listener.received == ([Warned(text)] if own_loop else [])


def test_rows_wait_on_a_full_disk_with_one_warning(
    files: RunFiles, run_dir: RunDir, disk: Disk, listener: Listener, handled: list[Event]
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
    assert handled == []


def test_rows_wait_for_room_also_if_their_file_cannot_be_created(
    files: RunFiles, run_dir: RunDir, disk: Disk, listener: Listener, handled: list[Event]
) -> None:
    run_dir.checkpoints.partial(3).mkdir()
    disk.full = True
    for step in (1, 2):
        files.add_evaluation(Evaluation(step, 0.5))
    reason = "No space left on device"
    full = f"{run_dir.evaluation}: cannot be written: {reason}; its rows wait for room"
    assert listener.received == [Warned(full)]
    assert reason in commit(files, handled).error
    disk.full = False
    assert not commit(files, handled).error
    assert [row["step"] for row in rows.read(run_dir.evaluation)] == [1, 2]
    assert handled == []


def test_a_checkpoint_is_complete_only_after_the_rows_of_its_steps(
    files: RunFiles, run_dir: RunDir, disk: Disk, handled: list[Event]
) -> None:
    run_dir.checkpoints.partial(3).mkdir()
    disk.full = True
    files.add_step(result(3))
    reason = f"[Errno 28] No space left on device: '{run_dir.metrics}'"
    text = f"cannot complete the checkpoint: {reason}"
    assert commit(files, handled).error == text
    assert run_dir.checkpoints.paths() == []
    disk.full = False
    assert commit(files, handled) == CheckpointEnded(3, str(run_dir.checkpoints.at(3)))
    assert recorded(run_dir) == [3]


def test_the_error_of_a_sync_names_its_file(
    files: RunFiles, run_dir: RunDir, disk: Disk, handled: list[Event]
) -> None:
    run_dir.checkpoints.partial(3).mkdir()
    files.add_step(result(3))
    disk.full = True
    assert commit(files, handled).error.endswith(f": '{run_dir.metrics}'")


class SlowRemoval:
    """A disk that removes nothing before `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._rmtree = shutil.rmtree
        monkeypatch.setattr(shutil, "rmtree", self.rmtree)

    def rmtree(self, path: Path, **options: Any) -> None:
        self.begun.set()
        assert self.go.wait(60)
        self._rmtree(path, **options)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowRemoval]:
    removal = SlowRemoval(monkeypatch)
    yield removal
    removal.go.set()


def test_a_job_continues_while_an_old_checkpoint_is_removed_and_ends_after_it(
    files: RunFiles, run_dir: RunDir, handled: list[Event], slow: SlowRemoval
) -> None:
    for step in (1, 2, 3):
        run_dir.checkpoints.at(step).mkdir()
    run_dir.checkpoints.partial(4).mkdir()
    files.commit(replace(COMMIT, state=JobState(4)), 2)
    handle_until(files, lambda: handled)
    assert slow.begun.wait(60)
    files.add_step(result(5))
    assert recorded(run_dir) == [5]
    assert handled == [CheckpointEnded(4, str(run_dir.checkpoints.at(4)))]
    verdicts: list[Verdict] = []
    files.write_summary(DONE, 2, verdicts.append)
    files.disk.handle_results()
    assert verdicts == []
    slow.go.set()
    handle_until(files, lambda: verdicts)
    assert run_dir.checkpoints.steps() == [3, 4]
    assert run_record.read_summary(run_dir)["status"] == "done"


def test_a_checkpoint_from_which_workers_continue_stays(
    files: RunFiles, run_dir: RunDir, handled: list[Event]
) -> None:
    """They were sent an old one, or will be sent the newest of which the job knows."""
    files.options, files.restored = replace(OPTIONS, keep=1), lambda: 1
    for step in (1, 3):  # the job does not know yet that 3 is complete
        run_dir.checkpoints.at(step).mkdir()
    for step, stay in ((2, [1, 2, 3]), (4, [4])):
        run_dir.checkpoints.partial(step).mkdir()
        commit(files, handled, step)
        finish(files)
        assert run_dir.checkpoints.steps() == stay
        files.restored = lambda: -1


def test_a_discarded_checkpoint_may_be_written_again_while_its_files_are_removed(
    files: RunFiles, run_dir: RunDir, handled: list[Event], slow: SlowRemoval
) -> None:
    unfinished = run_dir.checkpoints.partial(3)
    discards: tuple[Callable[[], None], ...] = (partial(files.discard, 3), files.remove_unfinished)
    for discard in discards:
        unfinished.mkdir()
        (unfinished / "model").touch()
        discard()
        assert not unfinished.exists()
        assert slow.begun.wait(60)
        slow.begun.clear()
        unfinished.mkdir()
        slow.go.set()
        finish(files)
        assert [*run_dir.checkpoints.path.iterdir()] == [unfinished]
        unfinished.rmdir()
        slow.go.clear()
    slow.go.set()
    unfinished.mkdir()
    assert commit(files, handled).path


def test_a_checkpoint_that_is_being_completed_is_not_unfinished(
    files: RunFiles, run_dir: RunDir, handled: list[Event], slow: SlowRemoval
) -> None:
    """A generation may begin before the thread has completed a checkpoint of the last one."""
    for step in (2, 3):
        run_dir.checkpoints.partial(step).mkdir()
    files.discard(2)
    assert slow.begun.wait(60)
    files.commit(COMMIT, 2)
    files.remove_unfinished()
    slow.go.set()
    finish(files)
    assert handled == [CheckpointEnded(3, str(run_dir.checkpoints.at(3)))]
    assert run_dir.checkpoints.steps() == [3]


def test_a_job_with_a_missing_row_is_not_done(
    files: RunFiles, disk: Disk, run_dir: RunDir, listener: Listener
) -> None:
    disk.full = True
    files.add_step(result(3))
    listener.received.clear()
    verdict = summarize(files)
    assert (verdict.status, verdict.exit_status) == ("failed", 1)
    assert verdict.error == f"{run_dir.metrics}: cannot be written: No space left on device"
    disk.full = False
    assert summarize(files) == DONE
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
    assert summarize(files) == DONE


def test_connections_that_take_all_descriptors_do_not_fail_a_job_that_ends(
    run_dir: RunDir, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reserve(Plenty):
        """A reserve that is needed once."""

        def run(self, write: Callable[[], None]) -> None:
            with suppress(OSError):
                write()
            write()

    found = iter([OSError(errno.EMFILE, os.strerror(errno.EMFILE)), None])

    def rings(_: RunDir) -> list[Path]:
        if (error := next(found)) is not None:
            raise error
        return []

    disk, parent = ResultThread("disk"), cast(ParentProcess, listener)
    reserve = cast(DescriptorReserve, Reserve())
    files = RunFiles(run_dir, OPTIONS, reserve, parent, disk, print, lambda: -1)
    monkeypatch.setattr(RunDir, "worker_rings", rings)
    files.close()
    assert not [*found]


def test_a_summary_whose_rows_became_a_pipe_fails_the_job(files: RunFiles, run_dir: RunDir) -> None:
    files.add_step(result(3))
    run_dir.metrics.unlink()
    os.mkfifo(run_dir.metrics)
    verdict = summarize(files)
    assert (verdict.status, verdict.exit_status) == ("failed", 1)
    assert verdict.error == f"{run_dir.metrics}: cannot be read: it is not a regular file"


def test_a_plan_that_cannot_be_written_ends_the_job(
    files: RunFiles, disk: Disk, handled: list[Event]
) -> None:
    disk.full = True
    files.write_plan({})
    assert [type(event) for event in handled] == [EffectFailed]


def after_a_kill(run_dir: RunDir, **more: Any) -> Configuration:
    """Return the configuration of a coordinator that replaces one that was killed."""
    words = OPTIONS.to_json(), str(run_dir.path), "token", "host"
    return Configuration(*words, causes=("the coordinator was killed",), **more)


@pytest.mark.parametrize(("steps", "goes_on"), [(4, 3), (3, 3), (2, 0)])
def test_a_new_coordinator_resumes_from_a_snapshot_whose_rows_exist(
    files: RunFiles, run_dir: RunDir, steps: int, goes_on: int
) -> None:
    for step in range(1, steps + 1):
        files.add_step(result(step))
    snapshot = Snapshot(3, 1, 2, 0.0, 0)
    begins = read_start(after_a_kill(run_dir, snapshot=snapshot, stages=1), OPTIONS, run_dir)
    assert begins.stages == 1
    assert begins.recorded == steps
    assert (begins.snapshot[0].step if begins.snapshot else 0) == goes_on


def test_a_new_coordinator_resumes_from_a_checkpoint_that_was_not_replaced_completely(
    run_dir: RunDir,
) -> None:
    """The step was saved again, after the evaluation with which a resumed run began."""
    saved = complete(run_dir, 3)
    saved.rename(saved.with_name(f".{saved.name}.replaced"))
    resumed = replace(OPTIONS, resume=str(saved), resume_step=3)
    begins = read_start(after_a_kill(run_dir), resumed, run_dir)
    assert begins.on_disk
    assert begins.on_disk[1].step == 3


def test_a_replaced_checkpoint_that_cannot_be_removed_is_no_error(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = complete(run_dir, 3)
    left.rename(left.with_name(f".{left.name}.replaced"))
    complete(run_dir, 3)

    def fail(path: Path) -> NoReturn:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", fail)
    begins = read_start(after_a_kill(run_dir), OPTIONS, run_dir)
    assert begins.on_disk
    assert begins.on_disk[1].step == 3


def test_a_directory_that_cannot_be_searched_at_the_end_is_no_error(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict has been sent: another one would take its place."""

    def refuse(run_dir: RunDir) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(run_dir.timeline))

    monkeypatch.setattr(RunDir, "worker_rings", refuse)
    files.close()
