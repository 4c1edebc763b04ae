"""The planner's result: a plan with what it predicts."""

from __future__ import annotations

from pipeworker.plan.check import check
from pipeworker.plan.orders import resolve
from pipeworker.plan.placement import Placement
from pipeworker.plan.planned import Planned
from pipeworker.plan.simulate import Costs, simulate


def planned(placement: Placement, update: float) -> Planned:
    """Return a plan of even stages under gpipe."""
    stages = placement.stages
    schedule = resolve("gpipe").build(placement, 4, ["never"] * stages)
    check(schedule)
    costs = Costs.even(stages)
    return Planned(
        schedule,
        "gpipe",
        (1,) * stages,
        ("never",) * stages,
        costs,
        simulate(schedule, costs),
        update,
        (0,) * placement.workers,
        (None,) * placement.workers,
    )


def test_a_step_lasts_as_long_as_its_actions_and_its_update() -> None:
    plan = planned(Placement.identity(2), 0.5)
    assert plan.step_seconds == (4 + 2 - 1) * (1 + 2) + 0.5


def test_a_plan_knows_how_many_stages_a_worker_holds() -> None:
    assert planned(Placement.identity(3), 0.0).virtual_stages == 1
    assert planned(Placement.looped(2, 3), 0.0).virtual_stages == 3
