"""``manifest.json``: what a checkpoint consists of. Read as a file that anybody may have made."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeworker.errors import UsageError

VERSION = 1
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is needed to put a checkpoint together.

    Attributes:
        parts: how many workers wrote a file.
        ties: by tied parameter, its names; the first one is in a file.
    """

    parts: int
    ties: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Every field checked.

        Raises:
            UsageError: it is no manifest, or one of another version.
            OSError: it cannot be read.
        """
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        try:
            found: Any = json.loads(text.decode()) if len(text) <= _MOST_BYTES else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UsageError(f"cannot read {path}: it is not the manifest of a checkpoint")
        version = found.get("version", VERSION)
        if version != VERSION:
            shown = f"version {reprlib.repr(version)}, this pipeworker reads version {VERSION}"
            raise UsageError(f"cannot read {path}: it is of {shown}")
        # Where a checkpoint does not say its parts, there is one of each stage.
        key = "parts" if "parts" in found else "stages"
        parts, ties = found.get(key), found.get("ties", [])
        if type(parts) is not int or parts < 1:
            shown = f"{key} is {reprlib.repr(parts)}, not a number of files"
            raise UsageError(f"cannot read {path}: {shown}")
        if not isinstance(ties, list) or not all(map(_is_tie, ties)):
            raise UsageError(f"cannot read {path}: ties are not lists of names")
        return cls(parts, tuple(map(tuple, ties)))


def _is_tie(names: Any) -> bool:
    return isinstance(names, list) and bool(names) and all(type(name) is str for name in names)
