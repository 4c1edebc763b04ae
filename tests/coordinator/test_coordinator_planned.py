"""Jobs that follow the plan made of the facts of their layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pipeworker.coordinator.effects import Dropped, MakePlan, WritePlan
from pipeworker.coordinator.events import PlanMade
from pipeworker.coordinator.service import make_plan
from pipeworker.coordinator.steps.progress import Start
from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.wire.lines import Planned, Warned
from pipeworker.wire.messages.plan import Plan
from support.pure.coordinator import ScriptedJob, of
from support.pure.measured_job import facts, measure, measured_job


def planned_job(
    *seconds: float, limits: tuple[int | None, ...] = (), **options: Any
) -> ScriptedJob:
    """Return a job of two workers with a plan, whose layers take these seconds each."""
    layers = tuple(dataclasses.replace(facts(0, each), saved_bytes=100) for each in seconds)
    network = NetworkFacts(layers, limits=limits)
    return measured_job(start=Start(facts=network), recompute="auto", **options)


def ranges_of(job: ScriptedJob) -> list[tuple[int, int, int, str]]:
    plans = [job.sent(rank, Plan)[-1] for rank in job.ranks]
    return [(r.stage, r.first, r.stop, r.recompute) for plan in plans for r in plan.ranges]


def test_a_plan_balances_the_times_of_the_layers() -> None:
    job = planned_job(9, 3, 2, 2, 2)
    assert ranges_of(job) == [(0, 0, 1, "never"), (1, 1, 5, "never")]
    job.ready()
    (line,), (written,) = of(job.effects, Planned), of(job.effects, WritePlan)
    # The fill and the drain, and four micro-batches of 27 s.
    assert line.step_seconds == written.content["step_seconds"] == pytest.approx(4 * 27 + 27)
    assert line.busy_seconds == (4 * 27, 4 * 27)
    assert "a step takes" in line.why[0]
    first, last = written.content["stages"]
    assert first["seconds"] == {"forward": 36, "recompute": 0, "backward": 72}
    assert (last["layers"], last["worker"], last["limit_bytes"]) == ([1, 5], 1, None)


def test_the_bubble_of_a_plan_is_that_of_the_predicted_step() -> None:
    job = planned_job(9, 3, 2, 2, 2, balance=(4, 1))
    job.ready()
    (line,), (written,) = of(job.effects, Planned), of(job.effects, WritePlan)
    # The first stage takes 48 s for each of four micro-batches, and the last one 6 s.
    assert written.content["bubble"] == pytest.approx(1 - 4 * (48 + 6) / (2 * (4 * 48 + 6)))
    assert written.content["schedule_bubble"] == line.bubble == pytest.approx(1 / 5)


def test_a_given_balance_and_mode_are_kept() -> None:
    assert ranges_of(planned_job(9, 3, 2, 2, 2, balance=(4, 1))) == [
        (0, 0, 4, "never"),
        (1, 4, 5, "never"),
    ]
    given = measured_job(recompute="except_first")
    measure(given)
    assert {mode for *_, mode in ranges_of(given)} == {"except_first"}


def test_what_does_not_fit_is_recomputed() -> None:
    job = planned_job(*[1] * 5, limits=(1000, 1000))
    assert {mode for *_, mode in ranges_of(job)} == {"except_first", "never"}
    job.ready()
    (line,) = of(job.effects, Planned)
    assert any(why.startswith("recompute on stage") for why in line.why)


def test_a_plan_that_fits_nowhere_runs_with_a_warning_unless_the_memory_is_given() -> None:
    job = planned_job(*[1] * 5, limits=(10, 10))
    (warned,) = of(job.effects, Warned)
    assert warned.text.startswith("the job may run out of memory: --stages 2: does not fit")
    assert job.state() is State.BUILDING
    job = planned_job(*[1] * 5, memory=(10,))
    assert job.failure.cause is Cause.USAGE
    assert job.failure.message.startswith("--stages 2: does not fit into the memory")
    job = planned_job(*[1] * 5, limits=(10, 10), memory=(5000, 6000))
    assert not of(job.effects, Warned)


def test_the_fastest_schedule_places_the_stages_anew() -> None:
    job = planned_job(9, 9, 1, 1, 1, schedule="auto", replaceable=True)
    plan = job.sent(0, Plan)[-1]
    assert len([stage for held in plan.held for stage in held]) > 2
    assert job.job.placement.held == plan.held
    job.ready()
    (line,) = of(job.effects, Planned)
    assert line.held == plan.held
    assert any(why.startswith("schedule ") for why in line.why)
    assert job.state() is State.STEPPING
    names = [member.name for member in job.job.generation.members]
    assert names == [job.job.placement.names(rank) for rank in job.ranks]
    job.exited(1, -9)  # the next generation has the same plan
    job.start()
    assert job.sent(0, Plan)[-1] == plan


def test_a_plan_that_takes_long_can_be_interrupted_and_is_not_taken_for_another() -> None:
    job = planned_job(9, 3, 2, 2, 2, makes_plans=False, replaceable=True)
    assert job.state() is State.PLANNING
    (request,) = of(job.effects, MakePlan)
    job.exited(1, -9)
    job.described()
    late = make_plan(request)
    (dropped,) = job.handle(late)
    assert isinstance(dropped, Dropped)
    assert dropped.text.startswith("a plan of generation 1 while the plan is being made")
    job.handle(dataclasses.replace(late, generation=2))
    assert job.state() is State.BUILDING
    job = planned_job(9, 3, 2, 2, 2, makes_plans=False)
    job.interrupt()
    assert job.ended.exit_status == 130


def test_a_plan_that_cannot_be_made_ends_the_job() -> None:
    job = planned_job(1, 1, 1, 1, 1, makes_plans=False)
    job.handle(PlanMade(1, None, "the plan cannot be made"))
    assert job.failure.message == "the plan cannot be made"
