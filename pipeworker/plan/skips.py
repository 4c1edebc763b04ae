"""Skip connections as data: which layer stashes what, which pops it, and what stages pass on.

The idea is torchgpipe's (Kim et al. 2020, section 3.3): a tensor goes from the stage that stashes
it straight to the stage that pops it, not through those between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeworker.errors import SkipError


@dataclass(frozen=True, slots=True, order=True)
class Skip:
    """`name` goes from `source` to `target`: layers, or the stages they are on."""

    source: int
    target: int
    name: str


def match(events: Sequence[Sequence[tuple[str, str]]], layers: Sequence[str]) -> tuple[Skip, ...]:
    """The skips of a model, between layers.

    Args:
        events: for each layer, what its forward did in order: ``("stash", name)`` or
            ``("pop", name)``.
        layers: the class of each layer, for messages.

    Raises:
        SkipError: a pop without a stash before it, a second pop, a stash of a name that is still
            held, or a stash nobody pops.
    """
    held: dict[str, int] = {}
    popped: dict[str, int] = {}
    found = []

    def layer(index: int) -> str:
        return f"layer {index} ({layers[index]})"

    for index, done in enumerate(events):
        for what, name in done:
            if what == "stash":
                if name in held:
                    raise SkipError(
                        f"{layer(index)} stashes {name!r}, which {layer(held[name])} has stashed "
                        "and nobody has popped yet: use another name or a namespace"
                    )
                held[name] = index
            elif name in held:
                found.append(Skip(held.pop(name), index, name))
                popped[name] = index
            elif name in popped:
                raise SkipError(
                    f"{layer(index)} pops {name!r}, which {layer(popped[name])} has popped already"
                )
            else:
                raise SkipError(f"{layer(index)} pops {name!r}, which no layer before it stashes")
    for name, index in held.items():
        raise SkipError(f"{layer(index)} stashes {name!r}, which no layer after it pops")
    return tuple(sorted(found))


def between_stages(skips: Iterable[Skip], ranges: Sequence[tuple[int, int]]) -> tuple[Skip, ...]:
    """The same skips between stages; one that stays on a stage begins and ends there."""
    stage_of = {
        layer: stage for stage, (first, stop) in enumerate(ranges) for layer in range(first, stop)
    }
    return tuple(sorted(Skip(stage_of[s.source], stage_of[s.target], s.name) for s in skips))


def pairs(skips: Iterable[Skip]) -> tuple[tuple[int, int], ...]:
    """The different stages (source, target) that something goes between, each pair once."""
    return tuple(sorted({(s.source, s.target) for s in skips if s.source != s.target}))
