"""Imported first by the processes of a host that is to be another than this one.

``PIPEWORKER_TESTS_PRETEND`` says how, as ``torch=2.12.0 clock=3600``.
"""

from __future__ import annotations

import os
import time

from pipeworker.wire import codec
from pipeworker.worker import worker

VARIABLE = "PIPEWORKER_TESTS_PRETEND"


def _shift(seconds: float) -> None:
    """Clocks that tell the time of day, and no others."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)


def _runs(name: str, version: str) -> None:
    real = worker._versions()
    said = tuple(f"{name} {version}" if v.startswith(f"{name} ") else v for v in real)
    worker._versions = lambda: said


for word in os.environ.get(VARIABLE, "").split():
    what, _, value = word.partition("=")
    if what == "clock":
        _shift(float(value))
    elif what == "protocol":
        codec.VERSION = int(value)
    else:
        _runs(what, value)
