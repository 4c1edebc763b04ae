"""The names in a file of weights and in a model that do not match."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field

from pipeworker.record.checkpoint.tensor_file import TensorInfo

_MOST_SHOWN = 10


@dataclass(slots=True)
class StateDictDiff:
    """Names that the file lacks, names that the model lacks, and texts on tensors that differ."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    def add_different(self, name: str, found: TensorInfo, wanted: TensorInfo) -> None:
        """Record that the file has another tensor than the model wants."""
        there, here = (
            f"{list(shape)} {str(dtype).removeprefix('torch.')}" for dtype, shape in (found, wanted)
        )
        self.different.append(f"{name} ({there} for {here})")

    def __len__(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.different)

    def __str__(self) -> str:
        return self.summary(_MOST_SHOWN)

    def summary(self, most: int | None = None) -> str:
        """Return a line with at most so many names of each kind; None for all."""
        kinds = (
            ("it lacks", self.missing),
            ("the model does not have", list(map(_printable, self.unexpected))),
            ("of another shape or type are", self.different),
        )
        return "; ".join(f"{what} {some(names, most)}" for what, names in kinds if names)


def some(names: list[str], most: int | None) -> str:
    """Return at most so many names, and how many more there are."""
    shown, rest = names[:most], len(names[most:]) if most is not None else 0
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _printable(name: str) -> str:
    """Return a name from a file, escaped if a terminal could not show it."""
    return name if name.isprintable() and len(name) <= 200 else reprlib.repr(name)
