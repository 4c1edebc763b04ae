"""Weight parts for orders of forwards and input gradients: in the gaps, and as memory needs them.

The schedules that split the backward (zero bubble, Qi et al. 2023) differ in the order of their
forwards and input gradients. From that order and a limit on the graphs that a worker holds,
:func:`squeeze` derives where the weight parts go.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.placement import Placement

_FORWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def numbered(steps: Iterable[tuple[Kind, int]], microbatches: int) -> list[Action]:
    """Return steps, each a kind and a stage, as actions with micro-batches 0, 1, 2 and so on.

    Actions of micro-batches from M on are left out: a pattern that needs many micro-batches to fill
    the pipeline stays legal without the last ones, because none needs anything of another.
    """
    counts: defaultdict[tuple[Kind, int], int] = defaultdict(int)
    actions = []
    for kind, stage in steps:
        role = _INPUT if kind is Kind.BACKWARD else kind, stage
        if counts[role] < microbatches:
            actions.append(Action(kind, stage, counts[role]))
        if kind is Kind.BACKWARD:
            counts[_WEIGHT, stage] += 1
        counts[role] += 1
    return actions


def squeeze(
    placement: Placement, orders: Sequence[Sequence[Action]], limit: int
) -> list[list[Action]]:
    """Return orders of forwards and input gradients with the weight parts, by worker.

    All actions begin as early as they can if each takes one unit of time. A worker that would wait
    runs the oldest weight part that it has deferred instead, and so does one that holds `limit`
    graphs (over its stages) before it holds another one. The given order of a worker's forwards and
    input gradients stays as it is, so the result is legal wherever the given orders are, and
    weight parts keep the order of the input gradients, which must be that of the micro-batches.

    Raises:
        ScheduleError: the orders cannot run.
    """
    last = placement.stages - 1
    ended: set[tuple[Kind, int, int]] = set()  # forwards and input gradients
    squeezed: list[list[Action]] = [[] for _ in orders]
    deferred: list[deque[Action]] = [deque() for _ in orders]
    at, held = [0] * len(orders), [0] * len(orders)
    left = sum(2 if action.kind is _INPUT else 1 for order in orders for action in order)
    able = {*range(len(orders))}  # the workers that may have something to do
    while left:
        began = []
        for worker in able:
            order, found = orders[worker], None
            if at[worker] < len(order):
                kind, stage, m, _ = order[at[worker]]
                forward = kind is _FORWARD
                if (stage == 0 if forward else stage == last) or (
                    (kind, stage - 1 if forward else stage + 1, m) in ended
                ):
                    found = order[at[worker]]
                if forward and held[worker] >= limit and deferred[worker]:
                    found = None
            if found is not None:
                at[worker] += 1
                began.append((worker, found))
            elif deferred[worker]:
                began.append((worker, deferred[worker].popleft()))
        able = {worker for worker, _ in began}
        for worker, action in began:
            squeezed[worker].append(action)
            if action.kind is _WEIGHT:
                held[worker] -= 1
                continue
            ended.add(action[:3])
            if action.kind is _FORWARD:
                held[worker] += 1
                able.add(placement.owners[min(action.stage + 1, last)])
            else:
                deferred[worker].append(Action(_WEIGHT, action.stage, action.microbatch))
                able.add(placement.owners[max(action.stage - 1, 0)])
        if not began:
            raise ScheduleError("the orders of forwards and input gradients deadlock")
        left -= len(began)
    return squeezed
