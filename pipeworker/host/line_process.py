"""Child processes that speak :mod:`pipeworker.wire.lines` over standard input and output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any, Generic, TypeVar

from pipeworker.environment import timings
from pipeworker.errors import PipeworkerError
from pipeworker.host.lifetime import command
from pipeworker.wire import lines

Sent = TypeVar("Sent", bound=lines.Line)
Received = TypeVar("Received", bound=lines.Line)


class LineProcess(Generic[Sent, Received]):
    """A child process that receives lines of type `Sent` and sends those in the union `received`.

    It has a session of its own: the terminal's Ctrl-C does not reach it, so that the launcher
    decides what happens then. Its standard error goes to `errors`, by default to this process's.
    It may print anything before its first line: so does a shell, or a ``sitecustomize`` of Python.

    Raises:
        PipeworkerError: it cannot be started.
    """

    def __init__(
        self,
        name: str,
        line: Sequence[str],
        received: Any,
        errors: IO[Any] | None = None,
    ) -> None:
        own = None if sys.stderr else subprocess.DEVNULL  # ours may be closed
        try:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors or own,
                start_new_session=True,
            )
        except OSError as error:  # too few processes or descriptors; or there is no such command
            raise PipeworkerError(f"cannot start the process {name}: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        self._buffer: lines.Buffer[Received] = lines.Buffer(received, skips=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill the process; :meth:`receive` then reports its end."""
        self._process.kill()

    def fileno(self) -> int:
        """Return the descriptor that is readable when the process has sent a line or has ended."""
        return self._stdout.fileno()

    def send(self, event: Sent) -> None:
        """Send one line. If the process has ended, :meth:`receive` reports it, not this method."""
        with suppress(BrokenPipeError, ValueError):
            self._stdin.write(lines.encode(event))
            self._stdin.flush()

    def receive(self) -> tuple[list[Received], bool]:
        """Wait for input; return the lines that are complete, and whether more can follow.

        Nothing follows once another thread has waited for the end (:meth:`wait`).
        """
        data = b"" if self._stdout.closed else os.read(self.fileno(), 1 << 20)
        return self._buffer.feed(data), bool(data)

    def skipped(self) -> list[str]:
        """Return what it has printed before its first line, once."""
        found, self._buffer.skipped = self._buffer.skipped, []
        return found

    def close_input(self) -> None:
        """Close the input of the process, which then finishes and exits."""
        with suppress(BrokenPipeError):
            self._stdin.close()

    def wait(self, timeout: float) -> int:
        """Wait `timeout` seconds for the end, then kill the process; return its exit code.

        The kernel may keep a killed process for longer: a debugger or a driver holds it.
        """
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = -signal.SIGKILL
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timings().linger)
        self.close_input()
        self._stdout.close()
        return code


def start_coordinator() -> LineProcess[lines.ToCoordinator, lines.FromCoordinator]:
    """Start a coordinator, which waits for its configuration."""
    name = "pipeworker.coordinator.service"
    return LineProcess(name, command(name), lines.FromCoordinator)


def start_agent(
    line: Sequence[str] = (), errors: IO[Any] | None = None
) -> LineProcess[lines.ToAgent, lines.FromAgent]:
    """Start an agent here, or by the command `line` on another host."""
    name = "pipeworker.host.agent"
    called = line[0] if line else name
    return LineProcess(called, line or command(name), lines.FromAgent, errors)


def start_hooks() -> LineProcess[lines.ToHooks, lines.FromHooks]:
    """Start the process that calls a job's hooks, which waits for its setup."""
    name = "pipeworker.worker.hooks"
    return LineProcess(name, command(name), lines.FromHooks)
