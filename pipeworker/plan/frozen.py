"""Frozen stages: those that have nothing to train.

A frozen stage has no gradients of weights, so its backward has no weight part. The frozen stages at
the front of the network have no backward at all, because no gradient has to pass through them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeworker.plan.actions import COMPUTE, Action, Kind


def stages(layers: Collection[int], ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the stages whose layers, of half-open `ranges`, are all among the frozen `layers`."""
    found = set(layers)
    return tuple(s for s, part in enumerate(ranges) if found.issuperset(range(*part)))


def front(frozen: Collection[int], count: int) -> int:
    """Return the number of frozen stages at the front of a network of `count` stages.

    The last stage always has a backward, which reports a loss that depends on no weight.
    """
    return next((stage for stage in range(count - 1) if stage not in frozen), count - 1)


def without_backwards(order: Sequence[Action], frozen: Collection[int], count: int) -> list[Action]:
    """Return a worker's compute order without the backwards that frozen stages do not have.

    A backward in two parts becomes a whole one, which consists of the gradient of the input.
    """
    first = front(frozen, count)
    found = []
    for action in order:
        kind, stage, m, _ = action
        if stage < first and kind in COMPUTE and kind is not Kind.FORWARD:
            continue
        if stage in frozen and kind is Kind.BACKWARD_WEIGHT:
            continue
        whole = stage in frozen and kind is Kind.BACKWARD_INPUT
        found.append(Action(Kind.BACKWARD, stage, m) if whole else action)
    return found
