"""A worker's end of the process that reads its data."""

from __future__ import annotations

import inspect
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from pipeworker.errors import PipeworkerError
from pipeworker.facts.failure import Cause, Failure, describe_exit
from pipeworker.host import streams
from pipeworker.host.data_readers import ReaderLink, ReadingClock
from pipeworker.host.suspend_clock import SuspendAwareClock
from pipeworker.job.signatures import with_start
from pipeworker.worker.data import reader_requests as requests
from pipeworker.worker.data.epoch import validate_position
from pipeworker.worker.data.generators import (
    equal_states,
    generator_states,
    own_generators,
    restore_states,
)
from pipeworker.worker.data.packing import CannotPass, receive, send
from pipeworker.worker.data.reader import MicroBatches, Reader

_COPIES = 3
"""A recovery begins at one of the last copies of the state, of which two may be incomplete."""
_POLL_SECONDS = 1.0
_END_SECONDS = 1.0
T = TypeVar("T")
_START: requests.Position = {"epoch": 0, "read": 0}


class ReadFailed(PipeworkerError):
    """The process that reads data has failed.

    Attributes:
        failure: the message for the user, without a position.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _CannotRead(Exception):
    """The worker must read the data itself, for this reason."""


class RemoteReader(Reader):
    """A reader whose data is read by a process that outlives this one, if it cannot be skipped.

    Other data is read in this process, and so is data that the process cannot read or pass on.

    Args:
        link: connections to the processes.
        setup: the job, for a new process.
        stall_seconds: seconds after which a mini-batch is not waited for.
        answer_seconds: seconds in which a process that reads none, or is stopped, answers.
        options: those of :class:`Reader`.
    """

    def __init__(
        self,
        data: Any,
        link: ReaderLink,
        setup: requests.Setup,
        stall_seconds: float,
        answer_seconds: float,
        **options: Any,
    ) -> None:
        super().__init__(data, **options)
        self._link, self._setup = link, setup
        self._stall_seconds, self._answer_seconds = stall_seconds, answer_seconds
        self._own = own_generators(data)
        self._drawn: Mapping[str, Any] = {}
        """The last known states of these generators in the process that reads."""
        self._connection: socket.socket | None = None
        """To the process that reads; None if this one does, or before it is known."""
        self._is_remote: bool | None = None
        """Whether a process reads; None before it is known."""
        self._has_begun = self._has_read = False
        self._before = self._after = _START
        self._remote_length = 0
        self._copies: deque[requests.DataPlace] = deque(maxlen=_COPIES)
        self._left: int | None = None
        if link.living is None and is_generator(data):
            self._start_process()  # it loads the job while this worker builds the model

    def measure(self) -> int:
        return self._either(lambda: self._remote_length, super().measure)

    def peek(self) -> MicroBatches:
        return self._either(self._peek_there, super().peek)

    def read(self) -> MicroBatches | None:
        return self._either(self._read_there, super().read)

    def position(self, *, prefetched: bool) -> dict[str, Any]:
        if self._is_remote:
            return dict(self._before if prefetched else self._after)
        return super().position(prefetched=prefetched)

    def restore(self, position: Mapping[str, Any]) -> None:
        position = validate_position(position)
        if "random" in position:  # the data can be skipped
            self._read_here("", None)
        self._either(partial(self._begin_there, position), partial(super().restore, position))

    @property
    def length(self) -> int:
        return self._remote_length if self._is_remote else super().length

    def expect(self, count: int | None) -> None:
        self._left = count

    def note_copy(self, position: Mapping[str, Any]) -> None:
        self._copies.append(requests.place_of(position))

    def close(self) -> None:
        """End the process, if there is one: the job is over."""
        end_reading(self._link, self._connection, _END_SECONDS)

    def _either(self, there: Callable[[], T], here: Callable[[], T]) -> T:
        """Return the result of the process that reads the data, or else of this one."""
        try:
            if self._decide():
                return there()
        except _CannotRead as error:
            self._read_here(f"{error}", self._after if self._has_begun else None)
        return here()

    def _decide(self) -> bool:
        """Return whether a process reads the data."""
        if self._is_remote is not None:
            return self._is_remote
        if self._link.living is not None:
            self._connection, self._is_remote = self._link.living, True
            with suppress(_CannotRead):
                began = self._ask(requests.Length(self._setup.replica), requests.Began)
                if began.found:
                    self._remote_length = began.length
                    return True
            self._connection = self._is_remote = None
        if is_generator(self.data):
            self._start_anew()
        else:
            length = super().measure()
            assert self._epoch is not None
            if self._epoch.is_read_again and self._epoch.generator_names <= self._own.keys():
                self._epoch, self._remote_length = None, length
                self._start_anew()
            else:
                self._read_here("", None)
        return bool(self._is_remote)

    def _start_process(self) -> None:
        """Have the agent start a process, which loads the job."""
        with suppress(OSError):  # the agent has ended
            send(self._link.fresh, self._setup)
            self._connection, self._is_remote = self._link.fresh, True

    def _start_anew(self) -> None:
        """Have the agent start a process in place of the living one, if there is one.

        Raises:
            _CannotRead: it cannot be started.
        """
        self._connection, self._drawn = None, {}
        self._start_process()
        if self._connection is None:
            raise _CannotRead("the process for it cannot be started")

    def _begin_there(self, position: requests.Position | None) -> None:
        """Have the process read from a position on.

        Raises:
            _CannotRead: it cannot.
        """
        begin = requests.Begin(position, generator_states(self._own))
        found = False
        if self._connection is self._link.living:
            with suppress(_CannotRead):
                found = self._ask(begin, requests.Began).found
            if not found:
                self._start_anew()
        if not found:
            self._remote_length = self._ask(begin, requests.Began).length
        self._drawn = self._drawn or begin.drawn
        self._before = self._after = position or _START
        self._copies.append(requests.place_of(self._after))
        self._has_begun = True

    def _peek_there(self) -> MicroBatches:
        peek = requests.Peek(generator_states(self._own))
        reply = self._ask(peek, (requests.Began, requests.Item))
        if isinstance(reply, requests.Began):  # the living process does not have it
            self._start_anew()
            reply = self._ask(peek, requests.Item)
        self._drawn = peek.drawn
        batches = self._take_over(reply)
        assert batches is not None  # empty data has raised
        return batches

    def _read_there(self) -> MicroBatches | None:
        if not self._has_begun:
            self._begin_there(None)
        more = self._left is None or self._left > 1
        item = self._ask(requests.Next(self._copies[0], more), requests.Item)
        self._left = None if self._left is None else self._left - 1
        self._has_read = True
        self._before, self._after = item.before, item.after
        return self._take_over(item)

    def _take_over(self, item: requests.Item) -> MicroBatches | None:
        """Return the mini-batch; generators that reading has drawn from have their states there.

        The others may be drawn from in this process, as by a layer or ``before_update``.
        """
        known, self._drawn = self._drawn, item.drawn
        changed = {n: s for n, s in item.drawn.items() if not equal_states(s, known.get(n))}
        restore_states(self._own, changed)
        self._remote_length = item.length
        return item.batches

    def _read_here(self, reason: str, position: requests.Position | None) -> None:
        """Read in this process from now on: from a position, or from the beginning."""
        self._is_remote, self._connection = False, None
        self._link.close()
        if reason:
            streams.note(f"{self._name}() is read in the worker: {reason}")
        if position is not None:
            super().restore(position)

    def _ask(self, request: requests.Request, kind: Any) -> Any:
        """Send a request; return the reply, of this kind.

        Raises:
            _CannotRead: this process must read the data.
        """
        connection = self._connection
        assert connection is not None
        try:
            with suppress(ConnectionError):  # it has ended, and perhaps sent the reason before
                send(connection, request)
            self._wait(connection)
            reply: requests.Reply = receive(connection)
        except CannotPass as error:
            raise _CannotRead(str(error)) from None
        except (EOFError, OSError) as error:
            # The system may lack memory or descriptors for a request or a reply.
            reason = getattr(error, "strerror", None)
            refused = f"cannot be asked: {reason}" if reason else ""
            if not self._has_read:
                raise _CannotRead(f"the process for it {refused or 'has ended'}") from None
            # The agent may be gone, whose child it is: then the launcher reports that.
            cause, what = Cause.PEER, "is gone"
            if isinstance(error, TimeoutError):
                cause, what = Cause.LOST, f"has not answered for {self._answer_seconds:g} s"
            elif refused:
                cause, what = Cause.LOST, refused
            elif (code := self._exit_code()) is not None:
                cause, what = Cause.LOST, describe_exit(code)
            raise ReadFailed(Failure(cause, f"the process that reads data() {what}")) from None
        if isinstance(reply, requests.Unfit):
            raise _CannotRead(reply.reason)
        if isinstance(reply, requests.ReadingFailed):
            raise ReadFailed(reply.failure)
        assert isinstance(reply, kind), f"{type(reply).__name__} is no reply to {request}"
        return reply

    def _exit_code(self) -> int | None:
        """Return the exit code of a process that has ended; None if the agent has not noted it."""
        for _ in range(100):  # it notes that as soon as the system reports it
            if (code := self._clock.exit_code()) is not None:
                return code
            time.sleep(0.01)
        return None

    @property
    def _clock(self) -> ReadingClock:
        """The clock of the process that reads."""
        is_living = self._connection is self._link.living
        clock = self._link.clock if is_living else self._link.fresh_clock
        assert clock is not None
        return clock

    def _wait(self, connection: socket.socket) -> None:
        """Wait for a reply, unless the process is stopped.

        A process that has read for an earlier worker may still load the job or read, or be stuck.

        Raises:
            TimeoutError: it is stopped or stuck.
        """
        clock = self._clock
        may_be_stuck = connection is self._link.living and not self._has_begun
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        own = SuspendAwareClock(2 * _POLL_SECONDS)
        since = own.now()
        while not poll.poll(1000 * _POLL_SECONDS):
            now, reading = own.now(), clock.seconds()
            if not clock.is_stopped() and (reading or not may_be_stuck):
                since = now
            is_stuck = may_be_stuck and reading > self._stall_seconds
            if is_stuck or now - since > self._answer_seconds:
                raise TimeoutError


def is_generator(data: Any) -> bool:
    """Return whether data is a generator function, which reads nothing when it is called."""
    return inspect.isgeneratorfunction(data) and with_start(data) is None


def end_reading(
    link: ReaderLink, connection: socket.socket | None = None, seconds: float = 0.0
) -> None:
    """End the process that reads, by default for an earlier worker of the rank; close the link.

    Wait so many seconds for its end.
    """
    connection = connection or link.living
    if connection is not None:
        with suppress(OSError):
            send(connection, requests.End())
            connection.settimeout(seconds)
            connection.recv(1)  # nothing, when the process ends
    link.close()
