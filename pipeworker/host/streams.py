"""Standard streams that may be closed, full, or without a reader."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO

LOG_PREFIX = "[pipeworker] "
"""The beginning of a line in a worker's log that pipeworker writes, not the job."""
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def open_missing() -> None:
    """Open the null device in place of each standard stream that this process was started without.

    Otherwise the next file or socket gets the descriptor, and receives everything that is printed.
    """
    for name, mode in _MODES.items():  # in the order of their descriptors: the lowest is used
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))


def accept_any_text() -> None:
    """Have standard output escape the characters that its encoding lacks, as standard error does.

    A path or a recorded text may have any characters.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _WholeWrites(io.FileIO):
    """A file that writes all data of a call, or raises OSError."""

    def write(self, data: Any) -> int:
        """Write all of the data; return its length."""
        left = memoryview(data)
        while left:
            written = super().write(left)
            if written is None:  # another process has made the descriptor non-blocking
                select.select([], [self], [])
            left = left[written or 0 :]
        return len(data)


def duplicate(descriptor: int) -> TextIO:
    """Return a second file for a descriptor; it accepts any text.

    It is unbuffered, so that no text is left that can be written neither now nor at exit.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    file = _WholeWrites(os.dup(descriptor), "w")
    return io.TextIOWrapper(file, encoding, "backslashreplace", write_through=True)


log_pending = False
"""Whether this process is a worker that has yet to redirect its output to its log."""


def note(text: str) -> None:
    """Write lines to this worker's log at once; they are lost if that is impossible.

    The job may have closed the stream. The disk of the log may be full, and no job ends for that.
    """
    lines = [f"{LOG_PREFIX}{line}\n" for line in text.splitlines()]
    with contextlib.suppress(ValueError, OSError):
        print("".join(lines), end="", file=sys.stderr, flush=True)


def buffer_by_line() -> None:
    """Have output written line by line, also if it does not go to a terminal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def flush() -> None:
    """Write buffered output; ignore errors.

    A job may have closed its streams, or replaced them by objects that raise any exception.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.flush()


def flush_files() -> None:
    """Write what is buffered for the files that the job has opened, as an interpreter's end does.

    A forked process ends without that. What was frozen before the fork is not of the job.
    """
    for one in gc.get_objects():
        if type(one) in _BUFFERED:
            with contextlib.suppress(Exception):
                one.flush()


def connect_to_null(*descriptors: int) -> None:
    """Put the null device in place of what is behind these descriptors."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


@contextlib.contextmanager
def printed_to_stderr() -> Iterator[None]:
    """Send to standard error what this process prints inside the context, C code included."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush()
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def discard_output() -> None:
    """Discard all that this process writes from now on, C code included."""
    flush()
    connect_to_null(1, 2)


def discard_unwritten() -> None:
    """Write buffered output, or discard it if the reader is gone.

    Otherwise the interpreter would fail at exit, with status 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            connect_to_null(stream.fileno())
