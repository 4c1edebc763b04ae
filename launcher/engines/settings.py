"""The settings of an engine that ``--set NAME=VALUE`` specifies, read into its dataclass. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pipeworker.errors import UsageError

S = TypeVar("S")


def read_settings(kind: type[S], given: Mapping[str, str], engine: str) -> S:
    """Return the settings of a type, whose fields are texts and numbers, with ``-`` for ``_``."""
    known = {field.name.replace("_", "-"): field for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(given.keys() - known.keys()):
        raise UsageError(
            f"--set {unknown[0]}: no setting of --on {engine}; must be one of {', '.join(known)}"
        )
    values: dict[str, Any] = {}
    for name, text in given.items():
        number = known[name].type == "int"
        if number and not (text.isascii() and text.isdigit() and len(text) < 7):
            raise UsageError(f"--set {name}={text}: must be a number")
        values[known[name].name] = int(text) if number else text
    return kind(**values)
