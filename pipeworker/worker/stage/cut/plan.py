"""The plan of a cut module: which unit each layer runs, and which values pass between layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgpack
import msgspec

from pipeworker.facts.connections import Skip

Number = tuple[int, int]
"""Names a value: the count of the call that made it, and its place among what the call returned.

Only calls with an argument that depends on parameters are counted. The tensors of the module's
input have the count -1.
"""
INPUT = -1


@dataclass(slots=True)
class CutPlan:
    """The result of a run of a module on fake parameters. Layer ``i`` is the i-th call of a unit.

    Attributes:
        units: the name of the unit that each layer calls.
        classes: the class of each unit.
        counts: calls counted until the call of each layer ends, and until the forward ends.
        structures: for each layer, the structure of what its unit returned, and of its effects on
            containers that it was called with.
        users: by value, the layer that makes it and those that use it, ascending.
        same: a value that was the same tensor as an earlier one, by its number.
        apart: those of them that a call returned while what it was called with is used again.
        changed: by count, the arguments of a call that it changed although they did not depend on
            parameters before: their places among the call's tensors.
        parameters: names of parameters used outside of units, and the layers that use them.
        hooked: for each layer, the modules within its unit whose outputs a hook gets that the
            forward itself has added, in order.
        touched: the places of those tensors of the input that the forward changes.
        random: counts of the calls that draw random numbers, or may do so in a later forward.
        overwritten: names of buffers outside of units that each forward overwrites before it uses
            them, so that no forward depends on an earlier one.
        attributes: paths of the attributes of units that are set without an effect on these.
        types: names of the classes that numbers in the structures stand for.
    """

    units: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    structures: list[Any] = field(default_factory=list)
    users: dict[Number, list[int]] = field(default_factory=dict)
    same: dict[Number, Number] = field(default_factory=dict)
    apart: set[Number] = field(default_factory=set)
    changed: dict[int, list[int]] = field(default_factory=dict)
    parameters: dict[str, list[int]] = field(default_factory=dict)
    hooked: list[list[str]] = field(default_factory=list)
    touched: list[int] = field(default_factory=list)
    random: set[int] = field(default_factory=set)
    overwritten: list[str] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)
    types: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.units)

    @property
    def names(self) -> list[str]:
        """The name of each layer: that of its unit, with a number where it is called again."""
        calls: dict[str, int] = {}
        found = []
        for unit in self.units:
            calls[unit] = calls.get(unit, 0) + 1
            found.append(unit if calls[unit] == 1 else f"{unit}@{calls[unit]}")
        return found

    def links(self) -> Iterator[tuple[Number, int, int]]:
        """Yield each value with two layers that follow each other among those that use it."""
        for number, users in self.users.items():
            for source, target in pairwise(users):
                yield number, source, target

    def crossing(self, layer: int) -> list[tuple[Number, int, int]]:
        """Return the links from before `layer` to it or behind it, ordered by value."""
        return sorted(link for link in self.links() if link[1] < layer <= link[2])

    def skips(self) -> tuple[Skip, ...]:
        """Return the links that lead over a layer, as skip connections."""
        found = [
            Skip(source, target, skip_name(number, target))
            for number, source, target in self.links()
            if target - source > 1
        ]
        return tuple(sorted(found))

    def pack(self) -> bytes:
        """Return the plan as bytes, for another process."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(packed: bytes) -> CutPlan:
        """Return the plan that :meth:`pack` packed."""
        # Structures are compared, so they are tuples, which msgspec makes of no untyped array.
        found = msgpack.unpackb(packed, use_list=False, strict_map_key=False)
        return msgspec.convert(found, CutPlan)


def skip_name(number: Number, target: int) -> str:
    """Return the name under which a value is stashed for a later layer."""
    return f"{number[0]}.{number[1]}>{target}"
