"""The costs of a schedule, to compare with the literature: a step's duration, and graphs held."""

from __future__ import annotations

from pipeworker.plan.actions import COMPUTE, WEIGHTS, Kind
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


def picture(schedule: Schedule) -> list[str]:
    """Return what each worker does in each unit of time, a character a unit.

    A forward and each part of a backward takes a unit: digits are forwards, capitals the gradients
    of inputs, small letters those of weights, and a point is a wait.
    """
    ends: dict[tuple[str, int, int], int] = {}  # forwards and gradients of inputs
    rows, at = [""] * len(schedule.workers), [0] * len(schedule.workers)
    orders = [[a for a in actions if a.kind in COMPUTE] for actions in schedule.workers]
    last = schedule.placement.stages - 1
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        for worker, order in enumerate(orders):
            while at[worker] < len(order):
                kind, stage, m, _ = order[at[worker]]
                forward = kind is Kind.FORWARD
                role, before = ("F", stage - 1) if forward else ("I", stage + 1)
                ready = 0
                if kind is not Kind.BACKWARD_WEIGHT and 0 <= before <= last:
                    if (role, before, m) not in ends:
                        break
                    ready = ends[role, before, m]
                text = {
                    Kind.FORWARD: f"{m}",
                    Kind.BACKWARD: chr(65 + m) + chr(97 + m),
                    Kind.BACKWARD_INPUT: chr(65 + m),
                    Kind.BACKWARD_WEIGHT: chr(97 + m),
                }[kind]
                rows[worker] = rows[worker].ljust(ready, ".") + text
                if kind is not Kind.BACKWARD_WEIGHT:
                    ends[role, stage, m] = len(rows[worker])
                at[worker] += 1
    width = max(map(len, rows))
    return [row.ljust(width, ".") for row in rows]
