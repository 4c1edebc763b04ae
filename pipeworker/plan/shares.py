"""How a mini-batch is dealt out: samples to micro-batches, micro-batches to replicas.

Both as ``torch.tensor_split`` cuts: in order, the first ones larger by one.
"""

from __future__ import annotations


def sizes(count: int, parts: int) -> list[int]:
    """How many of `count` things each of so many parts has."""
    size, extra = divmod(count, parts)
    return [size + (part < extra) for part in range(parts)]


def block(count: int, parts: int, part: int) -> range:
    """Which of `count` things a part has; none, where there are more parts."""
    size, extra = divmod(count, parts)
    first = part * size + min(part, extra)
    return range(first, first + size + (part < extra))
