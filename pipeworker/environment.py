"""The environment of a process: its variables, versions, host, and the commit of its code."""

from __future__ import annotations

import os
import platform
import runpy
import socket
import subprocess
import sys
import time
from datetime import datetime, timezone
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.timings import DEFAULT, VARIABLE, Timings
from pipeworker.version import __version__

TORCHRUN_JOB = "TORCHELASTIC_RUN_ID"
"""The variable with torchrun's name for its job."""
POD = "KUBERNETES_SERVICE_HOST"
"""A variable that is set in a pod of Kubernetes."""
_GIT_SECONDS = 2.0
_GIT_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
"""Variables that git sets inside a hook: they name another repository than a folder's own."""


@cache
def timings() -> Timings:
    """Return the timings in force; raise a UsageError if their variable is wrong."""
    text = os.environ.get(VARIABLE, "")
    try:
        return DEFAULT.changed(text) if text else DEFAULT
    except ValueError as error:
        raise UsageError(f"{VARIABLE} {text!r}: {error}") from None


def versions() -> dict[str, str | None]:
    """Return the versions that the numbers of a job depend on."""
    return {
        "pipeworker": __version__,
        "torch": torch_version(),
        "python": platform.python_version(),
    }


def torch_version() -> str | None:
    """Return torch's version, as ``2.13.0+cpu``, without importing torch; None if there is none.

    The metadata of torch's package may lack the local part, which names the build.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        found = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except FileNotFoundError:  # another module has the name
        return None
    return str(found["__version__"])


def facts() -> dict[str, Any]:
    """Return the facts about this process that ``run.json`` records."""
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
    """Return the git commit of a file's folder; empty without a repository, a commit or git.

    `dirty` is whether files of the repository have changed since, or this file is not in it;
    None if git needs more than `seconds` for all calls together.
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
    """Return the output of a git command, which takes no lock; None if it fails or is too slow."""
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
