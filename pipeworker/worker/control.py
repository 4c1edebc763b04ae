"""A worker's end of the control plane: a thread that owns the socket.

The thread sends heartbeats and what the main thread gives it, hands over what the coordinator says,
and ends the process when the job is over while the main thread is inside a step, where nothing else
could: when the coordinator says Abort, when it is gone, or on a signal.
"""

from __future__ import annotations

import contextlib
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
from zmq.utils.monitor import recv_monitor_message

from pipeworker.environment import timings
from pipeworker.errors import AGAIN, PipeworkerError, ProtocolError
from pipeworker.host import streams
from pipeworker.host.awake import Awake
from pipeworker.host.position import Tracker
from pipeworker.wire import codec, exchange, sockets
from pipeworker.wire.exchange import Exchange
from pipeworker.wire.messages.directions import FromWorker, ToWorker
from pipeworker.wire.messages.failure import Abort, Cause, Failed, Failure, Signalled
from pipeworker.wire.messages.presence import Heartbeat, Ping
from pipeworker.wire.messages.store import StoreOperation, StoreReply, StoreRequest

Leave = Callable[[Abort], None]
_ENDS = (signal.SIGTERM, signal.SIGINT)
_NOTICE = signal.SIGUSR1


def say(abort: Abort) -> None:
    """The last words of a worker."""
    with contextlib.suppress(Exception):  # the disk may be full, or the stream the job's own
        if abort.reason:
            streams.note(f"the job ended: {abort.reason}")
    streams.flush()


def leave_process(abort: Abort) -> None:
    """End the process from any thread."""
    say(abort)
    os._exit(abort.exit_status)


class Control:
    """The control plane as the worker's main thread sees it.

    Args:
        leave: called by the control thread when the job is over before the main thread knows: ends
            the process. Where it returns, the main thread learns it from :meth:`receive`.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        token: str,
        rank: int,
        generation: int,
        tracker: Tracker,
        leave: Leave = leave_process,
    ) -> None:
        self._rank = rank
        self._generation = generation
        self._tracker = tracker
        self._leave = leave
        self._timings = timings()
        self._inbox: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        self._replies: dict[int, queue.SimpleQueue[StoreReply]] = {}
        self._outbox: deque[FromWorker] = deque()
        self._requests = 0
        self._closing = False
        self._signalled: set[int] = set()
        self.name = f"rank {rank}"
        """How the worker is called, once it knows what it holds."""
        self.over: Abort | None = None
        """How the job ended, once it has."""
        self.patience: float | None = None
        """Seconds that the coordinator may be silent, once the job has said how many."""
        self._endpoint = endpoint
        self._exchange = Exchange()
        self._awake = Awake(self._timings.heartbeat)
        self._heard = self._awake.look()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sockets.client(self._context, token, endpoint, self._timings)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self, *, signals: bool = True) -> None:
        """Start the thread; with `signals`, take over SIGTERM, SIGINT and SIGUSR1.

        That is done in the main thread. The coordinator is told of a signal and says what then; a
        second one ends the process.
        """
        self._signals = signals
        if signals:
            for number in (*_ENDS, _NOTICE):
                signal.signal(number, lambda *_: None)
            signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def send(self, message: FromWorker) -> None:
        """Give a message to the thread; returns at once."""
        self._outbox.append(message)
        self._wake()

    def receive(self) -> ToWorker:
        """The next message for the main thread."""
        return self._inbox.get()

    def ask(
        self,
        operation: StoreOperation,
        keys: tuple[str, ...],
        value: bytes,
        expected: bytes,
        seconds: float | None = None,
    ) -> StoreReply:
        """Perform one operation on the coordinator's store.

        Raises:
            TimeoutError: it is not done within so many seconds.
        """
        self._requests += 1
        number = self._requests
        answer = self._replies[number] = queue.SimpleQueue()
        self.send(StoreRequest(self._rank, number, operation, keys, value, expected))
        try:
            return answer.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"nobody has set {', '.join(keys)}") from None
        finally:
            del self._replies[number]

    def close(self) -> None:
        """Send what is left and end the thread."""
        self._closing = True
        self._wake()
        self._thread.join()
        if self._signals:
            signal.set_wakeup_fd(-1)
        self._wake_in.close()
        self._wake_out.close()
        self._context.term()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"\0")
        except BlockingIOError:
            return  # the thread has wake-ups to read already

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:  # without this thread nobody would hear of it: say it and leave
            traceback.print_exc()
            self._end(Abort("a defect in pipeworker: the control thread failed", 1))

    def _end(self, abort: Abort) -> None:
        """The job is over for this worker."""
        self.over = abort
        self._inbox.put(abort)
        self._leave(abort)

    def _serve(self) -> None:
        monitor = self._socket.get_monitor_socket(
            zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.HANDSHAKE_FAILED_AUTH
        )
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        next_beat = time.monotonic() + self._timings.heartbeat
        lost_at: float | None = None
        while not (self._closing and not self._outbox):
            now = time.monotonic()
            seen = self._awake.look()  # it may be stopped before it has read what was said by then
            ready = dict(poller.poll(1 + int(1000 * max(0.0, next_beat - now))))
            if self._wake_out.fileno() in ready:
                self._on_wake()
            while self._outbox:
                message = self._outbox.popleft()
                if self.over is None:  # else nobody listens
                    self._put(message)
            if self._socket in ready:
                self._get_all()
            if monitor in ready:
                event = recv_monitor_message(monitor)["event"]
                if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                    lost_at = None
                    next_beat = 0.0  # which tells what the last connection had under way
                elif lost_at is None:
                    lost_at = self._awake.look()
            if lost_at is not None and seen - lost_at > self._timings.coordinator:
                lost_at = None
                self._end(Abort("the coordinator is gone", AGAIN))
            elif self.over is None and seen - self._heard > self._limit:
                self._end(Abort(self._silence(), AGAIN))
            if now >= next_beat:
                next_beat = now + self._timings.heartbeat
                self._beat()
        self._beat()  # the coordinator waits to hear that the last message has arrived
        self._socket.disable_monitor()
        monitor.close()
        self._socket.close(linger=None if self.over is None else 0)

    def _on_wake(self) -> None:
        """A wake-up is a zero byte; a signal's number, written by the interpreter, is not."""
        for number in self._wake_out.recv(4096):
            if number not in (*_ENDS, _NOTICE):
                continue
            name = signal.Signals(number).name
            if self.patience is not None and number not in self._signalled:
                self._signalled.add(number if number in _ENDS else 0)
                self._put(Signalled(self._rank, name))
            elif number in _ENDS:
                failure = Failure(
                    Cause.SIGNAL,
                    f"the worker of {self.name} was ended by {name}",
                    self._rank,
                    self._tracker.get(),
                )
                self._put(Failed(self._rank, failure))
                linger = int(1000 * self._timings.linger)
                self._context.destroy(linger)  # its monitor too, or it waits for that forever
                self._end(Abort("", 128 + number))
                return

    @property
    def _limit(self) -> float:
        """Seconds that the coordinator may be silent."""
        if self.patience is None:
            return self._timings.reach
        return self._timings.patience(self.patience)

    def _silence(self) -> str:
        """What it means that nothing is heard."""
        lacking = f"has not answered for {self._limit:g} s"
        if self.patience is None:
            here = f"{self.name} on {socket.gethostname()}"
            return f"{here} cannot reach the coordinator: {self._endpoint} {lacking}"
        return f"the coordinator at {self._endpoint} {lacking}"

    def _put(self, message: FromWorker) -> None:
        self._socket.send(self._exchange.send(codec.encode(message, self._generation)))

    def _beat(self, *, again: bool = False) -> None:
        """Say that this worker is alive, while there is somebody to say it to."""
        if self.over is None:
            counts = self._exchange.sent, self._exchange.received
            tracker = self._tracker
            beat = Heartbeat(self._rank, tracker.get(), *counts, again, tracker.waits)
            frame = codec.encode(beat, self._generation)
            self._socket.send(exchange.numbered(exchange.OUTSIDE, frame))

    def _on_ping(self, ping: Ping) -> None:
        self._exchange.heard(ping.received)
        if ping.again:
            for data in self._exchange.again():
                self._socket.send(data)
        if self._exchange.lacks(ping.sent):
            self._beat(again=True)

    def _get_all(self) -> None:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                number, frame = exchange.taken_apart(data)
                generation, message = codec.decode(frame)
            except ProtocolError as error:
                raise PipeworkerError(f"the coordinator sent {error}") from error
            if generation != self._generation:
                continue
            self._heard = self._awake.look()
            if isinstance(message, Ping):
                self._on_ping(message)
            elif not self._exchange.receive(number):
                continue
            elif isinstance(message, StoreReply):
                if waiting := self._replies.get(message.number):
                    waiting.put(message)
            elif isinstance(message, Abort):
                self._end(message)
            elif isinstance(message, ToWorker):
                self._inbox.put(message)
