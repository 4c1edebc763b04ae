"""The present activity of the workers, as their heartbeats report it."""

from __future__ import annotations

from pipeworker.facts.position import Phase, Position
from pipeworker.wire.lines import Activity
from pipeworker.wire.messages.presence import Heartbeat
from support.pure.coordinator import ScriptedJob, of

MIB = 1 << 20


def beat(rank: int, memory: int = 0, evaluated: int = 0, length: int = 0) -> Heartbeat:
    at = Position(Phase.EVALUATION, 1)
    return Heartbeat(rank, at, memory=memory, evaluated=evaluated, evaluation_length=length)


def ticked(job: ScriptedJob, *beats: Heartbeat) -> list[Activity]:
    for one in beats:
        assert of(job.receive(one), Activity) == []
    return of(job.tick(0.1), Activity)


def test_the_memory_of_the_workers_is_reported_when_it_changes() -> None:
    job = ScriptedJob(2).running()
    assert ticked(job) == []
    assert ticked(job, beat(1, 5 * MIB + 7)) == [Activity((0, 5 * MIB))]
    assert ticked(job, beat(0, 3 * MIB), beat(1, 5 * MIB + 99)) == [Activity((3 * MIB, 5 * MIB))]
    assert ticked(job) == []


def test_an_evaluation_pass_is_reported_by_its_reader_alone() -> None:
    job = ScriptedJob(2, evaluate_every=1, steps=9).running()
    assert ticked(job, beat(0, 0, 7, 60)) == []  # it does not evaluate yet
    job.step(1)
    assert ticked(job, beat(0, 0, 12, 60), beat(1, 0, 13, 60)) == [Activity((), 12, 60)]
    assert ticked(job) == []
    assert ticked(job, beat(0, 0, 14, 60)) == [Activity((), 14, 60)]
    job.evaluated(1)
    assert ticked(job) == [Activity()]
