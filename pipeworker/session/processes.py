"""Child processes that speak :mod:`pipeworker.wire.lines` over standard input and output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any, Generic, TypeVar

from pipeworker.errors import PipeworkerError
from pipeworker.host.spawn import command
from pipeworker.wire import lines
from pipeworker.wire.lines import (
    FromCoordinator,
    FromForkServer,
    Line,
    ToCoordinator,
    ToForkServer,
)

Said = TypeVar("Said", bound=Line)
Heard = TypeVar("Heard", bound=Line)


class LineProcess(Generic[Said, Heard]):
    """A process that speaks lines, in a session of its own.

    It does not see the terminal's Ctrl-C, so that the launcher decides what happens then.

    Args:
        name: what it is.
        line: its command.
        hears: what it may say.
        errors: an open file for its standard error; None for our own.

    Raises:
        PipeworkerError: it cannot be started.
    """

    def __init__(
        self, name: str, line: Sequence[str], hears: Any, errors: IO[Any] | None = None
    ) -> None:
        own = None if sys.stderr else subprocess.DEVNULL  # it may be closed
        try:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors or own,
                start_new_session=True,
            )
        except OSError as error:  # too few processes or descriptors; or there is no such command
            raise PipeworkerError(f"cannot start a process ({name}): {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        self._buffer: lines.Buffer[Heard] = lines.Buffer(hears)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End it, whatever it is doing; that shows in :meth:`hear`."""
        self._process.kill()

    def fileno(self) -> int:
        """For selectors: readable when the process has said something or has ended."""
        return self._stdout.fileno()

    def say(self, event: Said) -> None:
        """Write one line. That the process is gone shows in :meth:`hear`, not here."""
        try:
            self._stdin.write(lines.encode(event))
            self._stdin.flush()
        except (BrokenPipeError, ValueError):
            return

    def hear(self) -> tuple[list[Heard], bool]:
        """What it has said, and whether more can follow."""
        data = os.read(self.fileno(), 1 << 20)
        return self._buffer.feed(data), bool(data)

    def hang_up(self) -> None:
        """Close its input: it ends what it was doing and exits."""
        try:
            self._stdin.close()
        except BrokenPipeError:
            return

    def finish(self, timeout: float) -> int:
        """Wait for its end, kill it when it takes longer; returns the exit code."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._stdout.close()
        return code


def coordinator() -> LineProcess[ToCoordinator, FromCoordinator]:
    """A coordinator, which waits for its Configuration."""
    name = "pipeworker.coordinator.service"
    return LineProcess(name, command(name), FromCoordinator)


def fork_server(
    line: Sequence[str] = (), errors: IO[Any] | None = None
) -> LineProcess[ToForkServer, FromForkServer]:
    """A fork server, which begins to import torch.

    Args:
        line: a command that runs it, on another host; none for this one.
        errors: as of :class:`LineProcess`.
    """
    name = "pipeworker.host.forkserver"
    return LineProcess(line[0] if line else name, line or command(name), FromForkServer, errors)
