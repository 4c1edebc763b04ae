"""Tied weights as data: the places where one parameter is used, and the stages they are on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeworker.errors import UsageError
from pipeworker.facts.connections import Tie
from pipeworker.facts.layer_names import is_numbered, layer_of
from pipeworker.plan.partition import stages_of_layers

LOSS, MODEL = "loss()", "model()"
"""The names that messages have for the loss, and for the forward of a module that is cut."""
_MOST_SHOWN = 4
"""The most parameters that the error for undeclared ones names."""


def declared(groups: Iterable[Sequence[str]], layers: int) -> tuple[Tie, ...]:
    """Return the ties that a job file declares, each by the names of the parameter in its places.

    Raises:
        UsageError: a name is not that of a parameter of a layer, or is tied twice.
    """
    found: list[Tie] = []
    seen: set[str] = set()
    for group in groups:
        names = tuple(group) if isinstance(group, (list, tuple)) else ()
        if len(set(names)) < 2 or not all(isinstance(name, str) for name in names):
            raise UsageError(
                f"tied: has the entry {group!r}; make it a tuple of two or more parameter names"
            )
        for name in names:
            if not is_numbered(name, layers):
                raise UsageError(
                    f"tied: names {name!r}; write a layer's index, of {layers} layers, and its "
                    "parameter, as '0.weight'"
                )
            if name in seen:
                raise UsageError(f"tied: names {name!r} twice; name it once")
            seen.add(name)
        found.append(Tie(tuple(sorted(names, key=lambda name: (layer_of(name), name)))))
    return tuple(found)


def check_declared(groups: Iterable[Iterable[str]], ties: Iterable[Tie]) -> None:
    """Check that parameters which callables share are tied.

    Args:
        groups: for each parameter, its names in the layers that were built with it.
        ties: the ties of the model.

    Raises:
        UsageError: a parameter has several names that no tie has.
    """
    tied = [{*tie.names} for tie in ties]
    places = [tuple(sorted({*group}, key=lambda name: (layer_of(name), name))) for group in groups]
    lacking = [names for names in places if len(names) > 1 and not any(t >= {*names} for t in tied)]
    if not lacking:
        return
    layers = " and ".join(dict.fromkeys(str(layer_of(name)) for name in lacking[0]))
    shown = ", ".join(map(str, lacking[:_MOST_SHOWN])) + ", …" * (len(lacking) > _MOST_SHOWN)
    raise UsageError(
        f"layers {layers}: were built with one parameter in both; declare it, tied = [{shown}], or "
        "build a new module for each layer"
    )


def used_elsewhere(user: str, name: str) -> UsageError:
    """Return the error for code that uses a parameter which another layer has.

    Args:
        user: what the message calls the layer, or :data:`LOSS` or :data:`MODEL`.
        name: the name of the parameter in the other layer.
    """
    remedy = (
        "tie it: make it a parameter of both layers, and declare it (tied = [...]) if callables "
        "build them"
    )
    if user == LOSS:
        remedy = "have a layer compute with it, and return the result"
    elif user == MODEL:
        remedy = "have forward reach it by attributes of the module, not by a global or a closure"
    return UsageError(
        f"{user}: uses the parameter {name} of another layer, which on another stage is a copy "
        f"that no update changes; {remedy}"
    )


def placed(ties: Iterable[Tie], ranges: Sequence[tuple[int, int]]) -> tuple[Tie, ...]:
    """Return the same ties with the stages of their places."""
    stage_of = stages_of_layers(ranges)
    return tuple(Tie(t.names, tuple(stage_of[layer_of(name)] for name in t.names)) for t in ties)


def pairs(ties: Iterable[Tie]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of stages (source, target) that exchange gradients, in both directions.

    A stage that has all places of a weight is paired with itself, because it adds up gradients too.
    """
    stages = [set(tie.stages) for tie in ties]
    found = {(a, b) for some in stages for a in some for b in some if a != b or len(some) == 1}
    return tuple(sorted(found))
