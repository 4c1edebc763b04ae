"""The process that reads ``data()`` for a worker, and keeps its place when the worker is replaced.

It reads one mini-batch ahead of the worker, and keeps those that a new worker may need again
(:mod:`pipeworker.worker.data.replies`).
"""

from __future__ import annotations

import faulthandler
import os
import selectors
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import assert_never

from pipeworker.facts.failure import Cause
from pipeworker.facts.position import Phase
from pipeworker.facts.position import Position as WorkerPosition
from pipeworker.host import streams
from pipeworker.host.data_readers import UNFIT, ReadingClock
from pipeworker.host.lifetime import name_process
from pipeworker.job import file as job_file
from pipeworker.job.file import JobFile
from pipeworker.job.options import Options
from pipeworker.record.rundir import RunDir
from pipeworker.worker import kernel_cache, stray_children
from pipeworker.worker.blame import failure_of, message_of
from pipeworker.worker.console import detach_terminal, redirect_output
from pipeworker.worker.data import reader_requests as requests
from pipeworker.worker.data.generators import (
    Generators,
    generator_states,
    own_generators,
    restore_states,
)
from pipeworker.worker.data.packing import CannotPass, Packed, receive
from pipeworker.worker.data.reader import MicroBatches, Reader, reader_options
from pipeworker.worker.data.replies import Replies, Reply
from pipeworker.worker.device import numerics
from pipeworker.worker.signals import handle_signals
from pipeworker.worker.stage import rng
from pipeworker.worker.stray_children import end_stray_child


@dataclass(frozen=True, slots=True)
class _Job:
    """The job that is read for, as a worker loads it.

    Attributes:
        own: the user's own generators that the worker has as well.
        patience: seconds (``--worker-timeout``) after which a mini-batch takes long.
    """

    file: JobFile
    reader: Reader
    own: Generators
    patience: float

    @staticmethod
    def load(setup: requests.Setup) -> _Job:
        kernel_cache.keep_private()
        options = Options.from_json(setup.options)
        run_dir = RunDir.open(Path(setup.run_dir))
        streams.discard_output()  # the worker prints what the job file prints while it is loaded
        torch.set_num_threads(options.threads)
        if options.deterministic:
            numerics.before_start()
        rng.seed_all(options.seed)
        file = job_file.load(Path(options.job_file), options.arguments)
        if options.deterministic:  # whatever the job file has set
            numerics.enable_deterministic()
        redirect_output(run_dir.worker_log(setup.rank))
        found = reader_options(file, options, setup.replica, setup.replicas)
        reader = Reader(file.data, lends=(True, True), **found)
        return _Job(file, reader, own_generators(file.data), options.worker_timeout)

    def read(self) -> requests.Item:
        """Read the next mini-batch."""
        batches = self.reader.read()
        before = self.reader.position(prefetched=batches is not None)
        return self._item(batches, before, self.reader.position(prefetched=False))

    def peek(self) -> requests.Item:
        """Read the first mini-batch without consuming it."""
        batches = self.reader.peek()
        start = self.reader.position(prefetched=True)
        return self._item(batches, start, start)

    def _item(
        self, batches: MicroBatches | None, before: requests.Position, after: requests.Position
    ) -> requests.Item:
        if _uses_accelerator():
            raise CannotPass("data() computes on the accelerator")
        return requests.Item(batches, before, after, generator_states(self.own), self.reader.length)


class ReaderProcess:
    """Reads the data, and answers one worker after the other.

    Args:
        connection: to the worker that has requested this process.
        control: passes the connection of each later worker.
        clock: measures how long a mini-batch is read.
    """

    def __init__(
        self, connection: socket.socket, control: socket.socket, clock: ReadingClock
    ) -> None:
        self._connection: socket.socket | None = connection
        self._control, self._clock = control, clock
        self._selector = selectors.DefaultSelector()
        for one in (connection, control):
            self._selector.register(one, selectors.EVENT_READ)
        self._job: _Job
        """Set by the first request."""
        self._first: Packed | None = None
        """The first mini-batch of the job, if it was peeked at."""
        self._begin: requests.DataPlace | None = None
        """The place at which reading began; None before."""
        self._replies = Replies()
        self._oldest: requests.DataPlace = (0, 0)
        """The place before which the worker needs nothing."""
        self._has_read = False
        self._reads_ahead = False
        self._status: int | None = None
        """The exit status, once the process is to end."""

    def serve(self) -> int:
        """Answer workers until the job is over; return the exit status."""
        while self._status is None:
            timeout = 0 if self._reads_ahead else None
            ready = {key.fileobj for key, _ in self._selector.select(timeout)}
            if self._control in ready:
                self._accept()
            elif self._connection in ready:
                self._answer()
            elif self._reads_ahead:
                self._reads_ahead = False
                self._read()
        return self._status

    def leave(self) -> None:
        """Close the connections in a child that the user's code forked.

        A worker that waits for the end of its connection waits for this process alone.
        """
        for one in (self._connection, self._control):
            if one is not None:
                one.close()

    def _accept(self) -> None:
        """Answer another worker from now on."""
        message, files, _, _ = socket.recv_fds(self._control, 1, 1)
        if not message:  # the agent is gone
            self._status = 1
            return
        if not files:  # no descriptor was left for it: the worker sees the end of its connection
            return
        self._disconnect()
        self._connection = socket.socket(fileno=files[0])
        self._selector.register(self._connection, selectors.EVENT_READ)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
        self._reads_ahead = False

    def _answer(self) -> None:
        assert self._connection is not None
        try:
            reply = self._handle(receive(self._connection))
            if reply is not None:
                reply.send(self._connection)
        except (EOFError, OSError):  # the worker is gone
            self._disconnect()

    def _handle(self, request: requests.Request) -> Packed | None:
        """Do what a worker requests; return the reply, if there is one."""
        try:
            match request:
                case requests.Setup():
                    with self._clock.running():
                        self._job = _Job.load(request)
                        end_stray_child()
                    return None
                case requests.End():
                    self._status = 0
                    return None
                case requests.Next():
                    return self._next(request)
                case requests.Length():
                    if request.replica != self._job.reader.replica:
                        return self._lost()
                    return Packed(requests.Began(found=True, length=self._job.reader.length))
                case requests.Peek():
                    return self._peek(request)
                case requests.Begin():
                    return self._begin_at(request)
            return assert_never(request)
        except BaseException as error:  # the worker does the same, and reports what is wrong
            end_stray_child()
            self._status = UNFIT
            return Packed(requests.Unfit(_text(error)))

    def _peek(self, request: requests.Peek) -> Packed:
        if self._first is None:
            if self._begin is not None:
                return self._lost()
            restore_states(self._job.own, request.drawn)
            with self._reading():
                self._first = Packed(self._job.peek())
        return self._first

    def _begin_at(self, request: requests.Begin) -> Packed:
        job = self._job
        place = (0, 0) if request.position is None else requests.place_of(request.position)
        if self._begin is None:
            if self._first is None:
                restore_states(job.own, request.drawn)
            if request.position is not None:
                with self._reading():
                    job.reader.restore(request.position)
            self._begin = place
        elif not self._replies.seek(place) and (self._has_read or place != self._begin):
            return self._lost()
        return Packed(requests.Began(found=True, length=job.reader.length))

    def _lost(self) -> Packed:
        """Return the reply to a worker that needs what is no longer kept; then end."""
        self._status = 0
        return Packed(requests.Began(found=False))

    def _next(self, request: requests.Next) -> Packed:
        self._oldest = request.oldest
        if not self._replies.waiting:
            self._read()
        reply = self._replies.next()
        self._status = reply.status
        self._reads_ahead = request.more and not self._replies.waiting
        return reply.packed

    def _read(self) -> None:
        """Read the next mini-batch, and keep it."""
        self._replies.drop_before(self._oldest)  # here: no worker waits while memory is freed
        with self._reading():
            self._replies.add(self._read_one())
        self._has_read = True

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Read a mini-batch inside the context; the worker's log gets the stack if that hangs."""
        faulthandler.dump_traceback_later(self._job.patience, file=2)
        try:
            with self._clock.running():
                try:
                    yield
                finally:
                    end_stray_child()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _read_one(self) -> Reply:
        try:
            item = self._job.read()
            packed = self._pack(item)
        except CannotPass as error:
            return Reply(Packed(requests.Unfit(str(error))), status=UNFIT)
        except BaseException as error:
            if not self._has_read:  # it may need what model() does; else the worker reports it
                return Reply(Packed(requests.Unfit(_text(error))), status=UNFIT)
            transient = self._job.file.transient
            failure = failure_of(error, 0, WorkerPosition(Phase.READING, 0), transient=transient)
            retries = failure.cause in (Cause.TRANSIENT, Cause.LOST)
            return Reply(Packed(requests.ReadingFailed(failure)), status=0 if retries else None)
        places = requests.place_of(item.before), requests.place_of(item.after)
        return Reply(packed, *places, is_last=item.batches is None)

    def _pack(self, item: requests.Item) -> Packed:
        try:
            return Packed(item)
        except OSError:  # no memory or descriptor is left
            self._replies.drop_sent()
        try:
            return Packed(item)
        except OSError as error:
            raise CannotPass(str(error)) from None


def run(connection: socket.socket, control: socket.socket, clock: ReadingClock) -> int:
    """Read data in a forked process of an agent; return its exit status."""
    handle_signals()
    name_process("reader")
    detach_terminal()
    try:
        process = ReaderProcess(connection, control, clock)
        stray_children.watch()
        os.register_at_fork(after_in_child=process.leave)
        return process.serve()
    finally:
        streams.flush()


def _uses_accelerator() -> bool:
    current = torch.accelerator.current_accelerator()
    if current is None:
        return False
    initialized = getattr(torch.get_device_module(current.type), "is_initialized", None)
    return initialized is not None and bool(initialized())


def _text(error: BaseException) -> str:
    return message_of(error) or type(error).__name__
