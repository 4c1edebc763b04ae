"""The names of a model's layers, and of the parameters in them.

A parameter has two names. In the user's module, in files and in messages to the user it is the
layer's prefix and a key: ``model.layers.3.attention.weight``. Between the processes of a job it is
the layer's index and the same key: ``3.attention.weight``.

A layer of a cut module may also have parameters outside of its unit. Its prefix is written as
``.model.layers.3..model.scale``, the names of the unit and of these parameters; a key has the whole
name, as ``3.^.model.scale``. A layer that calls a unit again has the number of the call in its
prefix, as ``.cell@2``, and the same keys as the first.

A job may rename what is in a layer of a list. Its prefix is then written as ``=0..wte..model.wte``:
the name of the layer, and pairs of the beginning of a key and of the name in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from pipeworker.errors import UsageError
from pipeworker.facts.limits import LONGEST_NAME, LONGEST_PREFIX, check

_MARK, _BETWEEN = ".", ".."
"""Begins the prefix of a layer of a cut module, and separates the names in it."""
_RENAMED = "="
"""Begins the prefix of a layer in which names are replaced."""
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
    _replaced: dict[str, tuple[int, str]] = field(init=False, repr=False, compare=False)
    """The layer and the beginning of its keys, by the beginning of the names in their place."""
    _outer: frozenset[int] = field(init=False, repr=False, compare=False)
    """The layers whose prefix is the beginning of another layer's."""

    def __post_init__(self) -> None:
        for prefix in self.prefixes:
            names = self._names(prefix)
            longest = max(map(len, names))
            check(len(prefix) <= LONGEST_PREFIX, f"a layer with {len(names)} names")
            check(longest <= LONGEST_NAME, f"a layer's name of {longest} characters")
            check(all(all(name.split(".")) for name in names), f"a layer named {prefix!r}")
        units = self.units
        indices = {unit: index for index, unit in enumerate(units)}
        check(len(indices) == len(self.prefixes), "several layers with one name")
        object.__setattr__(self, "_indices", indices)
        others: dict[str, int] = {}
        for index, prefix in enumerate(self.prefixes):
            for name in self._names(prefix)[1:] if prefix.startswith(_MARK) else ():
                others.setdefault(name, index)
        object.__setattr__(self, "_others", others)
        replaced = {
            name: (index, key)
            for index, prefix in enumerate(self.prefixes)
            for key, name in _pairs(prefix)
        }
        count = sum(len(_pairs(prefix)) for prefix in self.prefixes)
        check(len(replaced) == count, "several parts of layers with one name")
        check(not replaced.keys() & indices.keys(), "a part of a layer with the name of a layer")
        object.__setattr__(self, "_replaced", replaced)
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
    def of_renamed(unit: str, pairs: Mapping[str, str]) -> str:
        """Return the prefix of a layer in which the beginnings of names are replaced."""
        return _RENAMED + _BETWEEN.join((unit, *(part for pair in pairs.items() for part in pair)))

    @staticmethod
    def _names(prefix: str) -> list[str]:
        marked = prefix.startswith(_MARK) or _is_renamed(prefix)
        return prefix[1:].split(_BETWEEN) if marked else [prefix]

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
        for start, own in _pairs(self.prefixes[index]):
            if f"{key}.".startswith(f"{start}."):
                return own + key[len(start) :]
        name = f"{self.unit(index)}.{key}"
        if index in self._outer and (owner := self.split(name)[0]) != index:
            raise UsageError(
                f"layers {self.unit(index)!r} and {self.unit(owner)!r}: both have a "
                f"parameter or buffer named {name!r}; give one of the layers another name"
            )
        return name

    def split(self, name: str) -> tuple[int, str]:
        """Return the index of the layer that `name` belongs to, and the rest of the name.

        Raises:
            KeyError: no layer's prefix matches.
        """
        dot = len(name)
        while dot >= 0:
            found = self._replaced.get(name[:dot])
            if found is not None:
                return found[0], found[1] + name[dot:]
            index = self._indices.get(name[:dot]) if dot < len(name) else None
            if index is not None:
                is_cut = self.prefixes[index].startswith(_MARK)
                return index, _ROOT + name if is_cut else name[dot + 1 :]
            dot = name.rfind(".", 0, dot)
        return self._others[name], _ROOT + name

    def is_first(self, index: int, key: str) -> bool:
        """Return whether no earlier layer of a cut module has the same parameter or buffer.

        Layers share a parameter outside of their units, and those of a unit that is called again.
        The first of these layers saves it, since it has one name in the user's module.
        """
        if not self.prefixes[index].startswith(_MARK):
            return True
        return self.split(self.parameter(index, key))[0] == index

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


def _is_renamed(prefix: str) -> bool:
    return prefix.startswith(_RENAMED) and _BETWEEN in prefix


@cache
def _pairs(prefix: str) -> tuple[tuple[str, str], ...]:
    """Return what is replaced in the names of a layer, the longest beginning of a key first."""
    if not _is_renamed(prefix):
        return ()
    _, *parts = prefix.split(_BETWEEN)
    pairs = zip(parts[::2], parts[1::2], strict=False)
    return tuple(sorted(pairs, key=lambda pair: len(pair[0]), reverse=True))


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
