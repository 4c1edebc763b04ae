"""The control connections to the workers, on which no message is lost when one is reopened."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator

import zmq

from pipeworker.coordinator.effects import Send
from pipeworker.coordinator.events import (
    Disconnected,
    Event,
    InvalidFrame,
    MessageReceived,
    VersionMismatch,
)
from pipeworker.errors import ProtocolError
from pipeworker.wire import codec, sockets
from pipeworker.wire.messages.directions import FromWorker, ToWorker
from pipeworker.wire.messages.presence import Heartbeat, Ping
from pipeworker.wire.reliable_stream import UNNUMBERED, ReliableStream, pack, unpack

_LOGGED_FIRST = 20
"""Events of a kind that a peer can cause without end: so many are logged, then each 1000th."""
_LOGGED_CHARACTERS = 200

log = logging.getLogger("pipeworker.coordinator")


class WorkerConnections:
    """The coordinator's end of the control plane.

    `handle` is called with events that sending a message causes, and `generation` returns the
    number of the current generation. Pings report to a worker that its heartbeats have not arrived
    for `redial` seconds, so that it opens another connection: in time for the next moment at which
    a line that is interrupted again and again works.

    Attributes:
        received: messages received so far, without heartbeats.
        sent: messages sent so far, without pings.
        all_read: whether the last call of :meth:`events` read everything that had arrived.
    """

    def __init__(
        self,
        socket: sockets.Router,
        handle: Callable[[Event], None],
        generation: Callable[[], int],
        redial: float,
    ) -> None:
        self._socket, self._handle, self._generation = socket, handle, generation
        self._redial = redial
        self.received = self.sent = 0
        self.all_read = True
        self._logged: Counter[int] = Counter()  # by level
        self._encoded: tuple[ToWorker, bytes] | None = None
        # By peer; of workers that have joined, streams are kept.
        self._streams: defaultdict[bytes, ReliableStream] = defaultdict(ReliableStream)
        # By peer: when its last heartbeat arrived, and the time that it had.
        self._beats: dict[bytes, tuple[float, float]] = {}
        self._quiet: set[bytes] = set()  # members whose heartbeats do not arrive

    def events(self, until: float) -> Iterator[Event]:
        """Yield the events of frames that have arrived, for at most until the time `until`."""
        self.all_read = False
        while time.monotonic() < until:
            try:
                peer, data = sockets.receive(self._socket)
            except zmq.Again:
                self.all_read = True
                return
            try:
                number, frame = unpack(data)
                generation, message = codec.decode(frame)
                if not isinstance(message, FromWorker):
                    raise ProtocolError(f"{type(message).__name__}, which no worker sends")
            except codec.OtherVersion as error:
                yield VersionMismatch(str(error))
                continue
            except ProtocolError as error:
                yield InvalidFrame(peer, f"a malformed frame: {error}")
                continue
            if isinstance(message, Heartbeat):
                self._beats[peer] = time.perf_counter(), message.time
                if generation == self._generation():
                    self._on_heartbeat(peer, message)
            elif self._streams[peer].accept(number):
                self.received += 1
            else:
                self.log_dropped(f"{type(message).__name__} out of turn")
                continue
            yield MessageReceived(peer, generation, message)

    def send(self, send: Send) -> None:
        """Send a message, numbered if its peer has joined."""
        peer, message = send.peer, send.message
        if self._encoded is None or self._encoded[0] is not message:  # often equal for all peers
            self._encoded = message, codec.encode(message, send.generation)
        self.sent += 1
        stream, frame = self._streams.get(peer), self._encoded[1]
        data = stream.sequence(frame) if stream else pack(UNNUMBERED, frame)
        self._put(peer, data, type(message).__name__)
        if stream and stream.is_overfull:
            del self._streams[peer]
            text = "it sends requests and never acknowledges the answers"
            self._handle(InvalidFrame(peer, text))

    def ping(self, members: Collection[bytes]) -> None:
        """Ping all members, and forget the messages of other peers."""
        for peer in [peer for peer in self._streams if peer not in members]:
            del self._streams[peer]
            self._beats.pop(peer, None)
        for peer in members:
            self._ping(peer)

    def ping_quiet(self, members: Collection[bytes]) -> None:
        """Ping the members whose heartbeats have not arrived for `redial` seconds, once each."""
        now = time.perf_counter()
        quiet = {peer for peer in members if self._is_quiet(peer, now)}
        for peer in quiet - self._quiet:
            self._ping(peer)
        self._quiet = quiet

    @property
    def has_unacknowledged(self) -> bool:
        """Whether a peer that acknowledges messages has not received all of them."""
        return any(stream.is_pending for stream in self._streams.values())

    def wait(self, seconds: float) -> bool:
        """Wait until a frame arrives; return whether one has."""
        return bool(self._socket.poll(int(1000 * seconds)))

    def log_dropped(self, text: str) -> None:
        """Log a message that is ignored, unless there are too many."""
        self._log(logging.WARNING, f"dropped {text[:_LOGGED_CHARACTERS]}")

    def _on_heartbeat(self, peer: bytes, beat: Heartbeat) -> None:
        """Resend messages that a closed connection has lost, and request the peer's lost ones.

        A peer that requests messages may have opened a connection between two outages of its line:
        a ping answers at once.
        """
        stream = self._streams[peer]
        stream.acknowledge(beat.received)
        if beat.resend:
            missing = stream.unacknowledged()
            if missing:
                text = f"{len(missing)} messages to rank {beat.rank} are sent again"
                self._log(logging.INFO, text)
            for data in missing:
                self._put(peer, data, "a message that is sent again")
        if is_missing := stream.is_missing(beat.sent):
            self._log(logging.INFO, f"messages of rank {beat.rank} are lost and requested again")
        if beat.resend or is_missing:
            self._ping(peer, resend=is_missing)

    def _ping(self, peer: bytes, *, resend: bool = False) -> None:
        stream = self._streams[peer]
        now = time.perf_counter()
        arrived, beat = self._beats.get(peer, (now, 0.0))
        quiet = self._is_quiet(peer, now)
        ping = Ping(stream.sent, stream.received, resend, quiet, beat, now - arrived, now)
        frame = codec.encode(ping, self._generation())
        self._put(peer, pack(UNNUMBERED, frame), "Ping")

    def _is_quiet(self, peer: bytes, now: float) -> bool:
        arrived, _ = self._beats.get(peer, (now, 0.0))
        return now - arrived > self._redial

    def _put(self, peer: bytes, data: bytes, name: str) -> None:
        try:
            sockets.send(self._socket, peer, data)
        except zmq.ZMQError as error:
            # The peer is gone or does not read; the job acts on its silence.
            self.log_dropped(f"{name} to a peer: {error}")
            if error.errno == zmq.EHOSTUNREACH:
                self._handle(Disconnected(peer))

    def _log(self, level: int, text: str) -> None:
        """Log an event that a peer can cause without end: the first ones of its level, and some."""
        self._logged[level] += 1
        count = self._logged[level]
        if count <= _LOGGED_FIRST or count % 1000 == 0:
            log.log(level, "%s (%d so far)", text, count)
