"""Places sends and receives around a compute order."""

from __future__ import annotations

from collections.abc import Sequence

from pipeworker.plan.actions import Action, Kind
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
    """
    ends = [_Ends(placement, stage, skips) for stage in range(placement.stages)]
    workers = tuple(
        tuple(_around(order, ends) + _reduction(placement, worker, ties))
        for worker, order in enumerate(orders)
    )
    return Schedule(name, microbatches, placement, workers, skips, ties)


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


def _around(order: Sequence[Action], ends: Sequence[_Ends]) -> list[Action]:
    found: list[Action] = []
    reads = any(action.stage == 0 for action in order)
    for action in order:
        kind, stage, m = action.kind, action.stage, action.microbatch
        if kind is Kind.FORWARD:
            found += _forward(action, ends[stage])
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
