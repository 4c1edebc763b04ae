"""The standard streams of a worker: input that is rejected, and output to a log."""

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

from pipeworker.errors import NoTerminalError, RecordError
from pipeworker.host import streams
from pipeworker.record.files.atomic_file import no_link
from pipeworker.record.files.located import located
from pipeworker.worker.blame import JobExit

_DEBUGGERS = ("bdb", "cmd", "pdb")


def redirect_output(path: Path) -> None:
    """Send all output, C code's included, to the worker's log; the display follows the log."""
    try:
        path.parent.mkdir(exist_ok=True)
        log = no_link(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise RecordError(located(path), error) from None
    streams.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    streams.log_pending = False
    streams.buffer_by_line()


class NoTerminal(io.TextIOBase):
    """Standard input of a worker: reading it is an error that names the way to a terminal."""

    def fileno(self) -> int:
        """Return the descriptor of standard input, which libraries may look at."""
        return 0

    def readline(self, size: int = -1, /) -> NoReturn:  # type: ignore[override]
        reject_input()

    def read(self, size: int | None = -1, /) -> NoReturn:
        reject_input()


def reject_input() -> NoReturn:
    """Reject a request for input, such as ``breakpoint()``."""
    raise NoTerminalError(
        f"{_caller()}: a worker has no terminal for input() or a debugger; run pipeworker launch "
        "--stages 1 --debug, which uses your terminal and gives the same numbers"
    )


def detach_terminal() -> None:
    """Have every request for input rejected."""
    sys.stdin = NoTerminal()
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = lambda *_, **__: reject_input()


def _caller() -> str:
    """Return the file and line that request input, outside of a debugger: ``job.py, line 3``."""
    frame: FrameType | None = inspect.currentframe()
    while frame and frame.f_globals.get("__name__") in (__name__, *_DEBUGGERS):
        frame = frame.f_back
    if frame is None:
        return "a job"
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


@contextmanager
def capture_exit_message(*, to_log: bool) -> Iterator[None]:
    """Add the output inside the context to the message of a JobExit, instead of to the log."""
    if not to_log:
        yield
        return
    streams.flush()
    start = os.fstat(1).st_size
    try:
        yield
    except JobExit as job_exit:
        streams.flush()
        printed = os.pread(1, os.fstat(1).st_size - start, start).decode(errors="replace").rstrip()
        job_exit.message = "\n".join(filter(None, [printed, job_exit.message]))
        os.ftruncate(1, start)
        raise
