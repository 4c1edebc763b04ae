"""Tied weights as data: the places where one parameter is used, and who must tell whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeworker.errors import UsageError


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter at several places.

    Attributes:
        names: of its places, in model order, as in ``nn.Sequential(*layers).state_dict()``.
        stages: of its places; empty while they are not known.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...] = ()


def layer_of(name: str) -> int:
    """``3`` of ``3.attention.weight``."""
    return int(name.partition(".")[0])


def declared(groups: Iterable[Sequence[str]], layers: int) -> tuple[Tie, ...]:
    """The ties a job file declares.

    Raises:
        UsageError: a name is not that of a parameter of a layer, or is tied twice.
    """
    found: list[Tie] = []
    seen: set[str] = set()
    for group in groups:
        names = tuple(group) if isinstance(group, (list, tuple)) else ()
        if len(set(names)) < 2 or not all(isinstance(name, str) for name in names):
            raise UsageError(
                f"tied has the entry {group!r}: each must be a tuple of two or more parameter names"
            )
        for name in names:
            head, _, rest = name.partition(".")
            if not head.isdecimal() or not rest or int(head) >= layers:
                raise UsageError(
                    f"tied names {name!r}: a name is a layer's index and its parameter, as "
                    f"'0.weight', and there are {layers} layers"
                )
            if name in seen:
                raise UsageError(f"tied names {name!r} twice")
            seen.add(name)
        found.append(Tie(tuple(sorted(names, key=lambda name: (layer_of(name), name)))))
    return tuple(found)


def placed(ties: Iterable[Tie], ranges: Sequence[tuple[int, int]]) -> tuple[Tie, ...]:
    """The same ties with the stages of their places."""
    stage_of = {
        layer: stage for stage, (first, stop) in enumerate(ranges) for layer in range(first, stop)
    }
    return tuple(Tie(t.names, tuple(stage_of[layer_of(name)] for name in t.names)) for t in ties)


def pairs(ties: Iterable[Tie]) -> tuple[tuple[int, int], ...]:
    """The stages (source, target) that tell each other gradients, in both directions.

    A stage that has all places of a weight is paired with itself: it has something to add up.
    """
    found = set()
    for tie in ties:
        stages = set(tie.stages)
        found |= {(a, b) for a in stages for b in stages if a != b or len(stages) == 1}
    return tuple(sorted(found))
