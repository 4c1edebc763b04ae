"""The gain, by simulation, of running any ready action instead of a worker's actions in order.

A simulation, in which transfers and decisions are free: an upper limit of the gain. Actions take
as long as planned ("even"); vary uniformly by ±50 %; one of a hundred takes ten times as long
("stalls"); or one stage takes three times as long for eight micro-batches in a row ("slow").

A worker that is free runs the first action of its tuple whose inputs are there. A stage holds no
more graphs than in the fixed order; the last column allows K more a worker. Gradients are
accumulated in micro-batch order, so the bits stay the same.

RRFP (arXiv 2605.18750) reports up to 1.77 for schedules whose order is a hint.

    python benchmarks/ready_first.py [--stages 8] [--microbatches 32] [--draws 200]
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Callable, Sequence

from pipeworker.plan.actions import COMPUTE, INPUTS, WEIGHTS, Action, Kind
from pipeworker.plan.orders import ORDERS
from pipeworker.plan.schedule import Schedule

SECONDS = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}
NAMES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "v-half")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=8, help="workers")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--draws", type=int, default=200)
    args = parser.parse_args()
    k, m = args.stages, args.microbatches
    print(f"K={k} M={m}, mean makespan in order / ready first, over {args.draws} draws")
    print(f"{'schedule':18}    even   ±50 %  stalls    slow   ±50 %, {k} graphs more")
    for name in NAMES:
        order = ORDERS[name]
        schedule = order.build(order.place(k), m, ["never"] * (k * order.virtual_stages))
        cells = [gain(schedule, args.draws, how, 0) for how in VARIATIONS]
        cells.append(gain(schedule, args.draws, jitter, k))
        print(f"{name:18}  " + "  ".join(f"{cell:6.3f}" for cell in cells), flush=True)


def peaks(schedule: Schedule) -> list[int]:
    """Return the most graphs that each stage holds at once when the actions run in order.

    The limits are by stage: under one limit for a worker, forwards of its first stage would take
    the room that its later stages need, and the pipeline would deadlock.
    """
    owners = schedule.placement.owners
    return [most_live(schedule.workers[owners[stage]], stage) for stage in range(len(owners))]


def most_live(actions: Sequence[Action], stage: int) -> int:
    live = most = 0
    for action in actions:
        if action.stage == stage:
            live += (action.kind is Kind.FORWARD) - (action.kind in WEIGHTS)
            most = max(most, live)
    return most


Variation = Callable[[random.Random, int], Callable[[Action], float]]
"""Draws how many times as long each action takes, in a pipeline of so many stages."""


def even(chance: random.Random, stages: int) -> Callable[[Action], float]:
    return lambda action: 1.0


def jitter(chance: random.Random, stages: int) -> Callable[[Action], float]:
    return lambda action: chance.uniform(0.5, 1.5)


def stalls(chance: random.Random, stages: int) -> Callable[[Action], float]:
    return lambda action: 10.0 if chance.random() < 0.01 else 1.0


def slow(chance: random.Random, stages: int) -> Callable[[Action], float]:
    stage, first = chance.randrange(stages), chance.randrange(16)
    span = range(first, first + 8)
    return lambda a: 3.0 if a.stage == stage and a.microbatch in span else 1.0


VARIATIONS = (even, jitter, stalls, slow)


def gain(schedule: Schedule, draws: int, variation: Variation, more: int) -> float:
    """Return by what factor the mean makespan shrinks, with `more` graphs a worker."""
    stages = schedule.placement.stages
    each = stages // schedule.placement.workers
    orders = [[a for a in actions if a.kind in COMPUTE] for actions in schedule.workers]
    limits = [peak + more // each for peak in peaks(schedule)]
    fixed, ready = 0.0, 0.0
    for draw in range(1 if variation is even else draws):
        factor = variation(random.Random(draw), stages)
        seconds = {a: SECONDS[a.kind] / each * factor(a) for order in orders for a in order}
        fixed += makespan(orders, seconds, None)
        ready += makespan(orders, seconds, limits)
    return fixed / ready


def makespan(
    orders: Sequence[Sequence[Action]],
    seconds: dict[Action, float],
    limits: Sequence[int] | None,
) -> float:
    """Return the duration of a step: in order without limits of graphs, else ready work first."""
    last = max(action.stage for order in orders for action in order)
    done: set[Action] = set()
    remaining = [list(order) for order in orders]
    live = [0] * (last + 1)
    free = [True] * len(orders)
    ends: list[tuple[float, int, Action]] = []
    now = 0.0

    def inputs_are_there(action: Action) -> bool:
        kind, stage, m = action.kind, action.stage, action.microbatch
        if kind is Kind.FORWARD:
            return not stage or Action(Kind.FORWARD, stage - 1, m) in done
        if kind is Kind.BACKWARD_WEIGHT:
            return Action(Kind.BACKWARD_INPUT, stage, m) in done
        if stage == last:
            return Action(Kind.FORWARD, stage, m) in done
        return any(Action(some, stage + 1, m) in done for some in INPUTS)

    def is_next_sum(worker: int, action: Action) -> bool:
        """Gradients of a stage's weights are accumulated in micro-batch order."""
        if action.kind not in WEIGHTS:
            return True
        others = (a for a in remaining[worker] if a.kind in WEIGHTS and a.stage == action.stage)
        return next(others) == action

    def start(worker: int) -> None:
        for place, action in enumerate(remaining[worker]):
            forward, stage = action.kind is Kind.FORWARD, action.stage
            fits = not forward or limits is None or live[stage] < limits[stage]
            if fits and inputs_are_there(action) and is_next_sum(worker, action):
                del remaining[worker][place]
                live[stage] += forward
                free[worker] = False
                heapq.heappush(ends, (now + seconds[action], worker, action))
                return
            if limits is None:
                return

    for worker in range(len(orders)):
        start(worker)
    while ends:
        now, worker, action = heapq.heappop(ends)
        done.add(action)
        live[action.stage] -= action.kind in WEIGHTS
        free[worker] = True
        for other in range(len(orders)):
            if free[other]:
                start(other)
    assert not any(remaining), "deadlock"
    return now


if __name__ == "__main__":
    main()
