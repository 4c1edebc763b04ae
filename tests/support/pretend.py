"""A fake of another host: replaces the versions that this process reports, or shifts its clock.

The process imports this module first; ``PIPEWORKER_TESTS_PRETEND`` lists the differences, such as
``torch=2.12.0 clock=3600``.
"""

from __future__ import annotations

import os
import platform
import time

import torch

from pipeworker.wire import codec
from pipeworker.worker import worker

VARIABLE = "PIPEWORKER_TESTS_PRETEND"


def _shift(seconds: float) -> None:
    """Shift the clocks of the time of day; monotonic clocks do not change."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)


def _replace_version(name: str, version: str) -> None:
    """Replace a version that a worker reports."""
    if name == "python":
        major, minor = version.split(".")
        platform.python_version_tuple = lambda: (major, minor, "0")
    else:
        vars({"torch": torch, "pipeworker": worker}[name])["__version__"] = version


for word in os.environ.get(VARIABLE, "").split():
    what, _, value = word.partition("=")
    if what == "clock":
        _shift(float(value))
    elif what == "protocol":
        codec.VERSION = int(value)
    else:
        _replace_version(what, value)
