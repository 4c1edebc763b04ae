"""The hooks of a job: functions that are called with what is recorded, outside of the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pipeworker.job.file import HOOKS, JobFile

Hooked = dict[str, list[tuple[str, Callable[[Any], Any]]]]
"""By the kind of record, functions that are called with each, and what messages call them."""


def called_with_records(job: JobFile) -> list[tuple[str, Any]]:
    """Return the objects whose methods are hooks, with names: the job itself, named "", is one."""
    found: list[tuple[str, Any]] = [("", job)]
    for one in job.callbacks:
        name = type(one).__name__
        count = sum(other.partition(" ")[0] == name for other, _ in found)
        found.append((f"{name} {count + 1}" if count else name, one))
    return found


def hooks_of(objects: Iterable[tuple[str, Any]]) -> Hooked:
    """Return the hooks among the methods of named objects."""
    found: Hooked = {}
    for name, one in objects:
        for kind in HOOKS:
            if (function := getattr(one, kind, None)) is not None:
                text = f"{name}.{kind}()" if name else f"{kind}()"
                found.setdefault(kind, []).append((text, function))
    return {kind: found[kind] for kind in HOOKS if kind in found}
