"""The figure of evaluation passes by which one is better than another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

_KINDS = ("min", "max")
Row = TypeVar("Row", bound=Mapping[str, Any])
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Criterion:
    """A figure of an evaluation pass; if `more`, a larger one is better, else a smaller one."""

    name: str
    more: bool = False

    @staticmethod
    def parse(text: str) -> Criterion:
        """Read ``loss`` or ``min:loss``, of which less is better, or ``max:accuracy``."""
        kind, colon, name = text.partition(":")
        return Criterion(name, kind == "max") if colon and kind in _KINDS else Criterion(text)

    def value(self, row: Mapping[str, Any]) -> float | None:
        """Return the figure of a row; None if it has none, or one that is not finite."""
        found = row.get(self.name)
        # A number may be too long for a float.
        if isinstance(found, (int, float)) and -math.inf < found < math.inf:
            return found
        return None

    def is_better(self, value: float | None, than: float | None) -> bool:
        """Return whether a value is better than another one; None is worse than all."""
        if value is None or than is None:
            return value is not None
        return value > than if self.more else value < than

    def since_best(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Return the number of rows after the best one; of all if none has a finite figure."""
        best, count = None, 0
        for row in rows:
            value, count = self.value(row), count + 1
            if self.is_better(value, best):
                best, count = value, 0
        return count

    def best(self, rows: Iterable[Row]) -> Row | None:
        """Return the best row, of equal ones the first; None if none has a finite figure."""
        found: Row | None = None
        for row in rows:
            if self.is_better(self.value(row), self.value(found) if found else None):
                found = row
        return found

    def best_of(self, rows: Mapping[Key, Mapping[str, Any]]) -> Key | None:
        """Return the key of the best row; see :meth:`best`."""
        best = self.best(rows.values())
        return next((key for key, row in rows.items() if row is best), None)
