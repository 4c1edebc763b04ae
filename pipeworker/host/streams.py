"""Standard streams that may be closed, full, or lead to a reader who has gone."""

from __future__ import annotations

import contextlib
import os
import sys

_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def stand_in() -> None:
    """Open on nothing what this process was started without.

    Else the next file or socket takes its number, and is what everything that prints writes to.
    """
    for name, mode in _MODES.items():  # in the order of their descriptors: the lowest is taken
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))


def flush() -> None:
    """Write what was printed; that it cannot be written is no reason to fail."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()


def let_go() -> None:
    """What a reader who has gone did not take is no error of the interpreter's (its status 120)."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
