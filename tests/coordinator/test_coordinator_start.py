"""Where a job goes on that another process has begun: from a checkpoint, or from memory."""

from __future__ import annotations

from typing import Any

import pytest

from pipeworker.coordinator.effects import Commit, Log, Send, Status, Warn
from pipeworker.coordinator.job import Start
from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.states import State
from pipeworker.coordinator.steps.snapshots import Mark
from pipeworker.wire.lines import HostLost, Snapshot
from pipeworker.wire.messages.advance import Advance, Finish
from pipeworker.wire.messages.checkpoint import Copy, Restore
from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.failure import Cause
from pipeworker.wire.messages.plan import Described
from pipeworker.wire.messages.presence import Welcome
from support.coordinator import (
    LAYERS,
    Scripted,
    commit,
    copies,
    of,
    of_messages,
    replaced,
    runs,
    saves,
)

DISK = Restore(7, "runs/x/checkpoints/step-00000007")
NAMES = tuple(map(str, range(len(LAYERS))))


def resumed(scaler: Scaler | None = None) -> Start:
    """From the checkpoint of step 7."""
    return Start(Mark(7, scaler), DISK, NAMES, recorded=7, evaluated=7, saved=7)


def test_a_run_goes_on_behind_its_checkpoint() -> None:
    job = Scripted(2, steps=9, start=resumed(), checkpoint_every="7")
    job.join()
    assert [welcome.restore for welcome in job.sent(1, Welcome)] == [DISK]
    job.describe()
    run = runs(job.ready())[0]
    assert (run.step, run.last) == (8, False)
    job.step(8)
    assert [advance.next for advance in saves(job.step(9))]
    assert [written.step for written in of(job.saved(), Commit)] == [9]
    job.committed()
    assert (job.ended.status, job.ended.steps) == (Status.DONE, 9)
    assert job.rows == [8, 9]
    assert job.ended.causes == ()


def test_a_run_whose_steps_are_done_ends_as_soon_as_its_stages_are_built() -> None:
    """Its checkpoint is there."""
    job = Scripted(2, steps=7, start=resumed())
    effects = job.again()
    assert of_messages(effects, Advance) == [Advance(Finish())] * 2
    assert (job.ended.status, job.ended.steps) == (Status.DONE, 7)
    assert not of(job.effects, Commit)


def test_so_does_one_whose_data_has_ended() -> None:
    job = Scripted(2, steps=None, start=resumed())
    job.join()
    job.describe()
    job.ready(batch=None)
    assert (job.ended.status, job.ended.steps) == (Status.DONE, 7)


@pytest.mark.parametrize(
    ("layers", "names", "what"),
    [
        (LAYERS[:4], (), "model() gives 4 layers, and 5 in the checkpoint"),
        (
            LAYERS,
            ("0", "1", "2", "three", "4"),
            "model() gives a layer 'three', which is '3' in the checkpoint",
        ),
    ],
)
def test_another_model_does_not_go_on(
    layers: tuple[str, ...], names: tuple[str, ...], what: str
) -> None:
    job = Scripted(2, start=resumed())
    job.join()
    for rank in job.ranks:
        job.says(Described(rank, layers, (), names=names))
    assert job.failure.message == f"cannot go on from step 7: {what}"
    assert (job.failure.cause, job.ended.exit_status) == (Cause.USAGE, 2)


def test_the_same_model_under_other_names_of_classes_does() -> None:
    """It is names that weights are found by."""
    job = Scripted(2, start=resumed())
    job.join()
    job.describe(("A", "B", "C", "D", "E"))
    assert job.state() is State.BUILDING


@pytest.mark.parametrize(
    ("precision", "was", "scale"),
    [
        ("fp16", Scaler(8.0, 5), 8.0),
        ("fp16", None, 2.0**16),  # it had another precision
        ("fp32", None, 1.0),
    ],
)
def test_the_loss_scale_goes_on_where_there_was_one(
    precision: str, was: Scaler | None, scale: float
) -> None:
    job = Scripted(2, steps=9, precision=precision, start=resumed(was)).running()
    assert job.runs(0)[0].loss_scale == scale


def test_before_there_is_a_snapshot_a_loss_goes_back_to_the_checkpoint() -> None:
    job = replaced(steps=19, snapshot_every=50, precision="fp16", start=resumed(Scaler(8.0)))
    job.running()
    job.step(8, squares=(float("inf"),))
    job.exited(1, -9)
    run = runs(job.again())[0]
    assert (run.step, run.loss_scale) == (8, 8.0)
    assert [welcome.restore for welcome in job.sent(1, Welcome)] == [DISK, DISK]
    job.step(8)
    assert job.rows == [8]


def test_an_interrupt_before_the_first_step_has_nothing_to_save() -> None:
    job = replaced(start=resumed())
    job.join()
    job.interrupt()
    assert (job.ended.status, job.ended.steps) == (Status.INTERRUPTED, 7)


# In the place of a coordinator that was lost.

LEFT = Restore(5, slot=1, ranks=2)


def left(**more: Any) -> Start:
    """What one left that had come to step 8, with the state after step 5 in memory."""
    causes = ("the coordinator was killed",)
    snapshot = Mark(5), LEFT
    return Start(snapshot=snapshot, recorded=8, evaluated=6, saved=4, causes=causes, **more)


def test_another_coordinator_goes_on_from_what_is_in_memory() -> None:
    job = replaced(generation=2, start=left(), evaluate_every=3, steps=9)
    job.join()
    assert [welcome.restore for welcome in job.sent(1, Welcome)] == [LEFT]
    job.describe()
    assert runs(job.ready())[0].step == 6
    (line,) = of(job.effects, Warn)
    said = "the coordinator was killed; went on after step 5, 3 steps repeated, in "
    assert line.text.startswith(said)
    for step in (6, 7, 8, 9):
        job.step(step)
        if job.state() is State.EVALUATING:
            job.evaluated(step)
    assert job.rows == [9]  # 6, 7 and 8 are recorded already
    assert [evaluation.step for evaluation in of(job.effects, Evaluation)] == [9]
    job.saved()
    job.committed()
    assert job.ended.causes == ("the coordinator was killed",)
    assert {send.generation for send in of(job.effects, Send)} == {2}


def test_the_memory_it_went_on_from_stays_until_there_is_another() -> None:
    job = replaced(start=left()).running()
    assert copies(job.step(6)) == [Copy(6, 0)] * 2
    job.exited(1, -9)
    job.again()
    assert [welcome.restore for welcome in job.sent(1, Welcome)] == [LEFT, LEFT]
    assert of(job.effects, Snapshot) == []  # the launcher knows of it
    job.step(6)
    assert copies(job.step(7)) == [Copy(7, 1)] * 2
    assert of(job.effects, Snapshot) == [Snapshot(6, 0, 2)]


def test_without_that_memory_it_goes_back_to_a_checkpoint_or_to_the_beginning() -> None:
    disk = Restore(4, "/run/checkpoints/step-00000004")
    for start, back in ((left(mark=Mark(4), restore=disk), disk), (left(), None)):
        job = replaced(start=start).running()
        job.handle(HostLost((1,), "host b is lost"))
        job.join()
        assert [welcome.restore for welcome in job.sent(1, Welcome)] == [LEFT, back]
        job.describe()
        assert runs(job.ready())[0].step == (back.step if back else 0) + 1


def test_it_fails_with_what_was_recorded_before() -> None:
    job = replaced(start=left(), restarts=1).running()
    job.exited(1, -9)
    job.exited(1, -9)
    assert job.failure.message == "the worker of stage 1 was killed by signal 9"
    assert job.ended.steps == 8
    assert len(job.ended.causes) == 2


def test_an_interrupt_before_its_first_step_saves_what_is_in_memory() -> None:
    job = replaced(start=left())
    job.join()
    job.interrupt()
    job.describe()
    assert saves(job.ready())
    assert job.saved() == [commit(5)]
    job.committed()
    assert job.ended.status is Status.INTERRUPTED
    assert any("interrupted: " in log.text for log in of(job.effects, Log))
