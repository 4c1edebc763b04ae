"""Standard streams that may be closed, full, or lead to a reader who has gone."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import Any, TextIO

OURS = "[pipeworker] "
"""Begins what is said in a worker's log by pipeworker and not by the job."""
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


class _Whole(io.FileIO):
    """Takes all of what is written, or raises OSError."""

    def write(self, data: Any) -> int:
        left = memoryview(data)
        while left:
            written = super().write(left)
            if written is None:  # somebody has made it one that does not wait
                select.select([], [self], [])
            left = left[written or 0 :]
        return len(data)


def second(descriptor: int) -> TextIO:
    """Another file on what standard output or error is open on; it takes any text.

    Nothing waits in it, which could be written neither now nor at the end.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    file = _Whole(os.dup(descriptor), "w")
    return io.TextIOWrapper(file, encoding, "backslashreplace", write_through=True)


def note(text: str) -> None:
    """Say something in the log of this worker, at once; nothing where the job has closed it.

    Raises:
        OSError: the disk is full.
    """
    lines = [f"{OURS}{line}\n" for line in text.splitlines()]
    with contextlib.suppress(ValueError):
        print("".join(lines), end="", file=sys.stderr, flush=True)


def by_line() -> None:
    """What is printed is written line by line, though nobody sits before it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def flush() -> None:
    """Write what was printed; that it cannot be written is no reason to fail.

    A job may have closed its streams, or have others in their place, which raise what they like.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(Exception):
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
