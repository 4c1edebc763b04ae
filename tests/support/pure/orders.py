"""Compute orders of whole pipelines: written out, greedy by a preference, or random."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pipeworker.plan.actions import Action, Kind, parse_actions
from pipeworker.plan.orders import resolve
from pipeworker.plan.orders.gpipe import gpipe
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import recomputed, with_recomputes
from pipeworker.plan.schedule import Pairs, Schedule

Orders = list[list[Action]]
Pick = Callable[[Sequence[Action], Sequence[Action]], "Action | None"]
"""Choose a worker's next action from those it could run now and those it has run."""
Which = Callable[[int, int], bool]
"""A predicate of a stage and a micro-batch."""

_FORWARD, _RECOMPUTE, _BACKWARD = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD
_INPUT, _WEIGHT = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def never(stage: int, microbatch: int) -> bool:
    return False


def always(stage: int, microbatch: int) -> bool:
    return True


def build(
    name: str, workers: int, microbatches: int, mode: str, skips: Pairs = (), ties: Pairs = ()
) -> Schedule:
    """Return the schedule of a registered order, with one recompute mode for all stages."""
    source = resolve(name)
    placement = source.place(workers)
    return source.build(placement, microbatches, (mode,) * placement.stages, skips, ties)


def fill_drain(placement: Placement, microbatches: int, mode: str = "never") -> Orders:
    """Return GPipe's compute order, with one recompute mode for all stages."""
    by_stage = [recomputed(mode, microbatches)] * placement.stages
    return [with_recomputes(order, by_stage) for order in gpipe(placement, microbatches)]


def written(*workers: str) -> Orders:
    """Read the workers' orders from text."""
    return [list(parse_actions(text)) for text in workers]


def legal(
    placement: Placement,
    microbatches: int,
    pick: Pick,
    *,
    recompute: Which = never,
    split: Which = never,
) -> Orders:
    """Orders that respect the needs of every action, in rounds: each worker does one thing or none.

    Args:
        recompute: what is recomputed; `split`: whose backward is two actions.
    """
    orders: Orders = [[] for _ in placement.held]
    done: set[Action] = set()
    state = _State(placement, microbatches, recompute, split)
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
        recompute: Which,
        split: Which,
    ) -> None:
        self._last = placement.stages - 1
        self._count = microbatches
        self._recompute, self._split = recompute, split

    def ready(self, s: int, done: Collection[Action]) -> list[Action]:
        """Return the actions that a stage could run now."""

        def is_done(kind: Kind, stage: int, m: int) -> bool:
            return Action(kind, stage, m) in done

        def has_input_gradient(stage: int, m: int) -> bool:
            """Return whether the gradient of the stage's input has been computed."""
            return is_done(_BACKWARD, stage, m) or is_done(_INPUT, stage, m)

        def has_weight_gradients(stage: int, m: int) -> bool:
            return is_done(_BACKWARD, stage, m) or is_done(_WEIGHT, stage, m)

        found: list[Action] = []
        count = self._count
        backward = next((m for m in range(count) if not has_input_gradient(s, m)), count)
        weights = next((m for m in range(count) if not has_weight_gradients(s, m)), count)
        if backward < count and is_done(_FORWARD, s, backward):
            is_split = self._split(s, backward)
            if (
                (s == self._last or has_input_gradient(s + 1, backward))
                and (not self._recompute(s, backward) or is_done(_RECOMPUTE, s, backward))
                and (is_split or weights == backward)
            ):
                found.append(Action(_INPUT if is_split else _BACKWARD, s, backward))
        for m in range(count):
            if self._recompute(s, m) and is_done(_FORWARD, s, m) and not is_done(_RECOMPUTE, s, m):
                found.append(Action(_RECOMPUTE, s, m))
        forward = next((m for m in range(count) if not is_done(_FORWARD, s, m)), None)
        if forward is not None and (s == 0 or is_done(_FORWARD, s - 1, forward)):
            found.append(Action(_FORWARD, s, forward))
        if weights < backward and self._split(s, weights):
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
    placement: Placement, microbatches: int, recompute: Which = never, split: Which = never
) -> Orders:
    """Return orders with backward as early as possible, then forward of the deepest stage."""
    pick = by(_BACKWARD, _INPUT, _RECOMPUTE, _FORWARD, _WEIGHT)
    return legal(placement, microbatches, pick, recompute=recompute, split=split)


def zero_bubble(placement: Placement, microbatches: int, recompute: Which = never) -> Orders:
    """Return ZB-H1's orders: input gradients first, weight gradients in gaps (Qi et al. 2023)."""
    pick = by(_INPUT, _RECOMPUTE, _FORWARD, _WEIGHT, limit=placement.stages + 1)
    return legal(placement, microbatches, pick, recompute=recompute, split=always)
