"""Skip connections as data: the layers that stash and pop tensors, and the stages they are on.

A tensor goes from the stage that stashes it directly to the stage that pops it, not through those
between (torchgpipe, Kim et al. 2020, section 3.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeworker.errors import SkipError
from pipeworker.facts.connections import Skip
from pipeworker.plan.partition import stages_of_layers


def match(events: Sequence[Sequence[tuple[str, str]]], layers: Sequence[str]) -> tuple[Skip, ...]:
    """Return the skips of a model, between layers.

    Its layers are of the classes `layers`. The forward of each did `events`: ``("stash", name)`` or
    ``("pop", name)``, in order.

    Raises:
        SkipError: a pop without a stash before it, a second pop, a stash of a name that is not
            popped yet, or a stash that is never popped.
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
                        "and no layer has popped yet: use another name or a namespace"
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
    """Return the same skips between stages; one within a stage begins and ends there."""
    stage_of = stages_of_layers(ranges)
    return tuple(sorted(Skip(stage_of[s.source], stage_of[s.target], s.name) for s in skips))


def pairs(skips: Iterable[Skip]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of different stages (source, target) that skips lead between, each once."""
    return tuple(sorted({(s.source, s.target) for s in skips if s.source != s.target}))
