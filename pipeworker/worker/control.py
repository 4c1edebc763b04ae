"""A worker's end of the control plane: a thread that owns the socket.

The thread sends heartbeats and the main thread's messages, and passes on the coordinator's. It ends
the process if the job ends while the main thread is inside a step, because nothing else can: on an
Abort of the coordinator, when the coordinator is lost, or on a signal.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

import zmq

from pipeworker.environment import timings
from pipeworker.errors import AGAIN, PipeworkerError, ProtocolError
from pipeworker.facts.failure import Cause, Failure
from pipeworker.host import streams
from pipeworker.host.suspend_clock import SuspendAwareClock
from pipeworker.trace.clocks import BestSamples, measure
from pipeworker.wire import codec, reliable_stream
from pipeworker.wire.connection import Connection
from pipeworker.wire.messages.directions import Advance, Finish, FromWorker, ToWorker
from pipeworker.wire.messages.presence import Abort, Failed, Heartbeat, Ping, Signalled
from pipeworker.wire.messages.step import EndPass
from pipeworker.wire.messages.store import StoreOperation, StoreReply, StoreRequest
from pipeworker.wire.reliable_stream import ReliableStream
from pipeworker.worker import stray_children
from pipeworker.worker.settings import Settings
from pipeworker.worker.signals import handle_signals
from pipeworker.worker.standstill import Standstill

Exit = Callable[[Abort], None]
_INTERRUPTS = (signal.SIGTERM, signal.SIGINT)
_HANDLED = (*_INTERRUPTS, signal.SIGUSR1)  # SIGUSR1 requests a checkpoint


def log_end(abort: Abort) -> None:
    """Write the reason of the end to the worker's log; before it has one, the launcher shows it."""
    with contextlib.suppress(Exception):  # the disk may be full, or the job has replaced the stream
        if abort.reason and not streams.log_pending:
            streams.note(f"the job ended: {abort.reason}")
    streams.flush()


def exit_process(abort: Abort) -> None:
    """End the process from any thread."""
    log_end(abort)
    os._exit(abort.exit_status)


class Control:
    """The control plane as the worker's main thread sees it.

    The control thread calls `exit_process` when the job ends. If that returns, the main thread
    receives the Abort from :meth:`receive`.

    Attributes:
        name: the worker's name in messages, ``rank 1`` until its stages are known.
        ended: the reason of the job's end, once it has ended.
        ended_pass: the step whose evaluation pass the coordinator has asked to end, -1 for none.
        silence_timeout: seconds that the coordinator may be silent, once the job's options are
            known.
        memory: returns the bytes that the worker uses; called in the control thread.
        clock: measurements of how far this host's clock is from the coordinator's.
    """

    def __init__(self, settings: Settings, exit_process: Exit) -> None:
        self._rank, self._generation = settings.rank, settings.generation
        self._tracker, self._endpoint = settings.tracker, settings.endpoint
        self._exit_process = exit_process
        self._timings = timings()
        self._inbox: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        self._kept: deque[ToWorker] = deque()  # the last message received, and those behind it
        self._replies: dict[int, queue.SimpleQueue[StoreReply]] = {}
        self._outbox: deque[bytes] = deque()  # frames
        self._request_numbers = itertools.count(1)
        self._closing = False
        self._signalled: set[int] = set()
        self.name = f"rank {settings.rank}"
        self.ended: Abort | None = None
        self.ended_pass = -1
        self.silence_timeout: float | None = None
        self.memory: Callable[[], int] = lambda: 0
        self.held: Callable[[], int] = lambda: 0
        self.clock = BestSamples()
        self._memory = self._held = 0  # as of the last regular heartbeat: others are sent often
        self._stream = ReliableStream()
        self._acknowledged = 0  # messages of the coordinator
        self._finished = False  # whether the coordinator expects nothing more of this worker
        self._clock = SuspendAwareClock(self._timings.heartbeat)
        self._received_at = self._clock.now()
        self._standstill = Standstill(settings.tracker, self._received_at)
        self._stack = ""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connection = Connection(
            self._context, settings.token, settings.endpoint, self._timings
        )
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self, *, signals: bool = True) -> None:
        """Start the thread; unless `signals` is False, handle SIGTERM, SIGINT and SIGUSR1.

        Only the main thread may do that. The first signal is reported to the coordinator, which
        decides; a second one ends the process.
        """
        self._signals = signals
        stray_children.watch()
        if signals:
            handle_signals(_HANDLED, self._wake_in.fileno())
        self._thread.start()

    def suspended(self) -> float:
        """Return for how many seconds this process has been suspended so far, about."""
        return self._clock.suspended

    def send(self, message: FromWorker) -> None:
        """Send a message without waiting."""
        self._outbox.append(codec.encode(message, self._generation))
        self._wake()

    def receive(self) -> ToWorker:
        """Wait for the next message to the main thread, and return it."""
        message = self._inbox.get()
        while self._kept[0] is not message:
            self._kept.popleft()
        return message

    def receive_after(self, begun: ToWorker | None) -> ToWorker:
        """Wait for the message after `begun`, the last one that the caller has begun to handle.

        :meth:`receive` may have taken it already: an interrupt may come after a message left the
        queue and before the caller has it.
        """
        while True:
            kept = tuple(self._kept)
            place = next((n for n, message in enumerate(kept) if message is begun), -1)
            if following := kept[place + 1 :]:
                return following[0]
            self._inbox.get()

    def _deliver(self, message: ToWorker) -> None:
        self._kept.append(message)
        self._inbox.put(message)

    def request(
        self,
        operation: StoreOperation,
        keys: tuple[str, ...],
        value: bytes = b"",
        timeout: float | None = None,
    ) -> StoreReply:
        """Perform one operation on the coordinator's store; `timeout` is in seconds.

        Raises:
            TimeoutError: there is no reply within the timeout.
        """
        number = next(self._request_numbers)
        reply = self._replies[number] = queue.SimpleQueue()
        self.send(StoreRequest(self._rank, number, operation, keys, value))
        try:
            return reply.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no rank has set {', '.join(keys)}") from None
        finally:
            del self._replies[number]

    def close(self) -> None:
        """Send the remaining messages and end the thread."""
        self._closing = True
        self._wake()
        self._thread.join()
        if self._signals:
            signal.set_wakeup_fd(-1)
        self._wake_in.close()
        self._wake_out.close()
        self._context.term()

    def _wake(self) -> None:
        # The thread has wake-ups to read already, or the system has no memory for one: then the
        # thread wakes at its next heartbeat.
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:  # nothing else can report it without this thread
            traceback.print_exc()
            self._end(Abort("a defect in pipeworker: the control thread failed", 1))

    def _end(self, abort: Abort) -> None:
        """Note that the job has ended for this worker; the first reason counts."""
        if self.ended is None:
            self.ended = abort
            self._deliver(abort)
            self._exit_process(abort)

    def _serve(self) -> None:
        connection = self._connection
        connection.poller.register(self._wake_out, zmq.POLLIN)
        next_heartbeat = time.monotonic() + self._timings.heartbeat
        lost_at: float | None = None
        opened_at = self._received_at
        while not (self._closing and not self._outbox):
            now = time.monotonic()
            seen = self._clock.now()  # before reading: it may be suspended with messages unread
            ready = dict(connection.poller.poll(1 + int(1000 * max(0.0, next_heartbeat - now))))
            if self._wake_out.fileno() in ready:
                self._on_wake_up()
            while self._outbox:
                frame = self._outbox.popleft()
                if self.ended is None:  # else no coordinator listens
                    self._send_frame(frame)
            if connection.socket in ready:
                self._receive_all()
            opened = connection.read_event(ready)
            if opened:
                lost_at, opened_at = None, self._clock.now()
                # Request what the last connection lost, if there was one, and a ping.
                self._send_heartbeat(resend=self._stream.received > 0)
            elif opened is False and lost_at is None:
                lost_at = self._clock.now()
            if lost_at is not None and seen - lost_at > self._timings.coordinator:
                lost_at = None
                self._end(Abort("the coordinator is gone", AGAIN))
            elif not self.ended and (why := self._silence_reason(seen - self._received_at)):
                self._end(Abort(why, AGAIN))
            elif self.silence_timeout and (  # no pings come before it is known
                seen - max(self._received_at, opened_at) > self._timings.redial
            ):
                connection.open_second()
            if now >= next_heartbeat:
                next_heartbeat = now + self._timings.heartbeat
                self._memory, self._held = self.memory(), self.held()
                if self.silence_timeout is not None:
                    self._stack = self._standstill.stack(seen, self.silence_timeout)
                if lost_at is None:
                    self._send_heartbeat()
        # The coordinator waits for the acknowledgement of its last message, if for anything.
        if self._acknowledged < self._stream.received:
            self._send_heartbeat()
        gone = lost_at is not None or connection.has_event
        connection.close(deliver=not (self.ended or (gone and self._finished)))

    def _on_wake_up(self) -> None:
        """Read wake-ups: zero bytes, and numbers of signals, which the interpreter writes."""
        for number in self._wake_out.recv(4096):
            if number not in _HANDLED:
                continue
            name = signal.Signals(number).name
            if self.silence_timeout is not None and number not in self._signalled:
                self._signalled.add(number if number in _INTERRUPTS else 0)
                self._send(Signalled(self._rank, name))
            elif number in _INTERRUPTS:
                message = f"the worker of {self.name} was ended by {name}"
                failure = Failure(Cause.SIGNAL, message, self._rank, self._tracker.get())
                self._send(Failed(self._rank, failure))
                linger = int(1000 * self._timings.linger)
                self._context.destroy(linger)  # its monitor too, or it waits for that forever
                self._end(Abort("", 128 + number))
                return

    def _silence_reason(self, seconds: float) -> str:
        """Return the reason to end after some seconds of the coordinator's silence, or ""."""
        timeout, reach = self.silence_timeout, self._timings.reach
        limit = reach if timeout is None else self._timings.patience(timeout)
        if seconds <= limit:
            return ""
        where = f"the coordinator at {self._endpoint}"
        if timeout is None:
            here = f"{self.name} on {socket.gethostname()}"
            where = f"{here} cannot reach the coordinator: {self._endpoint}"
        return f"{where} has not answered for {limit:g} s"

    def _send(self, message: FromWorker) -> None:
        self._send_frame(codec.encode(message, self._generation))

    def _send_frame(self, frame: bytes) -> None:
        self._connection.socket.send(self._stream.sequence(frame))

    def _send_heartbeat(self, *, resend: bool = False) -> None:
        """Send a heartbeat, unless the job has ended.

        Before its first message, Hello, the coordinator does not know whose heartbeat it is.
        """
        if self.ended is None and self._stream.sent:
            counts = self._stream.sent, self._stream.received
            tracker = self._tracker
            heartbeat = Heartbeat(
                self._rank,
                tracker.get(),
                *counts,
                resend,
                tracker.waiting,
                self._memory,
                self._held,
                *tracker.counts,
                time=time.perf_counter(),
                stack=self._stack,
            )
            frame = codec.encode(heartbeat, self._generation)
            self._connection.socket.send(reliable_stream.pack(reliable_stream.UNNUMBERED, frame))
            self._acknowledged = self._stream.received

    def _on_ping(self, ping: Ping) -> None:
        sample = measure(ping.beat, ping.held, ping.time, time.perf_counter())
        if sample is not None:
            self.clock.add(sample)
        self._stream.acknowledge(ping.received)
        if ping.resend:
            for data in self._stream.unacknowledged():
                self._connection.socket.send(data)
        if self._stream.is_missing(ping.sent):
            self._send_heartbeat(resend=True)
        if ping.quiet:
            self._connection.open_second()

    def _receive_all(self) -> None:
        while True:
            try:
                data = self._connection.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                number, frame = reliable_stream.unpack(data)
                generation, message = codec.decode(frame)
            except ProtocolError as error:
                raise PipeworkerError(
                    f"the coordinator sent an invalid message: {error}"
                ) from error
            if generation != self._generation:
                continue
            self._received_at = self._clock.now()
            if isinstance(message, Ping):
                self._on_ping(message)
            elif not self._stream.accept(number):
                continue
            elif isinstance(message, StoreReply):
                if waiting := self._replies.get(message.number):
                    waiting.put(message)
            elif isinstance(message, Abort):
                self._end(message)
            elif isinstance(message, EndPass):
                self.ended_pass = message.step
            elif isinstance(message, ToWorker):
                if isinstance(message, Advance):
                    self._finished = isinstance(message.next, Finish)
                self._deliver(message)
