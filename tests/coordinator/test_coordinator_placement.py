"""Several stages per worker: commands, messages and names."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pipeworker.coordinator.effects import WritePlan
from pipeworker.errors import ScheduleError
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.step import StepResult
from pipeworker.plan import orders
from pipeworker.plan.actions import Action, format_actions
from pipeworker.plan.orders.gpipe import gpipe
from pipeworker.plan.placement import Placement
from pipeworker.wire.lines import Planned
from pipeworker.wire.messages.plan import Plan, StageRange
from pipeworker.wire.messages.presence import Failed, Heartbeat, Welcome
from pipeworker.wire.messages.step import Call, CallKind, Upcoming
from support.pure.coordinator import (
    BATCH,
    LOOPED,
    NOWHERE,
    PATIENCE,
    TIMINGS,
    ScriptedJob,
    of,
    ready_of,
    reply_of,
)
from support.pure.orders import build

LAYERS = ("Linear", "ReLU", "Linear", "Tanh", "Linear", "GELU", "Linear", "Softmax")


@pytest.fixture(autouse=True)
def looped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(orders.ORDERS, "looped", LOOPED)


def two(**options: Any) -> ScriptedJob:
    """Return a job whose worker 0 holds stages 0 and 2, and worker 1 stages 1 and 3."""
    return ScriptedJob(2, layers=LAYERS, schedule="looped", **options)


def test_a_worker_builds_all_its_stages() -> None:
    job = two().described()
    for rank in (0, 1):
        assert [welcome.stages for welcome in job.sent(rank, Welcome)] == [((0, 2), (1, 3))]
    (first,), (second,) = job.sent(0, Plan), job.sent(1, Plan)
    assert first.ranges == (StageRange(0, 0, 2), StageRange(2, 4, 6))
    assert second.ranges == (StageRange(1, 2, 4), StageRange(3, 6, 8))
    assert {"0>1/activation", "1>2/activation", "2>3/activation"} <= set(first.edges)
    assert first.evaluation.startswith("0F0 0>A0 ")
    assert {"0F0", "2F0"} <= set(first.evaluation.split())
    assert {"1F0", "3F0"} <= set(second.evaluation.split())


def test_the_plan_names_every_stage_with_its_rank() -> None:
    job = two().running()
    (planned,), (written,) = of(job.effects, Planned), of(job.effects, WritePlan)
    shown = written.content
    assert [stage["pid"] for stage in shown["stages"]] == [1000, 1001, 1000, 1001]  # by rank
    assert planned.balance == (2, 2, 2, 2)
    assert [stage["classes"] for stage in shown["stages"]] == [
        list(LAYERS[first : first + 2]) for first in (0, 2, 4, 6)
    ]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_job_with_two_stages_a_worker_runs_to_its_end(workers: int) -> None:
    job = ScriptedJob(workers, layers=LAYERS, schedule="looped", evaluate_every=2).running()
    assert job.placement.stages == 2 * workers
    built = build("looped", workers, 4, "auto")
    for rank, actions in enumerate(built.workers):
        assert job.runs(rank)[0].actions == format_actions(actions)
    for step in (1, 2, 3):
        job.step(step)
        if step == 2:
            job.evaluated(2)
    job.checkpointed()
    assert (job.ended.status, job.ended.steps) == ("done", 3)
    assert len(job.ended.peak_memory) == workers


def test_losses_come_from_the_worker_with_the_last_stage() -> None:
    """No other worker has losses, although every worker holds a stage."""
    job = two().running()
    job.done(0, 1, losses=(100.0,))
    (row,) = of(job.done(1, 1, losses=(0.5, 0.25)), StepResult)
    assert row.loss == 0.75


def test_the_next_mini_batch_comes_from_the_worker_with_stage_0() -> None:
    job = two().running()
    other = dataclasses.replace(BATCH, signature=9)
    job.done(1, 1, batch=other)
    job.done(0, 1)
    assert [run.batch for run in job.runs(1)] == [BATCH, BATCH]
    job.done(1, 2, batch=other)
    job.done(0, 2, batch=None)
    assert len(job.runs(0)) == 2  # the data has ended


def test_a_first_mini_batch_from_another_worker_is_ignored() -> None:
    job = two().described()
    (first,), (second,) = job.sent(0, Plan), job.sent(1, Plan)
    job.receive(ready_of(1, second, LAYERS, dataclasses.replace(BATCH, signature=9)))
    job.receive(ready_of(0, first, LAYERS, BATCH))
    assert [run.batch for run in job.runs(1)] == [BATCH]


def test_a_call_needs_a_mini_batch_on_the_worker_with_stage_0() -> None:
    job = two(own_loop=True, steps=None).running()
    job.receive(Call(1, CallKind.STEP, BATCH))
    assert reply_of(job.receive(Call(0, CallKind.STEP))).message == (
        "step(): the first stage was given no mini-batch; pass one on its rank"
    )


def test_different_calls_are_reported_with_all_stages() -> None:
    job = two(own_loop=True, steps=None).running()
    job.called(CallKind.CLOSE, 0)
    job.called(CallKind.EVALUATE, 1)
    assert job.failure.message.startswith(
        "the script: stages 0, 2 called close() while stages 1, 3 called evaluate(batch)"
    )


def test_a_worker_is_named_by_all_its_stages() -> None:
    job = two().running()
    job.exited(0, -9)
    assert job.failure.message == "the worker of stages 0, 2 was killed by SIGKILL"
    assert job.failure.stage == "stages 0, 2"
    silent = two(worker_timeout=PATIENCE).running()
    silent.now += PATIENCE + 0.1
    silent.receive(Heartbeat(0, NOWHERE))
    silent.tick()
    assert silent.failure.message == "stages 1, 3 (pid 1001 on host) has not answered for 60 s"
    gone = two().running()
    gone.now += TIMINGS.silence
    gone.receive(Failed(1, Failure(Cause.PEER, "closed")))
    gone.tick(TIMINGS.grace)
    assert gone.failure.message == "the worker of stages 0, 2 (pid 1000 on host) is gone"


@pytest.mark.parametrize(
    ("rank", "layer", "stage"),
    [
        *((0, 0, "stage 0"), (0, 5, "stage 2"), (1, 2, "stage 1"), (1, 7, "stage 3")),
        *((0, -1, "stages 0, 2"), (1, -1, "stages 1, 3")),
        (0, 3, "stages 0, 2"),  # a layer that the rank does not hold
        (0, 8, "stages 0, 2"),
    ],
)
def test_a_failure_at_a_layer_names_its_stage(rank: int, layer: int, stage: str) -> None:
    job = two().running()
    at = Position(Phase.FORWARD, 1, 0, layer)
    job.receive(Failed(rank, Failure(Cause.USER, "no", position=at)))
    assert job.failure.stage == stage


@pytest.mark.parametrize(("rank", "layer"), [(0, 1), (0, 4), (1, 3), (1, 6)])
def test_the_class_of_a_layer_is_found_in_any_stage(rank: int, layer: int) -> None:
    job = two().running()
    job.exited(rank, 1, Position(Phase.BACKWARD, 1, 0, layer))
    assert job.failure.layer_class == LAYERS[layer]
    assert job.failure.stage == f"stage {layer // 2}"


def test_the_norm_does_not_depend_on_the_placement() -> None:
    """Rows are equal for any placement, because sums are exact."""
    rows = []
    for squares in ((0.1, 0.2), (0.2, 0.1)):
        job = two().running()
        for rank, square in enumerate(squares):
            effects = job.done(rank, 1, squares=(square, 1e16))
        rows.append(of(effects, StepResult)[0].grad_norm)
    assert rows[0] == rows[1]


def test_one_worker_may_hold_the_first_and_the_last_stage() -> None:
    job = ScriptedJob(1, layers=LAYERS, schedule="looped", steps=1).running()
    assert (job.first, job.last) == (0, 0)
    job.step(1)
    job.checkpointed()
    assert job.ended.status == "done"


@pytest.mark.parametrize("upcoming", [Upcoming(0, 64), Upcoming(1, 2)])
def test_an_invalid_mini_batch_ends_the_job(upcoming: Upcoming) -> None:
    """It has too many micro-batches, or comes from a worker without stage 0."""
    job = two().running()
    job.receive(upcoming)
    worker = f"{job.placement.names(upcoming.rank)} (pid {1000 + upcoming.rank} on host)"
    assert job.failure.message.startswith(
        f"{worker} sent an invalid message: Upcoming: a mini-batch "
    )


def test_a_mini_batch_without_a_schedule_ends_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator survives; a step has been run already."""

    def whole(placement: Placement, microbatches: int) -> list[list[Action]]:
        if microbatches < 4:
            raise ScheduleError("only for four micro-batches")
        return gpipe(placement, microbatches)

    monkeypatch.setitem(orders.ORDERS, "looped", dataclasses.replace(LOOPED, compute=whole))
    job = two().running()
    for rank in job.ranks:
        batch = dataclasses.replace(BATCH, microbatches=3) if rank == job.first else None
        job.done(rank, 1, batch=batch)
    assert job.failure.cause is Cause.USER
    assert job.failure.message == "only for four micro-batches"
    assert job.ended.exit_status == 1
