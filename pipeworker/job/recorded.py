"""What is asked of a run that goes on: what was recorded of it, and what is said now. Pure."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.job.options import RIVALS, Options

NUMBERS = (
    *("seed", "microbatches", "accumulate", "precision", "clip_grad_norm", "clip_grad_value"),
    *("deferred_batch_norm", "threads", "arguments", "init_from", "init_partial", "replicas"),
    *("compile", "deterministic"),
)
"""Options with which a run has other numbers from there on."""
_WHERE = ("stages", "schedule")
"""What a balance is for."""
_OF_ONE_START = ("job_file", "resume", "resume_step")


def allowed(names: Collection[str]) -> set[str]:
    """The options that may differ, by their names in :class:`Options`.

    Raises:
        UsageError: one is none of those that must not.
    """
    found = {name.replace("-", "_") for name in names}
    if unknown := sorted(found - {*NUMBERS}):
        known = ", ".join(map(_shown_name, NUMBERS))
        raise UsageError(f"--allow {_shown_name(unknown[0])}: must be one of {known}")
    return found


def merged(recorded: Options, said: Mapping[str, Any], allow: Collection[str]) -> dict[str, Any]:
    """What was recorded, but for what is said now.

    A balance is not for other stages. Arguments cannot be said to be none, only allowed to.
    """
    beaten = {RIVALS[name]: None for name in said if name in RIVALS}
    found = {**dataclasses.asdict(recorded), **beaten, **said}
    for name in _OF_ONE_START:
        del found[name]
    if any(found[name] != getattr(recorded, name) for name in _WHERE) and "balance" not in said:
        found["balance"] = None
    if "arguments" in allow and "arguments" not in said:
        found["arguments"] = ()
    return found


def check(recorded: Options, asked: Options, allow: Collection[str], where: object) -> None:
    """That the numbers of a run stay those that it would have had.

    Args:
        where: what to call the run.

    Raises:
        UsageError: options differ and are not allowed to; all are named.
    """
    if recorded.own_loop:
        raise UsageError(f"{where} is of a pipeworker.Pipeline: only its own script has its loop")
    differs = [
        name
        for name in NUMBERS
        if getattr(recorded, name) != getattr(asked, name) and name not in allow
    ]
    if differs:
        lines = [
            f"\n  {_option(name)}: {_shown(getattr(recorded, name))}, "
            f"now {_shown(getattr(asked, name))}"
            for name in differs
        ]
        allows = " ".join(f"--allow {_shown_name(name)}" for name in differs)
        raise UsageError(
            f"{where} was begun with other options, and would go on with other numbers:"
            f"{''.join(lines)}\nleave them out, or say that they may differ: {allows}"
        )


def _shown_name(name: str) -> str:
    return name.replace("_", "-")


def _option(name: str) -> str:
    return name if name == "arguments" else f"--{_shown_name(name)}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return shlex.join(value) or "none"
    if value is None or isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
