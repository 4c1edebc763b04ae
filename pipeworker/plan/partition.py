"""How layers, samples and micro-batches are divided.

A *balance* is the number of layers of each stage in order, as in torchgpipe: ``(3, 5, 5, 3)``.
Samples are divided among micro-batches, and micro-batches among replicas, as ``torch.tensor_split``
divides: in order, the first parts larger by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Literal

from pipeworker.errors import UsageError
from pipeworker.facts.connections import SharedBuffer
from pipeworker.plan.figures import plural

EVEN: Literal["even"] = "even"
"""The value of ``--balance`` for stages that differ by at most one layer."""


def sizes(count: int, parts: int) -> list[int]:
    """Return how many of `count` items each of `parts` parts has."""
    size, extra = divmod(count, parts or 1)
    return [size + 1] * extra + [size] * (parts - extra)


def block(count: int, parts: int, part: int) -> range:
    """Return which of `count` items part number `part` has; empty if there are more parts."""
    size, extra = divmod(count, parts)
    first = part * size + min(part, extra)
    return range(first, first + size + (part < extra))


PIECE_ELEMENTS = 1 << 19
"""Elements of a gradient that replicas send at once: while one piece is added up, the next is in
flight."""
MAX_PIECES = 64
"""Pieces of a part: a channel blocks its sender when many more are in flight."""


def pieces(elements: int) -> int:
    """Return the number of pieces in which a replica's part of the gradients is sent."""
    return min(MAX_PIECES, -(-elements // PIECE_ELEMENTS))


def cuts(layers: int, shared: Iterable[SharedBuffer]) -> list[int]:
    """Return the layers before which a stage may end: no buffer is in two stages then."""
    inside = {cut for buffer in shared for cut in range(buffer.first + 1, buffer.last + 1)}
    return [cut for cut in range(1, layers) if cut not in inside]


def most_stages(layers: int, shared: Iterable[SharedBuffer]) -> int:
    """Return the most stages that layers can make."""
    return len(cuts(layers, shared)) + 1


def even(
    layers: int, stages: int, per_worker: int = 1, shared: Sequence[SharedBuffer] = ()
) -> tuple[int, ...]:
    """Return the balance whose stages differ by at most one layer, the larger ones first.

    The last stage also computes the loss, so it is never given the extra layer. Where that would
    part the layers that share a buffer, the nearest balance that does not. Each worker has
    `per_worker` of the stages.

    Raises:
        UsageError: there are fewer layers than stages, or no such balance.
    """
    parts = most_stages(layers, shared)
    if parts < stages:
        raise _too_few(layers, stages, per_worker, parts)
    return nearest(sizes(layers, stages), cuts(layers, shared))


def _too_few(layers: int, stages: int, per_worker: int, parts: int) -> UsageError:
    """Return the error that `layers`, of which stages can make `parts`, are too few."""
    workers, most = stages // per_worker, parts // per_worker
    what = "more" if per_worker == 1 else f"with {per_worker} stages on each worker, more stages"
    fewer = " or fewer" if most > 1 else ""
    instead = f"use --stages {most}{fewer}, or " if most else ""
    if parts < layers:
        return UsageError(
            f"--stages {workers}: {what} than the parts of model(), {parts}, that share no "
            f"changing buffer; {instead}call a module with buffers once, on its inputs concatenated"
        )
    return UsageError(
        f"--stages {workers}: {what} than the layers of model(), {layers}; {instead}split the "
        "layers more finely"
    )


def nearest(balance: Sequence[int], possible: Sequence[int]) -> tuple[int, ...]:
    """Return a balance near to this one whose stages end only at `possible` cuts, ascending.

    There are at least as many of these as the balance needs.
    """
    found = [0]
    first, needed = 0, len(balance) - 1
    for number, cut in enumerate(accumulate(balance[:-1])):
        last = len(possible) - (needed - number)
        choices = possible[first : last + 1]
        chosen = min(choices, key=lambda other: abs(other - cut))
        first += choices.index(chosen) + 1
        found.append(chosen)
    return tuple(b - a for a, b in pairwise([*found, sum(balance)]))


def parse_balance(text: str) -> tuple[int, ...] | Literal["even"]:
    """Read a balance such as ``3,5,5,3``; raise UsageError if an entry is not a whole number."""
    if text == EVEN:
        return EVEN
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(_not_a_balance(repr(text))) from None


def check_entries(balance: tuple[int, ...], stages: int) -> None:
    """Raise UsageError unless a balance has a positive entry for each stage."""
    shown = ",".join(map(str, balance))
    if not balance or min(balance) < 1:
        raise UsageError(_not_a_balance(repr(shown)))
    if len(balance) != stages:
        raise UsageError(
            f"--balance {shown}: is for {plural(len(balance), 'stage')}, but there "
            f"{'is' if stages == 1 else 'are'} {stages}; write one number for each stage"
        )


def _not_a_balance(shown: str) -> str:
    return (
        f"--balance {shown}: not a list of layer counts; write one positive number for each "
        "stage, as in 3,5,5,3, or even"
    )


def check_balance(
    balance: tuple[int, ...],
    layers: Sequence[str],
    stages: int,
    shared: Iterable[SharedBuffer] = (),
) -> tuple[int, ...]:
    """Return `balance` if it gives every layer to exactly one of the stages.

    `layers` has the class of each.

    Raises:
        UsageError: it has another number of stages, or its sum is not the number of layers, or it
            parts layers that share a buffer, which would not stay the same.
    """
    check_entries(balance, stages)
    shown = ",".join(map(str, balance))
    if sum(balance) != len(layers):
        raise UsageError(
            f"--balance {shown}: adds up to {sum(balance)} layers, but model() has {len(layers)}; "
            "give each layer to one stage"
        )
    possible = cuts(len(layers), shared)
    for buffer in shared:
        if any(buffer.first < cut <= buffer.last for cut in accumulate(balance[:-1])):
            first = max([cut for cut in possible if cut <= buffer.first], default=0)
            stop = min([cut for cut in possible if cut > buffer.last], default=len(layers))
            first_of, other = (f"layer {n} ({layers[n]})" for n in (buffer.first, buffer.last))
            raise UsageError(
                f"--balance {shown}: {first_of} and {other} share a buffer and would be on "
                f"different stages, where it would not stay the same; put layers {first} to "
                f"{stop - 1} on one stage, or call the module once, on its inputs concatenated"
            )
    return balance


def ranges(balance: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the half-open range of layer indices of each stage."""
    return tuple(pairwise(accumulate(balance, initial=0)))


def stages_of_layers(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the stage of each layer."""
    return [stage for stage, (first, stop) in enumerate(ranges) for _ in range(first, stop)]
