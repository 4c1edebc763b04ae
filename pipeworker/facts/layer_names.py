"""The names of a model's layers, and of the parameters in them.

A parameter has two names. In the user's module, in files and in messages to the user it is the
layer's prefix and a key: ``model.layers.3.attention.weight``. Between the processes of a job it is
the layer's index and the same key: ``3.attention.weight``.

A layer of a cut module may also have parameters outside of its unit. Its prefix is written as
``.model.layers.3..model.scale``, the names of the unit and of these parameters; a key has the whole
name, as ``3.^.model.scale``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeworker.errors import UsageError
from pipeworker.facts.limits import LONGEST_NAME, check

_MARK, _BETWEEN = ".", ".."
"""Begins the prefix of a layer of a cut module, and separates the names in it."""
_ROOT = "^."
"""Begins the keys of such a layer, which are whole names in the user's module."""


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The prefix of each layer in the user's module, in model order.

    A prefix may hold dots, and one prefix may begin with another (``block`` and ``block.1``): a
    parameter then belongs to the layer with the longest prefix.

    Raises:
        ProtocolError: a prefix is invalid, or two layers have the same one.
    """

    prefixes: tuple[str, ...]
    _indices: dict[str, int] = field(init=False, repr=False, compare=False)
    _others: dict[str, int] = field(init=False, repr=False, compare=False)
    """The first layer with each parameter outside of its unit."""
    _outer: frozenset[int] = field(init=False, repr=False, compare=False)
    """The layers whose prefix is the beginning of another layer's."""

    def __post_init__(self) -> None:
        for prefix in self.prefixes:
            check(len(prefix) <= LONGEST_NAME, f"a layer's name of {len(prefix)} characters")
            names = self._names(prefix)
            check(all(all(name.split(".")) for name in names), f"a layer named {prefix!r}")
        units = self.units
        indices = {unit: index for index, unit in enumerate(units)}
        check(len(indices) == len(self.prefixes), "several layers with one name")
        object.__setattr__(self, "_indices", indices)
        others: dict[str, int] = {}
        for index, prefix in enumerate(self.prefixes):
            for name in self._names(prefix)[1:]:
                others.setdefault(name, index)
        object.__setattr__(self, "_others", others)
        outer, _ = self.by_layer(unit for unit in units if unit not in others)
        object.__setattr__(self, "_outer", frozenset(outer))

    @classmethod
    def numbered(cls, count: int) -> LayerNames:
        """Return the names of layers that are given as a list: their indices."""
        return cls(tuple(map(str, range(count))))

    @staticmethod
    def of_cut(unit: str, others: Iterable[str]) -> str:
        """Return the prefix of a layer of a cut module: its unit, and other parameters it has."""
        return _MARK + _BETWEEN.join((unit, *others))

    @staticmethod
    def _names(prefix: str) -> list[str]:
        return prefix[1:].split(_BETWEEN) if prefix.startswith(_MARK) else [prefix]

    def unit(self, index: int) -> str:
        """Return the name of a layer in the user's module."""
        return self._names(self.prefixes[index])[0]

    @property
    def units(self) -> tuple[str, ...]:
        """The name of each layer in the user's module."""
        return tuple(map(self.unit, range(len(self.prefixes))))

    def __len__(self) -> int:
        return len(self.prefixes)

    def __contains__(self, name: str) -> bool:
        """Return whether `name` is that of a parameter of one of the layers."""
        try:
            self.split(name)
        except KeyError:
            return False
        return True

    def parameter(self, index: int, key: str) -> str:
        """Return the name of the parameter or buffer `key` of the layer at `index`.

        Raises:
            UsageError: another layer's prefix is longer and matches that name too.
        """
        if self.prefixes[index].startswith(_MARK):
            return key.removeprefix(_ROOT)
        name = f"{self.prefixes[index]}.{key}"
        if index in self._outer and (found := self.split(name)[0]) != index:
            raise UsageError(
                f"layers {self.prefixes[index]!r} and {self.prefixes[found]!r}: both have a "
                f"parameter or buffer named {name!r}; give one of the layers another name"
            )
        return name

    def split(self, name: str) -> tuple[int, str]:
        """Return the index of the layer that `name` belongs to, and the rest of the name.

        Raises:
            KeyError: no layer's prefix matches.
        """
        dot = name.rfind(".")
        while dot >= 0:
            index = self._indices.get(name[:dot])
            if index is not None:
                is_cut = self.prefixes[index].startswith(_MARK)
                return index, _ROOT + name if is_cut else name[dot + 1 :]
            dot = name.rfind(".", 0, dot)
        return self._others[name], _ROOT + name

    def of_numbered(self, name: str) -> str:
        """Return the name in the user's module of a parameter named by its layer's index."""
        return self.parameter(*split_numbered(name))

    def by_layer(self, names: Iterable[str]) -> tuple[dict[int, list[str]], list[str]]:
        """Return the keys within each layer, by its index, and the names that match no layer."""
        keys: dict[int, list[str]] = {}
        unknown: list[str] = []
        for name in names:
            try:
                index, key = self.split(name)
            except KeyError:
                unknown.append(name)
            else:
                keys.setdefault(index, []).append(key)
        return keys, unknown


def numbered(index: int, key: str) -> str:
    """Return the name of a parameter by its layer's index."""
    return f"{index}.{key}"


def split_numbered(name: str) -> tuple[int, str]:
    """Return the layer's index and the key of a parameter named by its layer's index.

    Raises:
        ValueError: `name` is not an index, a dot and a key.
    """
    index, _, key = name.partition(".")
    if not (index.isascii() and index.isdecimal() and key):
        raise ValueError(f"{name!r} is not a layer's index and a parameter's name")
    return int(index), key


def shown(name: str) -> str:
    """Return a name by a layer's index as users know it: of a cut module, that in the module."""
    _, _, own = name.partition(f".{_ROOT}")
    return own or name


def is_numbered(name: str, layers: int) -> bool:
    """Return whether `name` is an index below `layers`, a dot and a key."""
    try:
        return layer_of(name) < layers
    except ValueError:
        return False


def layer_of(name: str) -> int:
    """Return the index of the layer in a parameter's name: ``3`` of ``3.attention.weight``."""
    return split_numbered(name)[0]
