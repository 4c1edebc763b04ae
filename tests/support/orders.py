"""Compute orders for whole pipelines: written out, greedy by a preference, or drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pipeworker.plan.actions import Action, Kind, parse_actions
from pipeworker.plan.placement import Placement

Orders = list[list[Action]]
Pick = Callable[[Sequence[Action], Sequence[Action]], "Action | None"]
"""From what a worker could do now, and what it has done, what it does next."""
Which = Callable[[int, int], bool]
"""Whether it holds for a stage and a micro-batch."""

_FORWARD, _AGAIN, _BACKWARD = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD
_INPUT, _WEIGHT = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def never(stage: int, microbatch: int) -> bool:
    return False


def always(stage: int, microbatch: int) -> bool:
    return True


def written(*workers: str) -> Orders:
    """Read the workers' orders."""
    return [list(parse_actions(text)) for text in workers]


def legal(
    placement: Placement,
    microbatches: int,
    pick: Pick,
    *,
    again: Which = never,
    halves: Which = never,
    forwards: Sequence[int] | None = None,
) -> Orders:
    """Orders that respect the needs of every action, in rounds: each worker does one thing or none.

    Args:
        again: what is recomputed; `halves`: whose backward is two actions.
        forwards: the order in which micro-batches are forwarded.
    """
    orders: Orders = [[] for _ in placement.held]
    done: set[Action] = set()
    state = _State(placement, microbatches, again, halves, forwards or range(microbatches))
    while True:
        ready = [
            [action for stage in held for action in state.ready(stage, done)]
            for held in placement.held
        ]
        if not any(ready):
            return orders
        chosen = [
            pick(some, order) if some else None for some, order in zip(ready, orders, strict=True)
        ]
        if not any(chosen):  # all would wait: the first does not
            worker = next(w for w, some in enumerate(ready) if some)
            chosen[worker] = ready[worker][0]
        for order, action in zip(orders, chosen, strict=True):
            if action is not None:
                order.append(action)
                done.add(action)


class _State:
    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        again: Which,
        halves: Which,
        forwards: Sequence[int],
    ) -> None:
        self._last = placement.stages - 1
        self._count = microbatches
        self._again, self._halves, self._forwards = again, halves, forwards

    def ready(self, s: int, done: Collection[Action]) -> list[Action]:
        """What a stage could do now."""

        def is_done(kind: Kind, stage: int, m: int) -> bool:
            return Action(kind, stage, m) in done

        def given(stage: int, m: int) -> bool:
            """Whether the gradient of the stage's input is there."""
            return is_done(_BACKWARD, stage, m) or is_done(_INPUT, stage, m)

        def whole(stage: int, m: int) -> bool:
            return is_done(_BACKWARD, stage, m) or is_done(_WEIGHT, stage, m)

        found: list[Action] = []
        count = self._count
        backward = next((m for m in range(count) if not given(s, m)), count)
        weights = next((m for m in range(count) if not whole(s, m)), count)
        if backward < count and is_done(_FORWARD, s, backward):
            halved = self._halves(s, backward)
            if (
                (s == self._last or given(s + 1, backward))
                and (not self._again(s, backward) or is_done(_AGAIN, s, backward))
                and (halved or weights == backward)
            ):
                found.append(Action(_INPUT if halved else _BACKWARD, s, backward))
        for m in range(count):
            if self._again(s, m) and is_done(_FORWARD, s, m) and not is_done(_AGAIN, s, m):
                found.append(Action(_AGAIN, s, m))
        forward = next((m for m in self._forwards if not is_done(_FORWARD, s, m)), None)
        if forward is not None and (s == 0 or is_done(_FORWARD, s - 1, forward)):
            found.append(Action(_FORWARD, s, forward))
        if weights < backward and self._halves(s, weights):
            found.append(Action(_WEIGHT, s, weights))
        return found


def by(*kinds: Kind, limit: int = 1 << 30, deep: bool = True) -> Pick:
    """Prefer kinds in this order, then the deepest stage (or the first), then early micro-batches.

    Args:
        limit: micro-batches of a worker, over its stages, that are forward and not yet backward.
    """

    def pick(ready: Sequence[Action], done: Sequence[Action]) -> Action | None:
        forwards = sum(a.kind is _FORWARD for a in done)
        backwards = sum(a.kind in (_BACKWARD, _INPUT) for a in done)
        some = [a for a in ready if a.kind is not _FORWARD or forwards - backwards < limit]
        key = lambda a: (kinds.index(a.kind), -a.stage if deep else a.stage, a.microbatch)  # noqa: E731
        return min(some, key=key, default=None)

    return pick


def depth_first(
    placement: Placement, microbatches: int, again: Which = never, halves: Which = never
) -> Orders:
    """Backward as soon as it can be; forward of the deepest stage first."""
    pick = by(_BACKWARD, _INPUT, _AGAIN, _FORWARD, _WEIGHT)
    return legal(placement, microbatches, pick, again=again, halves=halves)


def zero_bubble(placement: Placement, microbatches: int, again: Which = never) -> Orders:
    """As ZB-H1: inputs' gradients first, weights' to fill gaps (Qi et al. 2023)."""
    pick = by(_INPUT, _AGAIN, _FORWARD, _WEIGHT, limit=placement.stages + 1)
    return legal(placement, microbatches, pick, again=again, halves=always)
