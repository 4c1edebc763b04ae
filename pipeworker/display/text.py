"""How text, numbers and tables are written for a terminal, and numbers in JSON."""

from __future__ import annotations

import math
import re
import shlex
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from pipeworker.plan.figures import scaled

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")
_INVISIBLE = ("Cc", "Cf", "Zl", "Zp")
_MANY = 16
"""Numbers of a list that are written one by one."""
_UNLIMITED = 1 << 20
"""Columns of a table's console: lines are never wrapped or cut."""


def sanitize(text: str) -> str:
    """Remove everything that could move the cursor, restyle the terminal or reorder a line.

    Escape sequences, control characters and format characters (bidirectional marks among them) are
    removed; tabs and line ends stay. Surrogates, private and unassigned characters become ``?``.
    """
    if text.isprintable():
        return text
    return "".join(map(_visible, _ESCAPE.sub("", text)))


def _visible(character: str) -> str:
    if character.isprintable() or character in "\t\n":
        return character
    category = unicodedata.category(character)
    if category in _INVISIBLE:
        return ""
    return character if category == "Zs" else "?"


def shell_join(words: Iterable[str]) -> str:
    """Return a command line of printable characters, which a shell splits into these words.

    A word with other characters or bytes, as a path that is not UTF-8, is written as ``$'\\xff'``,
    which bash, zsh and ksh read, and every shell by POSIX of 2024.
    """
    return " ".join(
        shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_escaped, word))}'"
        for word in words
    )


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    how = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", how))


def number(value: float) -> str:
    """Format a figure with four decimals, or a small one with four significant digits."""
    return f"{value:.4f}" if not 0 < abs(value) < 0.001 else f"{value:.3e}"


def figure_text(value: Any) -> str:
    """Format a recorded value: a float as a figure, and any other as it is."""
    return number(value) if isinstance(value, float) else str(value)


def strict(value: Any) -> Any:
    """Return a value as strict JSON has it: NaN and infinities become null."""
    if isinstance(value, dict):
        return {name: strict(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def duration(seconds: float) -> str:
    """Format a time as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def data_size(size: float) -> str:
    """Format a size in bytes as ``12B``, ``3.4K``, ``56M`` or ``1.2G``, by powers of 1024."""
    value, unit = scaled(size, "BKMGTP", base=1024, least=1024)
    return f"{value:.1f}{unit}" if unit != "B" and value < 10 else f"{value:.0f}{unit}"


def counts(numbers: Sequence[int]) -> str:
    """Format numbers as ``3,5,5,3``, many of them as ``3,5×14,3``."""
    if len(numbers) <= _MANY:
        return ",".join(map(str, numbers))
    runs = ((value, len(list(run))) for value, run in groupby(numbers))
    return ",".join(f"{value}×{count}" if count > 1 else f"{value}" for value, count in runs)


def megabytes(sizes: Iterable[int]) -> str:
    """Format sizes in bytes as ``1, 3 MB``, as plans have them; 0 is an unknown size."""
    return ", ".join(f"{size / 1e6:.0f}" if size else "?" for size in sizes) + " MB"


def table(rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Align sanitized cells of one or more lines in columns; those in `right` to the right."""
    from rich.console import Console  # takes 0.1 s to import
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for index, row in enumerate(rows):
        for column in range(0 if index else len(row)):
            grid.add_column(justify="right" if column in right else "left", no_wrap=True)
        grid.add_row(*map(Text, row))
    console = Console(width=_UNLIMITED, color_system=None, legacy_windows=False)
    drawn = "".join(segment.text for segment in console.render(grid))  # writes to no stream
    return [line.rstrip() for line in drawn.splitlines()] if grid.rows else []
