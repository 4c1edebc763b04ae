"""What of a file does not fit a model, by name."""

from __future__ import annotations

import reprlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeworker.record.image import Look

_SHOWN = 10
_EXTRA = "_extra_state"


@dataclass(slots=True)
class Misfits:
    """Names that do not match, or do with something else.

    Attributes:
        missing: the model's, not the file's.
        unexpected: the file's, not the model's.
        different: a text about each.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    def differ(self, name: str, found: Look, wanted: Look) -> None:
        """A tensor is another one in the file than in the model."""
        self.different.append(f"{name} ({_shown(found)} for {_shown(wanted)})")

    def __len__(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.different)

    def __str__(self) -> str:
        return self.listed(_SHOWN)

    def listed(self, most: int | None = None) -> str:
        """So many of each kind, or all."""
        kinds = (
            ("it lacks", self.missing),
            ("the model does not have", list(map(_name, self.unexpected))),
            ("of another shape or type are", self.different),
        )
        return "; ".join(f"{what} {_some(names, most)}" for what, names in kinds if names)


def by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """By the name of the layer, the rest of each name."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        layer, _, key = name.partition(".")
        found[layer].append(key)
    return found


def is_extra(key: str) -> bool:
    """Whether it names a module's extra state, which may be anything."""
    return key.rpartition(".")[2] == _EXTRA


def _some(names: list[str], most: int | None) -> str:
    shown, rest = names[:most], len(names[most:]) if most is not None else 0
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _shown(look: Look) -> str:
    dtype, shape = look
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _name(name: str) -> str:
    """A file may say anything."""
    return name if name.isprintable() and len(name) <= 200 else reprlib.repr(name)
