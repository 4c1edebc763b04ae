"""The schedule around a compute order: sends, receives, loads and exchanges of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeworker.plan.actions import INPUTS, SENDS, WEIGHTS, Action, Edge, Kind, Payload
from pipeworker.plan.frozen import front
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import CHANNEL_CAPACITY, End, Pairs, Schedule, StageEnds, is_bounded


def connect(
    name: str,
    microbatches: int,
    placement: Placement,
    orders: Sequence[Sequence[Action]],
    skips: Pairs = (),
    ties: Pairs = (),
    frozen: tuple[int, ...] = (),
) -> Schedule:
    """Place sends, receives, loads and exchanges of gradients around compute orders.

    A send follows the action whose result it sends, and a receive precedes the action that needs
    it. Recompute comes before the wait for the gradient, so that it fills that time (early
    recompute, torchgpipe, Kim et al. 2020, section 3.2.3). Stages of one worker pass tensors in
    memory: nothing is sent between them.

    With several replicas, a stage's gradients leave for the others as soon as its last backward is
    done, while other stages still drain. Receives from other replicas come behind everything that
    the stages of this replica need of each other, so that no workers wait in a circle: first the
    parts, then their sums. Tied weights come last, because they add up complete gradients.

    `orders` are the compute actions of each worker, fetches included, without the backwards that
    `frozen` stages do not have. The schedule is not checked yet.
    """
    workers = tuple(
        connected(order, worker, placement, skips, ties, frozen)
        for worker, order in zip(range(placement.workers), orders, strict=True)
    )
    return Schedule(name, microbatches, placement, workers, skips, ties, frozen=frozen)


def connected(
    order: Sequence[Action],
    worker: int,
    placement: Placement,
    skips: Pairs = (),
    ties: Pairs = (),
    frozen: tuple[int, ...] = (),
) -> tuple[Action, ...]:
    """Return the actions of one worker in the schedule that :func:`connect` makes."""
    held = placement.held[worker]
    around = _around(placement, held, skips, front(frozen, placement.stages))
    actions = _with_ends(order, around, reads=0 in held)
    if placement.replicas > 1:
        actions = _over_replicas(actions, held)
    return (*actions, *_reduction(placement, worker, ties))


def forward_only(placement: Placement, skips: Pairs = (), microbatches: int = 1) -> Schedule:
    """Return the schedule of a pass through all stages, without backward.

    Evaluation streams any number of micro-batches through the actions of one. With more
    `microbatches` the schedule is the beginning of such a stream, and its end.
    """
    behind = lags(placement)
    orders = [
        [
            Action(Kind.FORWARD, stage, number - behind[stage])
            for number in range(microbatches + behind[-1])
            for stage in held
            if 0 <= number - behind[stage] < microbatches
        ]
        for held in placement.held
    ]
    workers = tuple(
        tuple(_with_ends(order, _around(placement, held, skips), reads=False))
        for order, held in zip(orders, placement.held, strict=True)
    )
    return Schedule("evaluation", microbatches, placement, workers, skips, (), forward_only=True)


def lags(placement: Placement) -> tuple[int, ...]:
    """Return by how many micro-batches each stage is behind the first one in a stream of forwards.

    A worker runs its stages in turn, each with another micro-batch. A micro-batch reaches the next
    stage of the same worker after the stages in between; while other workers run one of these, the
    worker runs one of its own. Without a lag each micro-batch would pass all stages before the next
    one begins. A lag never decreases from a stage to the next, nor grows by more than a bounded
    channel holds. Workers run in the order of (number + lag, stage), in which every send comes
    before its receive; so there is no deadlock.
    """
    found: list[int] = []
    before: dict[int, int] = {}  # by worker, its stage before
    for stage, worker in enumerate(placement.owners):
        lag = found[-1] if found else 0
        if worker in before and (between := stage - before[worker]) > 1:
            own = found[before[worker]] + -(-between // len(placement.held[worker]))
            edge = Edge(stage - 1, stage, Payload.ACTIVATION)
            most = lag + CHANNEL_CAPACITY - 1 if is_bounded(edge, placement) else own
            lag = max(lag, min(own, most))
        before[worker] = stage
        found.append(lag)
    return tuple(found)


_Around = dict[Kind, tuple[list[End], list[End]]]
"""By kind of action, the receives before it and the sends after it."""


def _around(
    placement: Placement, held: Sequence[int], skips: Pairs, first: int = 0
) -> dict[int, _Around]:
    """Return the receives and sends of the stages of a worker, by stage."""
    ends = {stage: StageEnds.of(placement, stage, skips, first) for stage in held}
    return {
        stage: {
            Kind.FORWARD: (e.before_forward, e.after_forward),
            **dict.fromkeys(INPUTS, (e.before_backward, e.after_backward)),
        }
        for stage, e in ends.items()
    }


def _with_ends(
    order: Sequence[Action], around: Mapping[int, _Around], *, reads: bool
) -> list[Action]:
    found: list[Action] = []
    for action in order:
        kind, stage, m, _ = action
        if reads and kind not in (Kind.FORWARD, Kind.FETCH):  # the fill is over
            found.append(Action(Kind.LOAD, 0, 0))
            reads = False
        before, after = around[stage].get(kind, ((), ()))
        for k, peer in before:
            found.append(Action(k, stage, m, peer))
        found.append(action)
        for k, peer in after:
            found.append(Action(k, stage, m, peer))
    return [*found, *([Action(Kind.LOAD, 0, 0)] if reads else [])]


def _over_replicas(actions: Sequence[Action], held: Sequence[int]) -> list[Action]:
    """Insert the actions that add up each stage's gradients over its replicas."""
    last = {a.stage: place for place, a in enumerate(actions) if a.kind in WEIGHTS}
    order = sorted(held, key=lambda stage: last.get(stage, -1))
    behind: dict[int, list[Action]] = {}
    for stage in order:
        place = last.get(stage, len(actions) - 1)
        while place + 1 < len(actions) and actions[place + 1].kind in SENDS:
            place += 1  # other stages wait for these sends, so they go first
        behind.setdefault(place, []).append(Action(Kind.SCATTER, stage, 0))
    found = list(behind.get(-1, ()))  # of a worker without micro-batches
    for place, action in enumerate(actions):
        found += (action, *behind.get(place, ()))
    return [*found, *(Action(k, stage, 0) for k in (Kind.SUM, Kind.GATHER) for stage in order)]


def _reduction(placement: Placement, worker: int, ties: Pairs) -> list[Action]:
    """Return the end of a worker's tuple: send, receive and add up gradients of tied weights."""
    owners, held = placement.owners, placement.held[worker]
    own = [(stage, peer) for stage, peer in ties if stage in held]
    remote = [(stage, peer) for stage, peer in own if owners[peer] != worker]
    return [
        *(Action(Kind.SEND_TIED, stage, 0, peer) for stage, peer in remote),
        *(Action(Kind.RECEIVE_TIED, stage, 0, peer) for stage, peer in remote),
        *(Action(Kind.REDUCE_TIED, stage, 0) for stage in sorted({stage for stage, _ in own})),
    ]
