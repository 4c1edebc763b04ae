"""Jobs that another process began: resumed from a checkpoint or from memory."""

from __future__ import annotations

from typing import Any

import pytest

from pipeworker.coordinator.effects import Commit, JobState, Log, Send
from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.coordinator.steps.progress import Start
from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause
from pipeworker.facts.step import Evaluation
from pipeworker.wire.lines import HostLost, Snapshot, Warned
from pipeworker.wire.messages.checkpoint import Copy, Restore
from pipeworker.wire.messages.directions import Advance, Finish
from pipeworker.wire.messages.plan import Described
from pipeworker.wire.messages.presence import Welcome
from support.pure.coordinator import (
    LAYERS,
    ScriptedJob,
    commit,
    copies,
    evaluation_of,
    messages_of,
    of,
    replaceable_job,
    runs,
    saves,
)

DISK = Restore(7, "runs/x/checkpoints/step-00000007")
NAMES = tuple(map(str, range(len(LAYERS))))


def resumed(scaler: LossScaler | None = None) -> Start:
    """Return a start from the checkpoint of step 7."""
    return Start((JobState(7, scaler), DISK), None, NAMES, recorded=7, saved=7)


def test_a_run_resumes_after_its_checkpoint() -> None:
    job = ScriptedJob(2, steps=9, start=resumed(), checkpoint_every="7")
    job.join()
    assert [welcome.restore for welcome in job.sent(1, Welcome)] == [DISK]
    job.describe()
    run = runs(job.ready())[0]
    assert (run.step, run.last) == (8, False)
    job.step(8)
    assert [advance.next for advance in saves(job.step(9))]
    assert [written.state.step for written in of(job.saved(), Commit)] == [9]
    job.checkpoint_committed()
    assert (job.ended.status, job.ended.steps) == ("done", 9)
    assert job.rows == [8, 9]
    assert job.ended.causes == ()


def test_the_seconds_of_a_job_count_from_its_first_coordinator() -> None:
    """Another one, which was lost, had run for a while."""
    seconds = []
    for elapsed in (0.0, 7.5):
        job = ScriptedJob(2, steps=1, start=Start(elapsed=elapsed)).running()
        job.step(1)
        job.checkpointed()
        seconds.append(job.ended.seconds)
    assert seconds[1] == seconds[0] + 7.5


def test_a_resumed_run_without_steps_left_ends_after_building() -> None:
    """Its checkpoint exists."""
    job = ScriptedJob(2, steps=7, start=resumed())
    effects = job.start()
    assert messages_of(effects, Advance) == [Advance(Finish())] * 2
    assert (job.ended.status, job.ended.steps) == ("done", 7)
    assert not of(job.effects, Commit)


def test_a_resumed_run_without_data_left_ends_after_building() -> None:
    job = ScriptedJob(2, steps=None, start=resumed()).described()
    job.ready(batch=None)
    assert (job.ended.status, job.ended.steps) == ("done", 7)


@pytest.mark.parametrize(
    ("layers", "names", "what"),
    [
        (LAYERS[:4], (), "model() has 4 layers, and the checkpoint has 5"),
        (
            LAYERS,
            ("0", "1", "2", "three", "4"),
            "model() has a layer 'three', which is '3' in the checkpoint",
        ),
    ],
)
def test_a_different_model_is_rejected(
    layers: tuple[str, ...], names: tuple[str, ...], what: str
) -> None:
    job = ScriptedJob(2, start=resumed())
    job.join()
    for rank in job.ranks:
        job.receive(Described(rank, layers, (), names=names))
    assert job.failure.message == (
        f"cannot resume from step 7: {what}; resume with the model that was saved"
    )
    assert (job.failure.cause, job.ended.exit_status) == (Cause.USAGE, 2)


def test_other_class_names_are_accepted() -> None:
    """Weights are found by the names of layers."""
    job = ScriptedJob(2, start=resumed())
    job.join()
    job.describe(("A", "B", "C", "D", "E"))
    assert job.state() is State.BUILDING


@pytest.mark.parametrize(
    ("precision", "was", "scale"),
    [
        ("fp16", LossScaler(8.0, 5), 8.0),
        ("fp16", None, 2.0**16),  # it was saved with another precision
        ("fp32", None, 1.0),
    ],
)
def test_a_recorded_loss_scale_is_resumed(
    precision: str, was: LossScaler | None, scale: float
) -> None:
    job = ScriptedJob(2, steps=9, precision=precision, start=resumed(was)).running()
    assert job.runs(0)[0].loss_scale == scale


def test_without_a_snapshot_a_loss_resumes_from_the_checkpoint() -> None:
    job = replaceable_job(
        steps=19, snapshot_every=50, precision="fp16", start=resumed(LossScaler(8.0))
    )
    job.running()
    job.step(8, squares=(float("inf"),))
    job.exited(1, -9)
    run = runs(job.start())[0]
    assert (run.step, run.loss_scale) == (8, 8.0)
    assert [welcome.restore for welcome in job.sent(1, Welcome)] == [DISK, DISK]
    job.step(8)
    assert job.rows == [8]


def test_an_interrupt_before_the_first_step_has_nothing_to_save() -> None:
    job = replaceable_job(start=resumed())
    job.join()
    job.interrupt()
    assert (job.ended.status, job.ended.steps) == ("interrupted", 7)


# After the loss of a coordinator.

LEFT = Restore(5, slot=1, ranks=2)


def left(**more: Any) -> Start:
    """Return the start that a coordinator left at step 8, with a snapshot of step 5."""
    causes = ("the coordinator was killed",)
    snapshot = JobState(5), LEFT
    return Start(snapshot=snapshot, recorded=8, saved=4, causes=causes, **more)


def test_a_new_coordinator_resumes_from_the_last_snapshot() -> None:
    start = left(evaluations=(evaluation_of(3), evaluation_of(6)), checkpoints=frozenset({3}))
    job = replaceable_job(generation=2, start=start, evaluate_every=3, steps=9)
    job.join()
    assert [welcome.restore for welcome in job.sent(1, Welcome)] == [LEFT]
    job.describe()
    assert runs(job.ready())[0].step == 6
    (line,) = of(job.effects, Warned)
    expected = "the coordinator was killed; resumed after step 5, 3 steps repeated, in "
    assert line.text.startswith(expected)
    for step in (6, 7, 8, 9):
        job.step(step)
        if job.state() is State.EVALUATING:
            job.evaluated(step)
    assert job.rows == [9]  # steps 6, 7 and 8 are already recorded
    assert [evaluation.step for evaluation in of(job.effects, Evaluation)] == [9]
    job.checkpointed()
    assert job.ended.causes == ("the coordinator was killed",)
    assert {send.generation for send in of(job.effects, Send)} == {2}


def test_the_resumed_snapshot_stays_until_the_next_is_complete() -> None:
    job = replaceable_job(start=left()).running()
    assert copies(job.step(6)) == [Copy(6, 0)] * 2
    job.exited(1, -9)
    job.start()
    assert [welcome.restore for welcome in job.sent(1, Welcome)] == [LEFT, LEFT]
    assert of(job.effects, Snapshot) == []  # the launcher knows it
    job.step(6)
    assert copies(job.step(7)) == [Copy(7, 1)] * 2
    assert of(job.effects, Snapshot) == [Snapshot(6, 0, 2)]


def test_without_a_snapshot_a_new_coordinator_resumes_from_disk_or_the_start() -> None:
    disk = Restore(4, "/run/checkpoints/step-00000004")
    for start, back in ((left(on_disk=(JobState(4), disk)), disk), (left(), None)):
        job = replaceable_job(start=start).running()
        job.handle(HostLost((1,), "host b is lost"))
        job.join()
        assert [welcome.restore for welcome in job.sent(1, Welcome)] == [LEFT, back]
        job.describe()
        assert runs(job.ready())[0].step == (back.step if back else 0) + 1


def test_a_failed_restart_reports_the_steps_recorded_before() -> None:
    job = replaceable_job(start=left(), max_restarts=1).running()
    job.exited(1, -9)
    job.exited(1, -9)
    assert job.failure.message == "the worker of stage 1 was killed by SIGKILL"
    assert job.ended.steps == 8
    assert len(job.ended.causes) == 2


def test_an_interrupt_before_the_first_step_saves_the_snapshot() -> None:
    job = replaceable_job(start=left())
    job.join()
    job.interrupt()
    job.describe()
    assert saves(job.ready())
    assert job.saved() == [commit(5)]
    job.checkpoint_committed()
    assert job.ended.status == "interrupted"
    assert any("interrupted: " in log.text for log in of(job.effects, Log))
