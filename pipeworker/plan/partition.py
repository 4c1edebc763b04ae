"""How layers, samples and micro-batches are divided.

A *balance* is the number of layers of each stage in order, as in torchgpipe: ``(3, 5, 5, 3)``.
Samples are divided among micro-batches, and micro-batches among replicas, as ``torch.tensor_split``
divides: in order, the first parts larger by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

from pipeworker.errors import UsageError

EVEN: Literal["even"] = "even"
"""The value of ``--balance`` for stages that differ by at most one layer."""


def sizes(count: int, parts: int) -> list[int]:
    """Return how many of `count` items each of `parts` parts has."""
    return [len(block(count, parts, part)) for part in range(parts)]


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


def even(layers: int, stages: int, per_worker: int = 1) -> tuple[int, ...]:
    """Return the balance whose stages differ by at most one layer, the larger ones first.

    The last stage also computes the loss, so it is never given the extra layer. Each worker has
    `per_worker` of the stages.

    Raises:
        UsageError: there are fewer layers than stages.
    """
    if layers < stages:
        workers, most = stages // per_worker, layers // per_worker
        what = (
            "more" if per_worker == 1 else f"with {per_worker} stages on each worker, more stages"
        )
        instead = f"use --stages {most} or fewer, or " if most else ""
        raise UsageError(
            f"--stages {workers}: {what} than the layers of model(), {layers}; {instead}split the "
            "layers more finely"
        )
    return tuple(sizes(layers, stages))


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
            f"--balance {shown}: is for {len(balance)} stages, but there are {stages}; write one "
            "number for each stage"
        )


def _not_a_balance(shown: str) -> str:
    return (
        f"--balance {shown}: not a list of layer counts; write one positive number for each "
        "stage, as in 3,5,5,3, or even"
    )


def check_balance(balance: tuple[int, ...], layers: int, stages: int) -> tuple[int, ...]:
    """Return `balance` if it gives every layer to exactly one of the stages.

    Raises:
        UsageError: it has another number of stages, or its sum is not the number of layers.
    """
    check_entries(balance, stages)
    if sum(balance) != layers:
        shown = ",".join(map(str, balance))
        raise UsageError(
            f"--balance {shown}: adds up to {sum(balance)} layers, but model() has {layers}; "
            "give each layer to one stage"
        )
    return balance


def ranges(balance: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the half-open range of layer indices of each stage."""
    return tuple(pairwise(accumulate(balance, initial=0)))


def stages_of_layers(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the stage of each layer."""
    return [stage for stage, (first, stop) in enumerate(ranges) for _ in range(first, stop)]
