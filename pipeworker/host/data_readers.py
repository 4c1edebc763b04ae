"""The processes that read ``data()`` for workers of this host, and outlive them.

The data of a job that can neither be skipped nor restored would be read again from the start of the
epoch after each loss of a worker. A process of the agent's reads it instead, and keeps its place.
It is started at the first message of a worker that needs it, so other jobs have none.
"""

from __future__ import annotations

import mmap
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from struct import Struct

from pipeworker.environment import timings
from pipeworker.host.lifetime import is_stopped, kill_group, wait_for_killed
from pipeworker.host.session_watcher import SessionWatcher

UNFIT = 3
"""The exit status of a process that cannot read for its rank: no other one is started."""
_TIME = Struct("<d")
_PID = Struct("<q")
_EXIT = Struct("<?i")
"""Whether the process has ended, and its exit code."""
_EXIT_AT = _TIME.size + _PID.size


class ReadingClock:
    """For how long a process has loaded its job or read, and how it has ended, in shared memory."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _EXIT_AT + _EXIT.size)

    def started(self, pid: int) -> None:
        """Note the process that reads."""
        _PID.pack_into(self._memory, _TIME.size, pid)

    def ended(self, code: int) -> None:
        """Note that the process has ended; of a signal, `code` is the negative number."""
        _EXIT.pack_into(self._memory, _EXIT_AT, True, code)

    def exit_code(self) -> int | None:
        """Return the exit code of the process; None if it is not known."""
        has_ended, code = _EXIT.unpack_from(self._memory, _EXIT_AT)
        return code if has_ended else None

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by a signal."""
        (pid,) = _PID.unpack_from(self._memory, _TIME.size)
        return bool(pid) and is_stopped(pid)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Load the job, or read a mini-batch, inside the context."""
        _TIME.pack_into(self._memory, 0, time.monotonic())
        try:
            yield
        finally:
            _TIME.pack_into(self._memory, 0, 0.0)

    def seconds(self) -> float:
        """Return the seconds since that began; 0 if the process does neither."""
        (began,) = _TIME.unpack_from(self._memory, 0)
        return time.monotonic() - began if began else 0.0

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()


@dataclass(frozen=True, slots=True)
class ReaderLink:
    """A worker's connections to the processes that may read for it.

    Attributes:
        fresh: to a process that the agent starts at the first message.
        fresh_clock: of that process.
        living: to the process that has read for an earlier worker of the rank; None without one.
        clock: of the process that has read for an earlier worker; None without one.
    """

    fresh: socket.socket
    fresh_clock: ReadingClock
    living: socket.socket | None = None
    clock: ReadingClock | None = None

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self.fresh.close()
        if self.living is not None:
            self.living.close()


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    control: socket.socket
    """Passes the connection of each further worker to the process."""
    clock: ReadingClock


class DataReaders:
    """The processes of an agent that read data, by the rank for which they read.

    Args:
        watcher: kills what the processes have started, if the agent is killed.
        run: runs in a forked process, with its connection to a worker, the socket that passes
            further connections, and its clock; returns the exit status.
    """

    def __init__(
        self,
        watcher: SessionWatcher,
        run: Callable[[socket.socket, socket.socket, ReadingClock], int],
    ) -> None:
        self._watcher, self._run = watcher, run
        self._processes: dict[int, _Process] = {}
        self._requests: dict[int, tuple[socket.socket, ReadingClock]] = {}
        """By rank, the ends of `fresh` connections, and the clocks of processes for them."""
        self._unfit: set[int] = set()
        self._selector = selectors.DefaultSelector()

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`start_requested` has work."""
        return self._selector.fileno()

    def link(self, rank: int) -> ReaderLink | None:
        """Return connections for the next worker of a rank; None if no process can read for it.

        The caller closes them once it has forked the worker.

        Raises:
            OSError: there are no descriptors left.
        """
        if rank in self._unfit:
            return None
        self._forget_request(rank)
        fresh, request = _pair()
        clock = ReadingClock()
        self._requests[rank] = request, clock
        self._selector.register(request, selectors.EVENT_READ, rank)
        process = self._processes.get(rank)
        if process is None:
            return ReaderLink(fresh, clock)
        living, theirs = _pair()
        with theirs, suppress(OSError):  # it has ended, which the worker sees
            socket.send_fds(process.control, [b"\0"], [theirs.fileno()])
        return ReaderLink(fresh, clock, living, process.clock)

    def start_requested(self) -> None:
        """Start the processes that workers have requested, and forget those that none needs."""
        for key, _ in self._selector.select(0):
            connection, clock = self._requests[key.data]
            with suppress(ConnectionError):
                if connection.recv(1, socket.MSG_PEEK):
                    self._start(key.data, connection, clock)
            self._forget_request(key.data)

    def reap(self) -> None:
        """Forget the processes that have ended."""
        for rank, process in list(self._processes.items()):
            ended, status = os.waitpid(process.pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                process.clock.ended(code)
                if code == UNFIT:
                    self._unfit.add(rank)
                self._forget(rank)

    def kill_all(self) -> None:
        """Kill all processes, and what they have started."""
        for rank in list(self._processes):
            self._kill(rank)

    def close(self) -> None:
        """Close this process's ends of the connections; a forked child does so."""
        self._selector.close()
        for connection, _ in self._requests.values():
            connection.close()
        for process in self._processes.values():
            process.control.close()

    def _start(self, rank: int, connection: socket.socket, clock: ReadingClock) -> None:
        if rank in self._processes:  # the worker cannot use it: it lacks a mini-batch, or is stuck
            self._kill(rank)
        control, theirs = _pair()
        try:
            pid = os.fork()
        except OSError:  # the worker sees the end of the connection
            control.close()
            theirs.close()
            return
        if not pid:
            status = 1
            try:
                control.close()
                own = socket.socket(fileno=os.dup(connection.fileno()))
                self.close()
                status = self._run(own, theirs, clock)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        theirs.close()
        clock.started(pid)
        self._watcher.add(pid)
        self._processes[rank] = _Process(pid, control, clock)

    def _kill(self, rank: int) -> None:
        pid = self._processes[rank].pid
        kill_group(pid)
        os.kill(pid, signal.SIGKILL)  # it may not lead its group yet
        wait_for_killed(pid, timings().linger)
        self._forget(rank)

    def _forget(self, rank: int) -> None:
        """Forget a process that was waited for; kill what it has started."""
        process = self._processes.pop(rank)
        kill_group(process.pid)
        self._watcher.remove(process.pid)
        process.control.close()
        process.clock.close()

    def _forget_request(self, rank: int) -> None:
        if request := self._requests.pop(rank, None):
            connection, _ = request  # the process that was started, or is to be, has the clock
            self._selector.unregister(connection)
            connection.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, on which each message arrives whole."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
