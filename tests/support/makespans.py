"""What a schedule costs, to compare with the literature: a step's duration, and graphs held."""

from __future__ import annotations

from pipeworker.plan.actions import WEIGHTS, Kind
from pipeworker.plan.check import check
from pipeworker.plan.orders import resolve
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Costs, simulate


def checked(
    name: str, workers: int, microbatches: int, mode: str = "never", virtual: int | None = None
) -> Schedule:
    """Return the checked schedule of a registered order, with one recompute mode."""
    order = resolve(name, virtual)
    placement = order.place(workers)
    schedule = order.build(placement, microbatches, (mode,) * placement.stages)
    check(schedule)
    return schedule


def makespan(schedule: Schedule, forward: float, inputs: float, weights: float) -> float:
    """Return the duration of a step, given those of a stage's forward and parts of backward."""
    stages = schedule.placement.stages
    costs = Costs((forward,) * stages, (inputs + weights,) * stages, (inputs,) * stages)
    return simulate(schedule, costs).makespan


def peak_graphs(schedule: Schedule, worker: int) -> int:
    """Return how many graphs of its stages a worker holds at once, counted action by action."""
    actions = schedule.workers[worker]
    recomputed = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.RECOMPUTE}
    held, most = 0, 0
    for action in actions:
        where = action.stage, action.microbatch
        if action.kind is Kind.RECOMPUTE or (
            action.kind is Kind.FORWARD and where not in recomputed
        ):
            held += 1
            most = max(most, held)
        elif action.kind in WEIGHTS:
            held -= 1
    assert held == 0
    return most
