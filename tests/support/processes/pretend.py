"""A fake of another host: replaces the versions that this process reports, or shifts its clock.

The process imports this module first; ``PIPEWORKER_TESTS_PRETEND`` lists the differences, such as
``torch=2.12.0 clock=3600``.
"""

from __future__ import annotations

import os
import time

from pipeworker.environment import versions
from pipeworker.wire import codec
from pipeworker.worker import worker

VARIABLE = "PIPEWORKER_TESTS_PRETEND"
_VERSIONS = versions()


def _shift(seconds: float) -> None:
    """Shift the clocks of the time of day; monotonic clocks do not change."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)


def _replace_version(name: str, version: str) -> None:
    """Replace a version that a worker reports."""
    _VERSIONS[name] = version
    vars(worker)["versions"] = lambda: _VERSIONS


for word in os.environ.get(VARIABLE, "").split():
    what, _, value = word.partition("=")
    if what == "clock":
        _shift(float(value))
    elif what == "protocol":
        codec.VERSION = int(value)
    else:
        _replace_version(what, value)
