"""What the environment says to every process of a job."""

from __future__ import annotations

import os
from functools import cache

from pipeworker.errors import UsageError
from pipeworker.timings import DEFAULT, VARIABLE, Timings


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
