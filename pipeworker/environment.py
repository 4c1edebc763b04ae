"""What the environment says to every process of a job, and what it is."""

from __future__ import annotations

import os
import platform
import socket
import sys
from datetime import datetime, timezone
from functools import cache
from typing import Any

from pipeworker import __version__
from pipeworker.errors import UsageError
from pipeworker.timings import DEFAULT, VARIABLE, Timings

TORCHRUN_JOB = "TORCHELASTIC_RUN_ID"
"""Of the environment: torchrun's name for its job."""


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
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(sys.argv),
        "versions": versions(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "pid": os.getpid(),
        "torchrun": os.environ.get(TORCHRUN_JOB),
    }
