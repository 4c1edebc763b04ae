"""What a worker has in the place of a terminal: nobody who answers, and a log."""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pipeworker.errors import RecordError, UsageError
from pipeworker.host import streams
from pipeworker.worker.blame import Left

_DEBUGGERS = ("bdb", "cmd", "pdb")


def redirect_output(path: Path) -> None:
    """Everything the worker prints, C code included, goes to its log, from where it is shown.

    Raises:
        RecordError: there can be none.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise RecordError(path, error) from None
    streams.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    streams.by_line()


class NobodyAnswers(io.TextIOBase):
    """Standard input of a worker: who asks for a line is told how to be where there is one."""

    def fileno(self) -> int:
        return 0

    def readline(self, size: int = -1, /) -> NoReturn:  # type: ignore[override]
        """What ``input()`` and a debugger call.

        Raises:
            UsageError: always.
        """
        refuse()

    def read(self, size: int | None = -1, /) -> NoReturn:
        """As :meth:`readline`."""
        self.readline()


def refuse() -> NoReturn:
    """Say that there is no terminal here, and where there is one; for ``breakpoint()`` as well.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"{_asker()}: a worker has no terminal for input() or a debugger; pipeworker launch "
        "--stages 1 --debug gives it yours, and the same numbers"
    )


def detach() -> None:
    """Have whatever asks for a terminal say that a worker has none."""
    sys.stdin = NobodyAnswers()
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = lambda *_, **__: refuse()


def _asker() -> str:
    """``job.py, line 3``: who asks, behind the debugger."""
    frame: FrameType | None = inspect.currentframe()
    while frame and frame.f_globals.get("__name__") in (__name__, *_DEBUGGERS):
        frame = frame.f_back
    if frame is None:
        return "a job"
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


@contextmanager
def last_words(log: Path | None) -> Iterator[None]:
    """What is printed inside is said to the user, not to the log, where the job leaves inside.

    Args:
        log: where what is printed goes; None where that is no file of ours.
    """
    if log is None:
        yield
        return
    streams.flush()
    start = log.stat().st_size
    try:
        yield
    except Left as left:
        streams.flush()
        with log.open("rb") as file:
            file.seek(start)
            printed = file.read().decode(errors="replace").rstrip()
        left.said = "\n".join(filter(None, [printed, left.said]))
        os.truncate(log, start)
        raise
