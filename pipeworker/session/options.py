"""The options of ``launch`` in a script: which are arguments, and why the others are not."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from pipeworker.errors import UsageError, a_type
from pipeworker.job.file import has_begun_to_load
from pipeworker.job.options import Options
from pipeworker.job.renamed import reject_batch_size, reject_renamed
from pipeworker.runs.begin import RunRequest
from pipeworker.session.process import script_path

_LAUNCHER = "no launcher starts the processes of a script, nor replaces them"
_SCRIPT = "the script is the job"
_PROCESSES = "each process of the script is a stage"
_LOOP = "the script's own loop decides it"
NOT_OF_A_SCRIPT: dict[str, str] = {
    **dict.fromkeys(("hosts", "hosts_file", "sync", "launcher_address"), _LAUNCHER),
    **dict.fromkeys(("on", "nodes", "settings"), _LAUNCHER),
    **dict.fromkeys(("dry_run", "max_restarts", "min_stages", "snapshot_every"), _LAUNCHER),
    **dict.fromkeys(("job_file", "arguments"), _SCRIPT),
    "stages": _PROCESSES,
    "config": "a script reads no file of options",
    "debug": "a script has its own terminal",
    "json": "a script has its own output",
    "output": "what a process of the script prints is the script's",
    "verbose": "it shows pipeworker's own log; a script has none",
}
"""By name, why an option of ``launch`` is no argument of ``train`` and ``Pipeline``."""
NOT_OF_A_LOOP: dict[str, str] = {
    **NOT_OF_A_SCRIPT,
    **dict.fromkeys(("steps", "epochs", "accumulate", "patience"), _LOOP),
    **dict.fromkeys(("evaluate_every", "evaluate_first"), _LOOP),
    "checkpoint_busy": "a loop always waits for its checkpoint, because it may change weights",
    "log_every": "a loop prints what it wants to",
    "quiet": "a loop prints what it wants to",
}
"""By name, why an option of ``launch`` is no argument of ``Pipeline``."""
_NAMES = {"profile": "profile_steps", "set": "settings"}
"""Names that :func:`pipeworker.launch` has for options."""
_INTERNAL = ("own_loop", "evaluate_only", "plan_only", "resume", "resume_step")
"""Fields of :class:`Options` that are none of ``launch``, or are parameters of their own."""


def option_names(excluded: Collection[str]) -> list[str]:
    """Return the names of the options that a call takes besides its own parameters."""
    fields = (field.name for field in dataclasses.fields(Options))
    return sorted(name for name in fields if name not in (*excluded, *_INTERNAL))


def check_script(where: str) -> None:
    """Reject the call `where` in a script that is run as a job file: each worker would train it.

    Raises:
        UsageError: it is.
    """
    if has_begun_to_load():
        raise UsageError(
            f"{where}: a job file has no loop of its own; run this script with torchrun or python, "
            "or leave this call out"
        )


def check_options(options: Mapping[str, Any], excluded: Mapping[str, str], where: str) -> None:
    """Reject options of the call `where` that are unknown or `excluded`.

    Raises:
        UsageError: there is one.
    """
    known = option_names(excluded)
    for name in options:
        own = _NAMES.get(name, name)
        if own != name and own in known:
            raise UsageError(f"{where}: {name}: here its name is {own}; use that")
        if reason := excluded.get(own):
            raise UsageError(f"{where}: {name}: {reason}; leave it out")
        if name not in known:
            reject_unknown(name, {*known, "allow_change"}, where, f"use one of {', '.join(known)}")


def reject_unknown(name: str, known: Collection[str], where: str, advice: str) -> NoReturn:
    """Reject an option that the call `where` does not have: one of another name, or a wrong one.

    Raises:
        UsageError: always; with the `advice`, unless the message has a better one.
    """
    reject_renamed(name, known, str, "{}={}".format, f"{where}: ")
    reject_batch_size(name, known, str, f"{where}: ")
    if meant := get_close_matches(name, sorted(known), 1):
        advice = f"did you mean {meant[0]}?"
    raise UsageError(f"{where}: {name}: no such option; {advice}")


def checked_path(where: str, path: object) -> Path:
    """Return an argument, which errors call `where`, as a path.

    Raises:
        UsageError: it is none.
    """
    found = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(found, str):
        raise UsageError(f"{where} is {a_type(path)}; make it a path")
    if not found:  # it would be the current folder
        raise UsageError(f"{where} is ''; make it a path that is not empty")
    if "\0" in found:
        raise UsageError(f"{where} is {found!r}; a path has no null character")
    return Path(found)


def script_request(
    options: Mapping[str, Any],
    run_dir: str | Path | None,
    allow_change: str | Sequence[str],
    where: str,
    *,
    ranks: int,
    resume: bool,
    auto_resume: bool,
) -> RunRequest:
    """Return the run that the call `where` requests; its program has `ranks` processes.

    Raises:
        UsageError: an argument is of a wrong type.
    """
    if run_dir is not None:
        checked_path(f"{where}: run_dir", run_dir)
    for name, value in (("resume", resume), ("auto_resume", auto_resume)):
        if not isinstance(value, bool):
            raise UsageError(
                f"{where}: {name} is {value!r}; make it True or False, and run_dir the run"
            )
    allowed = (allow_change,) if isinstance(allow_change, str) else allow_change
    if not isinstance(allowed, Sequence) or not all(isinstance(name, str) for name in allowed):
        raise UsageError(
            f"{where}: allow_change is {a_type(allow_change)}; make it a list of names of options"
        )
    return RunRequest(
        script_path(), None, options, run_dir, resume, auto_resume, tuple(allowed), ranks=ranks
    )
