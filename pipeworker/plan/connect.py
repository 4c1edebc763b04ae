"""Places sends and receives around a compute order."""

from __future__ import annotations

from collections.abc import Sequence

from pipeworker.plan.actions import SENDS, WEIGHTS, Action, Kind
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import Pairs, Schedule


def connect(
    name: str,
    microbatches: int,
    placement: Placement,
    orders: Sequence[Sequence[Action]],
    skips: Pairs = (),
    ties: Pairs = (),
) -> Schedule:
    """Place sends right after what they send and receives right before what needs them.

    Recompute comes before the wait for the gradient, so that it fills the time until it arrives
    (early recompute, torchgpipe section 3.2.3). Between stages of one worker nothing is sent: it
    hands over in memory.

    With several replicas a stage's gradients leave for the others as soon as its last backward is
    done, while other stages still drain. What comes from other replicas is taken behind all that
    the stages of this one need of each other, so nobody waits in a circle: first the parts, then
    their sums. Tied weights are last, since it is whole gradients that are added there.
    """
    ends = [_Ends(placement, stage, skips) for stage in range(placement.stages)]
    workers = []
    for worker, (order, held) in enumerate(zip(orders, placement.held, strict=True)):
        actions = _around(order, ends, reads=0 in held)
        if placement.replicas > 1:
            actions = _over_replicas(actions, held)
        workers.append((*actions, *_reduction(placement, worker, ties)))
    return Schedule(name, microbatches, placement, tuple(workers), skips, ties)


def forward_only(placement: Placement, skips: Pairs = ()) -> Schedule:
    """The pass of one micro-batch through all stages, without backward."""
    ends = [_Ends(placement, stage, skips) for stage in range(placement.stages)]
    workers = tuple(
        tuple(a for stage in held for a in _forward(Action(Kind.FORWARD, stage, 0), ends[stage]))
        for held in placement.held
    )
    return Schedule("evaluation", 1, placement, workers, skips, (), forward_only=True)


class _Ends:
    """What surrounds the actions of one stage: kinds and the stage at the other end."""

    __slots__ = ("after_backward", "after_forward", "before_backward", "before_forward", "stage")

    def __init__(self, placement: Placement, stage: int, skips: Pairs) -> None:
        owners, last = placement.owners, placement.stages - 1
        self.stage = stage

        def away(other: int) -> bool:
            return owners[other] != owners[stage]

        sources = [source for source, target in skips if target == stage and away(source)]
        targets = [target for source, target in skips if source == stage and away(target)]
        before = stage > 0 and away(stage - 1)
        after = stage < last and away(stage + 1)
        self.before_forward = [
            *([(Kind.RECEIVE_ACTIVATION, -1)] if before else []),
            *([(Kind.RECEIVE_TARGET, 0)] if stage == last and away(0) else []),
            *((Kind.RECEIVE_SKIP, peer) for peer in sources),
        ]
        self.after_forward = [
            *([(Kind.SEND_ACTIVATION, -1)] if after else []),
            *([(Kind.SEND_TARGET, last)] if stage == 0 and away(last) else []),
            *((Kind.SEND_SKIP, peer) for peer in targets),
        ]
        self.before_backward = [
            *([(Kind.RECEIVE_GRADIENT, -1)] if after else []),
            *((Kind.RECEIVE_SKIP_GRADIENT, peer) for peer in targets),
        ]
        self.after_backward = [
            *([(Kind.SEND_GRADIENT, -1)] if before else []),
            *((Kind.SEND_SKIP_GRADIENT, peer) for peer in sources),
        ]


def _forward(action: Action, ends: _Ends) -> list[Action]:
    m, stage = action.microbatch, action.stage
    return [
        *[Action(kind, stage, m, peer) for kind, peer in ends.before_forward],
        action,
        *[Action(kind, stage, m, peer) for kind, peer in ends.after_forward],
    ]


def _around(order: Sequence[Action], ends: Sequence[_Ends], *, reads: bool) -> list[Action]:
    found: list[Action] = []
    for action in order:
        kind, stage, m = action.kind, action.stage, action.microbatch
        if kind is Kind.FORWARD:
            found += _forward(action, ends[stage])
            continue
        if kind is Kind.FETCH:
            found.append(action)
            continue
        if reads:
            found.append(Action(Kind.LOAD, 0, 0))
            reads = False
        if kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
            mine = ends[stage]
            found += [Action(k, stage, m, peer) for k, peer in mine.before_backward]
            found.append(action)
            found += [Action(k, stage, m, peer) for k, peer in mine.after_backward]
        else:
            found.append(action)
    if reads:
        found.append(Action(Kind.LOAD, 0, 0))
    return found


def _over_replicas(actions: Sequence[Action], held: Sequence[int]) -> list[Action]:
    """The same actions, and those that add up each stage's gradients over its replicas."""
    last = {a.stage: place for place, a in enumerate(actions) if a.kind in WEIGHTS}
    order = sorted(held, key=lambda stage: last.get(stage, -1))
    behind: dict[int, list[Action]] = {}
    for stage in order:
        place = last.get(stage, len(actions) - 1)
        while place + 1 < len(actions) and actions[place + 1].kind in SENDS:
            place += 1  # what other stages wait for goes first
        behind.setdefault(place, []).append(Action(Kind.SCATTER, stage, 0))
    found = list(behind.get(-1, ()))  # a worker that has nothing else to do
    for place, action in enumerate(actions):
        found += (action, *behind.get(place, ()))
    return [*found, *(Action(k, stage, 0) for k in (Kind.SUM, Kind.GATHER) for stage in order)]


def _reduction(placement: Placement, worker: int, ties: Pairs) -> list[Action]:
    """The end of a tuple: gradients of tied weights out, in, and added up."""
    owners, held = placement.owners, placement.held[worker]
    mine = [(stage, peer) for stage, peer in ties if stage in held]
    away = [(stage, peer) for stage, peer in mine if owners[peer] != worker]
    return [
        *(Action(Kind.SEND_TIED, stage, 0, peer) for stage, peer in away),
        *(Action(Kind.RECEIVE_TIED, stage, 0, peer) for stage, peer in away),
        *(Action(Kind.REDUCE_TIED, stage, 0) for stage in sorted({stage for stage, _ in mine})),
    ]
