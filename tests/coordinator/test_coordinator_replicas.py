"""Several replicas: commands, which replica's messages count, and what must be equal."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from pipeworker.coordinator.effects import Commit, WritePlan
from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause
from pipeworker.facts.step import Batch, StepResult
from pipeworker.plan.text import parse
from pipeworker.wire.lines import HostLost, Planned, Restart, Snapshot
from pipeworker.wire.messages.checkpoint import Save, Saved
from pipeworker.wire.messages.directions import Advance, Finish
from pipeworker.wire.messages.plan import Plan
from pipeworker.wire.messages.presence import Welcome
from pipeworker.wire.messages.step import (
    Call,
    CallKind,
    EvaluationDone,
    RunStep,
    Upcoming,
    Update,
    Wait,
)
from support.pure.coordinator import (
    BATCH,
    ScriptedJob,
    evaluation_of,
    of,
    own_loop_job,
    ready_of,
    replaceable_job,
    reply_of,
    runs,
    updates,
)

TWO = {"replicas": 2, "microbatches": 4}
"""Ranks 0 and 1 are replica 0, ranks 2 and 3 replica 1."""
OTHER = dataclasses.replace(BATCH, digest=1)


def two(**options: Any) -> ScriptedJob:
    return ScriptedJob(2, **{**TWO, **options})


def test_every_replica_receives_its_stages_and_channels() -> None:
    job = two().described()
    for rank in range(4):
        (welcome,) = job.sent(rank, Welcome)
        assert (welcome.stages, welcome.replicas) == (((0,), (1,)), 2)
        (plan,) = job.sent(rank, Plan)
        stage = rank % 2
        assert [part.stage for part in plan.ranges] == [stage]
        assert {"0>1/activation", "1>0/gradient", "0>1/target"} <= set(plan.edges)
        assert {edge for edge in plan.edges if "/sum" in edge} == {
            f"{stage}>{stage}/sum@0>1",
            f"{stage}>{stage}/sum@1>0",
        }


def test_the_plan_has_the_stages_of_every_replica() -> None:
    job = two().running()
    (planned,), (written,) = of(job.effects, Planned), of(job.effects, WritePlan)
    shown = written.content
    assert [(s["replica"], s["stage"], s["pid"] - 1000) for s in shown["stages"]] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 2),
        (1, 1, 3),
    ]
    assert planned.balance == (3, 2)
    assert (shown["replicas"], shown["microbatches"], len(shown["stages"])) == (2, 4, 4)
    assert parse("\n".join(shown["actions"])).microbatches == 2
    assert planned.replicas == 2


def test_each_replica_runs_the_schedule_of_its_own_micro_batches() -> None:
    odd = dataclasses.replace(BATCH, microbatches=3)
    job = two().described()
    job.ready(odd)
    texts = [job.runs(rank)[-1].actions.split() for rank in range(4)]
    assert [sum(word.startswith(("0F", "1F")) for word in text) for text in texts] == [2, 2, 1, 1]
    for text in texts:
        assert [word[1:] for word in text[-3:]] == ["SCATTER0", "SUM0", "GATHER0"]
    assert {(run.batch, run.first, run.complete) for run in runs(job.effects)} == {(odd, 0, True)}


def test_a_replica_may_have_no_micro_batches() -> None:
    one = dataclasses.replace(BATCH, samples=1, microbatches=1)
    job = two().described()
    job.ready(one)
    assert job.runs(2)[-1].actions == "0L0 0SCATTER0 0SUM0 0GATHER0"


def test_losses_cover_all_replicas_and_the_norm_one() -> None:
    job = two(clip_grad_norm=1.0).running()
    ends = {1: (0.1, 0.2), 3: (0.3, 0.4)}
    for rank in job.ranks:
        effects = job.done(rank, 1, losses=ends.get(rank, ()), squares=(8.0,), busy=rank)
    (row,) = of(effects, StepResult)
    assert row.loss == ((0.1 + 0.2) + 0.3) + 0.4
    assert row.grad_norm == 4.0
    assert row.samples == BATCH.samples
    assert updates(effects)[0].scale == pytest.approx(0.25)


def test_counts_cover_all_replicas() -> None:
    job = two().running()
    ends = {1: ((1.0, 2.0), (1.0, 2.0)), 3: ((3.0, 4.0), (0.0, 5.0))}
    for rank in job.ranks:
        losses, counts = ends.get(rank, ((), ()))
        effects = job.done(rank, 1, losses=losses, counts=counts, squares=(16.0,))
    (row,) = of(effects, StepResult)
    assert row.loss == 10.0 / 8.0
    assert updates(effects)[0].divisor == 8.0
    assert row.grad_norm == math.sqrt(32.0) / 8.0


def test_replicas_that_read_different_data_are_named() -> None:
    job = two().described()
    for rank in job.ranks:
        plan = job.sent(rank, Plan)[-1]
        batch = {0: BATCH, 2: OTHER}.get(rank)
        job.receive(ready_of(rank, plan, job.layers, batch))
    assert job.failure.cause is Cause.USAGE
    assert job.ended.exit_status == 2
    text = "data(): replica 1 read another mini-batch for step 1 than replica 0"
    assert job.failure.message.startswith(text)


@pytest.mark.parametrize("other", [OTHER, None, dataclasses.replace(BATCH, samples=9)])
def test_replicas_that_diverge_later_are_named(other: Batch | None) -> None:
    job = two().running()
    for rank in job.ranks:
        batch = {0: BATCH, 2: other}.get(rank)
        job.done(rank, 1, batch=batch)
    assert "another mini-batch for step 2" in job.failure.message


def test_replicas_may_number_shapes_differently() -> None:
    job = two().running()
    for rank in job.ranks:
        batch = {0: BATCH, 2: dataclasses.replace(BATCH, signature=7)}.get(rank)
        job.done(rank, 1, batch=batch)
    assert {run.batch for run in runs(job.effects)} == {BATCH}


def test_only_the_first_replica_announces_mini_batches() -> None:
    job = two().running()
    assert job.receive(Upcoming(0, 3)) == []
    job.receive(Upcoming(2, 3))
    assert job.failure.cause is Cause.INTERNAL


def test_gradients_are_reduced_only_at_the_end_of_a_step() -> None:
    job = two(accumulate=2).running()
    job.step(1)
    job.step(1)
    assert [run.complete for run in job.runs(3)] == [False, True, False]
    assert [run.first for run in job.runs(3)] == [0, 4, 0]


def test_gradients_are_reduced_when_the_data_ends_within_a_step() -> None:
    job = two(accumulate=3, steps=None).running()
    job.step(1)
    job.step(1, batch=None)
    last = job.runs(3)[-1]
    assert last == RunStep(1, Batch(1, 0, 0, 0), True, last.actions, first=8, complete=True)
    assert last.actions == "1SCATTER0 1SUM0 1GATHER0"
    assert not of(job.effects, StepResult)
    for rank in job.ranks:
        effects = job.done(rank, 1, batch=None, losses=(), squares=(4.0,))
    (row,) = of(effects, StepResult)
    assert (row.samples, row.loss, row.grad_norm) == (2 * BATCH.samples, 1.5, math.sqrt(8.0) / 2)
    (update,) = [m.update for m in job.sent(3, Advance) if isinstance(m.update, Update)]
    assert update.divisor == 2.0


def test_counts_divide_when_the_data_ends_within_a_step() -> None:
    job = two(accumulate=3, steps=None).running()
    for rank in job.ranks:
        job.done(rank, 1, batch=None, counts=(2.0, 3.0) if rank in job.lasts else ())
    effects = job.step(1, batch=None, losses=(), counts=())
    assert {update.divisor for update in updates(effects)} == {10.0}


def test_gradients_are_reduced_at_the_end_of_an_epoch_before_the_next_mini_batch() -> None:
    job = two(accumulate=3, steps=None, epochs=2).running()
    following = dataclasses.replace(BATCH, epoch=1)
    job.step(1, batch=following)
    assert not of(job.effects, StepResult)
    empty = job.runs(0)[-1]
    assert (empty.step, empty.batch.microbatches, empty.complete, empty.last) == (1, 0, True, True)
    job.step(1, batch=following)
    assert [row.step for row in of(job.effects, StepResult)] == [1]
    assert (job.runs(0)[-1].step, job.runs(0)[-1].batch) == (2, following)


def test_one_replica_reduces_nothing() -> None:
    job = ScriptedJob(2, microbatches=4, accumulate=3, steps=None).running()
    job.step(1)
    job.step(1, batch=None)
    assert [row.step for row in of(job.effects, StepResult)] == [1]


def test_the_first_replica_evaluates() -> None:
    job = two(evaluate_every=1, steps=1).running()
    job.step(1)
    for rank in job.ranks:
        effects = job.receive(EvaluationDone(rank, 1, 0, evaluation_of(1) if rank == 1 else None))
    assert job.state() is State.SAVING
    assert effects


def test_a_result_of_another_replica_is_invalid() -> None:
    job = two(evaluate_every=1, steps=1).running()
    job.step(1)
    job.receive(EvaluationDone(3, 1, 0, evaluation_of(1)))
    assert job.failure.cause is Cause.INTERNAL


def test_the_first_replica_writes_checkpoints() -> None:
    job = two(steps=1).running()
    job.step(1)
    assert [type(job.sent(rank, Advance)[-1].next) for rank in job.ranks] == [Save] * 4
    assert job.job.generation.awaited == {0, 1}
    job.saved()
    assert len(of(job.effects, Commit)) == 1
    job.checkpoint_committed()
    assert job.ended.status == "done"
    assert all(isinstance(job.sent(rank, Advance)[-1].next, Finish) for rank in job.ranks)


def test_a_checkpoint_beside_steps_needs_only_the_first_replica() -> None:
    job = two(checkpoint_every="1", steps=9).running()
    job.step(1)
    assert all(copy.save for rank in job.ranks for copy in job.copies(rank))
    job.step(2)
    job.saved(1)
    assert of(job.effects, Commit)


def test_the_loss_of_a_worker_of_any_replica_is_recovered() -> None:
    """Every replica has the state; a snapshot is that of one replica's workers."""
    job = replaceable_job(2, **TWO).running()
    job.step(1)
    job.step(2)
    (snapshot,) = of(job.effects, Snapshot)
    assert (snapshot.step, snapshot.ranks) == (1, 2)
    job.exited(3, -9)
    (restart,) = of(job.effects, Restart)
    assert restart.stages == 2
    assert restart.cause.startswith("the worker of stage 1 of replica 1 was killed by SIGKILL")
    job.start()
    (_, welcome) = job.sent(3, Welcome)
    assert welcome.restore is not None
    assert (welcome.restore.step, welcome.restore.ranks, welcome.replicas) == (1, 2, 2)


@pytest.mark.parametrize("survives", [True, False])
def test_a_host_loss_drops_a_snapshot_that_does_not_survive_it(*, survives: bool) -> None:
    job = replaceable_job(2, **TWO).running()
    job.step(1)
    job.step(2)
    job.handle(HostLost((2, 3), "host b is lost", survives))
    job.start()
    restore = job.sent(1, Welcome)[-1].restore
    assert (restore is not None) is survives
    assert restore is None or restore.step == 1


def test_with_sharded_optimizers_every_replica_saves_its_part() -> None:
    job = replaceable_job(2, shard_optimizer=True, **TWO).running()
    job.step(1)
    job.step(2)
    (snapshot,) = of(job.effects, Snapshot)
    assert snapshot.ranks == 4
    job.request_checkpoint()
    job.step(3)
    assert all(job.copies(rank)[-1].save for rank in job.ranks)
    job.step(4)
    for rank in job.ranks:
        assert not of(job.effects, Commit)
        job.receive(Saved(rank, 3))
    assert of(job.effects, Commit)


def test_with_fewer_workers_every_replica_shrinks() -> None:
    job = replaceable_job(3, min_stages=1, **TWO).running()
    job.step(1)
    for _ in range(3):  # the last two before a step has run
        job.exited(4, -9)
    assert [restart.stages for restart in of(job.effects, Restart)] == [3, 3, 2]
    assert job.placement.ranks == 4


def test_all_replicas_must_pass_the_same_mini_batch() -> None:
    job = own_loop_job(**TWO)
    job.called(CallKind.STEP, 0, 1, 2)
    effects = job.called(CallKind.STEP, 3)
    assert [run.complete for run in runs(effects)] == [True] * 4
    for rank in job.ranks:
        job.done(rank, 1, batch=None)
    assert isinstance(job.sent(3, Advance)[-1].next, Wait)
    for rank in job.ranks:
        effects = job.receive(Call(rank, CallKind.STEP, {0: BATCH, 2: OTHER}.get(rank)))
    refused = "replica 1 was given another mini-batch than replica 0"
    assert refused in reply_of(effects).message


def test_a_step_that_is_half_done_cannot_go_on_without_its_mini_batch() -> None:
    job = own_loop_job(**TWO)
    job.called(CallKind.STEP, last=False)
    job.step(1, batch=None)
    for rank in job.ranks:
        job.receive(Call(rank, CallKind.STEP, {0: BATCH, 2: OTHER}.get(rank)))
    assert "replica 1 was given another mini-batch than replica 0" in job.failure.message


def test_every_replica_must_pass_a_mini_batch() -> None:
    job = own_loop_job(**TWO)
    for rank in job.ranks:
        effects = job.receive(Call(rank, CallKind.STEP, BATCH if rank == 0 else None))
    assert "the first stage of replica 1 was given no mini-batch" in reply_of(effects).message


def test_the_last_of_several_calls_completes_the_step() -> None:
    job = own_loop_job(**TWO)
    job.called(CallKind.STEP, last=False)
    job.step(1, batch=None)
    job.called(CallKind.STEP)
    assert [run.complete for run in job.runs(0)] == [False, True]


def test_a_step_is_done_when_every_rank_is() -> None:
    job = two().running()
    for rank in (0, 1, 2):
        job.done(rank, 1)
    assert not of(job.effects, StepResult)
    job.done(3, 1)
    assert of(job.effects, StepResult)
