"""The options of a run that is resumed: those recorded, and those given now. Pure."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.job.options import Options, override
from pipeworker.job.renamed import hyphened, reject_renamed, written
from pipeworker.plan.orders import DEFAULT_SCHEDULE
from pipeworker.plan.partition import EVEN
from pipeworker.plan.text import is_text

NUMBERS = (
    *("seed", "microbatches", "accumulate", "precision", "clip_grad_norm", "clip_grad_value"),
    *("deferred_batch_norm", "threads", "arguments", "init_from", "init_strict", "replicas"),
    *("compile", "deterministic"),
)
"""Options that change the numbers of a run. They must stay the same unless they are allowed."""
_PLACING = ("stages", "schedule", "virtual_stages")
"""Options that decide which stages there are."""


def parse_allowed(names: Collection[str]) -> set[str]:
    """Return the options that ``--allow-change`` names, by their names in :class:`Options`."""
    found = {name.replace("-", "_") for name in names}
    if unknown := sorted(found - {*NUMBERS}):
        name = hyphened(unknown[0])
        reject_renamed(name, Options.__dataclass_fields__, hyphened, where="--allow-change ")
        raise UsageError(
            f"--allow-change {name}: must be one of {', '.join(map(hyphened, NUMBERS))}"
        )
    return found


def merge(recorded: Options, given: Mapping[str, Any], allowed: Collection[str]) -> dict[str, Any]:
    """Return the fields of the recorded options, with those given now in their place.

    A recorded balance is dropped if the stages or their schedule change, recorded virtual stages if
    the schedule does, and sizes of memory by worker, and a recorded schedule of the job's own, if
    the stages change. Arguments cannot be given as none, so allowing them to differ and giving none
    removes the recorded ones.
    """
    found = override(dataclasses.asdict(recorded), given)
    found["own_loop"] = given.get("own_loop", False)  # what resumes now, not what began
    del found["job_file"]
    own = "schedule" not in given and is_text(recorded.schedule)
    if own and found["stages"] != recorded.stages:
        found["schedule"] = DEFAULT_SCHEDULE
    if found["schedule"] != recorded.schedule and "virtual_stages" not in given:
        found["virtual_stages"] = None  # as many as the new schedule has
    is_placed_anew = any(found[name] != getattr(recorded, name) for name in _PLACING)
    if is_placed_anew and "balance" not in given and recorded.balance != EVEN:
        found["balance"] = None
    if found["stages"] != recorded.stages and len(recorded.memory or ()) > 1:
        found["memory"] = given.get("memory")
    if "arguments" in allowed and "arguments" not in given:
        found["arguments"] = ()
    return found


def check_unchanged(
    recorded: Options, options: Options, allowed: Collection[str], where: object
) -> None:
    """Check that the run `where` continues with the numbers that it would have had.

    Raises:
        UsageError: options differ that are not allowed to; the message names all of them.
    """
    if recorded.own_loop and not options.own_loop:
        raise UsageError(
            f"{where}: has the loop of a pipeworker.Pipeline; continue it in the script that began "
            "it, with resume=True"
        )
    if options.own_loop and not recorded.own_loop:
        raise UsageError(
            f"{where}: has no loop of its own; continue it as it was begun, or load() its "
            "checkpoint in a new run"
        )
    pairs = {name: (getattr(recorded, name), getattr(options, name)) for name in NUMBERS}
    differing = {n: pair for n, pair in pairs.items() if pair[0] != pair[1] and n not in allowed}
    if differing:
        changes = ", ".join(
            f"{name if name == 'arguments' else written(name)} "
            f"({_shown(before)}, now {_shown(now)})"
            for name, (before, now) in differing.items()
        )
        allows = " ".join(f"--allow-change {hyphened(name)}" for name in differing)
        raise UsageError(
            f"{where}: would continue with other numbers, by {changes}; leave them out, or allow "
            f"them to change: {allows}"
        )


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return shlex.join(value) or "none"
    if value is None or isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
