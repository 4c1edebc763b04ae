"""What the environment says to every process of a job, and what it is."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from pipeworker import __version__
from pipeworker.errors import UsageError
from pipeworker.timings import DEFAULT, VARIABLE, Timings

TORCHRUN_JOB = "TORCHELASTIC_RUN_ID"
"""Of the environment: torchrun's name for its job."""
_GIT_SECONDS = 2.0
_GIT_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
"""Of the environment, inside a hook: another repository than that of a folder."""


@cache
def timings() -> Timings:
    """The timings in force.

    Raises:
        UsageError: the variable that changes them does not make sense.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        return DEFAULT.changed(text) if text else DEFAULT
    except ValueError as error:
        raise UsageError(f"{VARIABLE} is {text!r}: {error}") from None


def versions() -> dict[str, str | None]:
    """Of what a job's numbers depend on."""
    from importlib import metadata  # a process that records nothing does not wait for it

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    return {"pipeworker": __version__, "torch": torch, "python": platform.python_version()}


def facts() -> dict[str, Any]:
    """What there is to know of this process, for who reads of its run later."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "command": list(sys.argv),
        "versions": versions(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "pid": os.getpid(),
        "torchrun": os.environ.get(TORCHRUN_JOB),
    }


def git(file: Path, seconds: float = _GIT_SECONDS) -> dict[str, Any]:
    """The commit of the folder that a file is in: `commit`, and whether it is `dirty`.

    That is so when files of the repository have changed since, or this one is not in it; None where
    it takes too long to say. Empty where there is no repository, no commit, no git, or no answer.
    """
    until = time.monotonic() + seconds
    commit = _git(file.parent, until, "rev-parse", "--verify", "HEAD")
    if not commit:
        return {}
    changed = _git(file.parent, until, "status", "--porcelain", "--untracked-files=no")
    known = _git(file.parent, until, "ls-files", "--", file.name)
    dirty = None if changed is None or known is None else bool(changed or not known)
    return {"commit": commit, "dirty": dirty}


def _git(folder: Path, until: float, *words: str) -> str | None:
    """What a git command says; None where it fails, or has not ended by then.

    It takes no lock and starts no process that stays.
    """
    env = {name: value for name, value in os.environ.items() if name not in _GIT_ELSEWHERE}
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words],
            env={**env, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(0.0, until - time.monotonic()),
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return None if done.returncode else done.stdout.decode(errors="replace").strip()
