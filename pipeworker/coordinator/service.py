"""The loop around the coordinator's state machine: sockets and clock, and nothing decided.

Run as a process of its own (:func:`main`). It imports neither torch nor the user's code.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import time
from contextlib import closing
from pathlib import Path

import zmq

from pipeworker.coordinator import report
from pipeworker.coordinator.effects import (
    Commit,
    Discard,
    Dropped,
    Effect,
    Ended,
    Log,
    Planned,
    Send,
    Status,
    Warn,
)
from pipeworker.coordinator.events import (
    Arrived,
    Broken,
    Committed,
    Event,
    Foreign,
    Garbled,
    StarterGone,
    Ticked,
    Uncommitted,
    Unreachable,
    Unwell,
)
from pipeworker.coordinator.job import Job
from pipeworker.coordinator.shell.begin import start
from pipeworker.coordinator.shell.files import Files, LogFile
from pipeworker.coordinator.shell.starter import Starter
from pipeworker.environment import timings
from pipeworker.errors import PipeworkerError, ProtocolError, RecordError
from pipeworker.host.awake import Awake
from pipeworker.job.options import Options
from pipeworker.record.lock import Lock
from pipeworker.record.rundir import RunDir
from pipeworker.wire import codec, exchange, lines, sockets
from pipeworker.wire.exchange import Exchange
from pipeworker.wire.lines import (
    Again,
    Beat,
    Bound,
    CannotStart,
    Configuration,
    HostLost,
    Interrupt,
    Joined,
    SaveAsked,
    Snapshot,
    Verdict,
    Warned,
    WorkerExited,
)
from pipeworker.wire.messages.directions import FromWorker, ToWorker
from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.presence import Heartbeat, Ping
from pipeworker.wire.messages.step import StepResult
from pipeworker.wire.strangers import Descriptors

_SHOWN_DROPS = 20
_SHOWN_CHARACTERS = 200

log = logging.getLogger("pipeworker.coordinator")


class Service:
    """One job, from the first Hello to the verdict."""

    def __init__(
        self,
        configuration: Configuration,
        socket: zmq.Socket[bytes],
        descriptors: Descriptors,
        starter: Starter,
    ) -> None:
        self._configuration = configuration
        self._options = Options.from_json(configuration.options)
        self._timings = timings()
        self._socket = socket
        self._run_dir = RunDir(Path(configuration.run_dir))
        self._started = time.monotonic()
        self._job = Job(
            self._options,
            configuration.run_dir,
            self._started,
            timings=self._timings,
            generation=configuration.generation,
            replaceable=configuration.slots > 1,
            launched=configuration.starter < 0,
            start=start(configuration, self._options, self._run_dir),
            cores=os.cpu_count() or 1,
        )
        self._starter = starter
        self._files = Files(self._run_dir, self._options, descriptors, starter, self._broken)
        self._dropped = 0
        self._repaired = 0
        self._received = 0
        self._sent = 0
        self._encoded: tuple[ToWorker, bytes] | None = None
        self._exchanges: dict[bytes, Exchange] = {}  # with those that have joined
        self._interrupted = False
        self._ended: Ended | None = None

    def run(self, endpoint: str) -> int:
        """Direct the job to its end; returns the exit status."""
        starter = self._starter
        starter.tell(Bound(endpoint))
        self._files.begin()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # to the whole job: others act on it
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(starter.reads, zmq.POLLIN)
        next_tick = next_ping = time.monotonic()
        awake, stopped = Awake(self._timings.tick + self._timings.burst), 0.0
        while self._ended is None:
            poller.register(starter.writes, zmq.POLLOUT if starter.pending else 0)
            ready = dict(poller.poll(int(1000 * self._timings.tick)))
            heard_all = self._socket not in ready or self._receive()
            if starter.writes in ready:
                starter.flush()
            now, seen = time.monotonic(), awake.look()
            if starter.reads in ready:
                self._hear_starter(seen)
            elif (silent := starter.silence(seen)) is not None:
                self._handle(Unwell(f"the launcher has not answered for {silent:g} s"))
            if self._interrupted:
                self._handle(Interrupt())
            if now >= next_tick and heard_all:
                next_tick = now + self._timings.tick
                # What was said while it was stopped may be unread: nobody was silent meanwhile.
                self._handle(Ticked(awake.stopped - stopped))
                stopped = awake.stopped
                if self._run_dir.asked_for_checkpoint():
                    self._handle(SaveAsked())
            if now >= next_ping:
                next_ping = now + self._timings.ping
                self._ping_all()
                starter.tell(Beat(self._options.worker_timeout))
        self._let_finish()
        self._files.close()
        starter.finish()
        log.info("control messages: %d received, %d sent", self._received, self._sent)
        return self._ended.exit_status

    def _on_signal(self, number: int, frame: object) -> None:
        self._interrupted = True

    def _handle(self, event: Event) -> None:
        for effect in self._job.handle(event, time.monotonic()):
            self._perform(effect)

    def _receive(self) -> bool:
        """Handle what has arrived, for as long as a flood may keep the loop from all else.

        Returns whether that was everything: only then does a worker's silence mean something.
        """
        until = time.monotonic() + self._timings.burst
        while time.monotonic() < until:
            try:
                peer, data = sockets.receive(self._socket)
            except zmq.Again:
                return True
            try:
                number, frame = exchange.taken_apart(data)
                generation, message = codec.decode(frame)
                if not isinstance(message, FromWorker):
                    raise ProtocolError(f"{type(message).__name__}, which no worker sends")
            except codec.OtherVersion as error:
                self._handle(Foreign(str(error)))
                continue
            except ProtocolError as error:
                self._handle(Garbled(peer, f"a malformed frame: {error}"))
                continue
            if isinstance(message, Heartbeat):
                if generation == self._job.generation.number:
                    self._on_heartbeat(peer, message)
            elif self._exchange_with(peer).receive(number):
                self._received += 1
            else:
                self._drop(f"{type(message).__name__} out of turn")
                continue
            self._handle(Arrived(peer, generation, message))
        return False

    def _exchange_with(self, peer: bytes) -> Exchange:
        """What was said so far; kept from when the peer's first message has made it a member."""
        found = self._exchanges.get(peer)
        if found is None:
            found = self._exchanges[peer] = Exchange()
        return found

    def _on_heartbeat(self, peer: bytes, beat: Heartbeat) -> None:
        """Send again what a closed connection has lost, and ask for what it has lost of theirs."""
        known = self._exchange_with(peer)
        known.heard(beat.received)
        if beat.again:
            self._repair(f"{len(known.again())} messages to rank {beat.rank} are sent again")
            for data in known.again():
                self._put(peer, data, "a message that is sent again")
        if known.lacks(beat.sent):
            self._repair(f"messages of rank {beat.rank} are lost: asked for again")
            self._ping(peer, again=True)

    def _ping_all(self) -> None:
        members = set(self._job.peers)
        for peer in [peer for peer in self._exchanges if peer not in members]:
            del self._exchanges[peer]
        for peer in members:
            self._ping(peer)

    def _ping(self, peer: bytes, *, again: bool = False) -> None:
        known = self._exchange_with(peer)
        frame = codec.encode(Ping(known.sent, known.received, again), self._job.generation.number)
        self._put(peer, exchange.numbered(exchange.OUTSIDE, frame), "Ping")

    def _let_finish(self) -> None:
        """A worker that does not hear that all is done takes the coordinator's end for a loss."""
        assert self._ended
        until = time.monotonic() + self._timings.linger
        if self._ended.status is not Status.DONE:
            while self._job.late and time.monotonic() < until:
                if self._socket.poll(int(1000 * self._timings.tick)):
                    self._receive()
            return
        while any(known.awaited for known in self._exchanges.values()):
            if time.monotonic() > until:
                return
            self._ping_all()
            if self._socket.poll(int(1000 * self._timings.tick)):
                self._receive()

    def _repair(self, what: str) -> None:
        self._repaired += 1
        if _shown(self._repaired):
            log.info("%s (%d so far)", what, self._repaired)

    def _drop(self, what: str) -> None:
        self._dropped += 1
        if _shown(self._dropped):
            log.warning("dropped %s (%d so far)", what[:_SHOWN_CHARACTERS], self._dropped)

    def _hear_starter(self, now: float) -> None:
        """Its end is the end of the job."""
        for event in self._starter.hear(now):
            match event:
                case WorkerExited() | CannotStart() | HostLost() | Interrupt() | SaveAsked():
                    self._handle(event)
                case Configuration() | Beat():
                    raise ProtocolError(f"{type(event).__name__} out of place")
                case _:
                    lines.never(event)
        if self._starter.gone:
            self._handle(StarterGone(self._configuration.starter))

    def _send(self, send: Send) -> None:
        peer, message = send.peer, send.message
        if self._encoded is None or self._encoded[0] is not message:  # often, all get the same
            self._encoded = message, codec.encode(message, send.generation)
        self._sent += 1
        known = self._exchanges.get(peer)
        frame = self._encoded[1]
        numbered = known.send(frame) if known else exchange.numbered(exchange.OUTSIDE, frame)
        self._put(peer, numbered, type(message).__name__)
        if known and known.overfull:
            del self._exchanges[peer]
            self._handle(Garbled(peer, "it asks, and never says that it has the answers"))

    def _put(self, peer: bytes, data: bytes, what: str) -> None:
        try:
            sockets.send(self._socket, peer, data)
        except zmq.ZMQError as error:
            # The peer is gone or does not read; its silence is what the job acts on.
            self._drop(f"{what} to a peer: {error}")
            if error.errno == zmq.EHOSTUNREACH:
                self._handle(Unreachable(peer))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect)
            case Log():
                log.info("%s", effect.text)
            case Dropped():
                self._drop(effect.text)
            case Joined() | Again() | Snapshot():
                self._starter.tell(effect)
            case Warn():
                log.warning("%s", effect.text)
                self._starter.tell(Warned(effect.text, effect.note))
            case Planned():  # the workers before these are gone, and these do not save yet
                self._files.sweep()
                self._files.plan(report.planned_json(effect, self._options))
                self._starter.tell(report.planned_line(effect, self._options))
            case StepResult():
                self._files.step(effect)
                self._starter.tell(effect)
            case Evaluation():
                self._files.evaluation(effect)
                self._starter.tell(effect)
            case Commit():
                self._commit(effect)
            case Discard():
                self._files.discard(effect.step)
            case Ended():
                self._end(effect)
            case _:
                lines.never(effect)

    def _broken(self, text: str) -> None:
        self._handle(Broken(text))

    def _commit(self, commit: Commit) -> None:
        try:
            path = self._files.commit(commit, self._job.placement.stages)
        except (OSError, ValueError) as error:
            text = f"cannot complete the checkpoint: {error}"
            self._handle(Uncommitted(commit.step, text))
        else:
            self._handle(Committed(commit.step, str(path)))
            self._files.let_go()

    def _end(self, ended: Ended) -> None:
        self._ended = ended
        verdict = report.verdict(ended, time.monotonic() - self._started)
        self._starter.tell(self._files.end(verdict, self._job.placement.stages))


def _shown(count: int) -> bool:
    """Whether the log has this one of what a peer can do without end."""
    return count <= _SHOWN_DROPS or count % 1000 == 0


def check_room(options: Options) -> None:
    """Whether this process can have what a coordinator of so many workers takes.

    Raises:
        PipeworkerError: the system refuses.
    """
    descriptors, threads = sockets.SERVER
    try:
        sockets.check_room(descriptors + options.stages * options.replicas, threads)
    except OSError as error:
        raise PipeworkerError(f"cannot start the coordinator: {error.strerror}") from None


def main() -> int:
    """Read the configuration from standard input and direct the job."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return 1
        line += byte
    configuration = lines.decode(line)
    assert isinstance(configuration, Configuration)
    descriptors, starter = Descriptors(), Starter()
    host = configuration.host
    try:
        run_dir = RunDir(Path(configuration.run_dir))
        log_file = LogFile(run_dir.coordinator_log(), starter)
        logging.basicConfig(level=logging.INFO, handlers=[log_file])
        check_room(Options.from_json(configuration.options))
        server = sockets.server(configuration.token, host, timings())
        with closing(Lock(run_dir.lock, alone=False)), server as bound:
            socket, endpoint = bound
            log.info("bound to %s", endpoint)
            return Service(configuration, socket, descriptors, starter).run(endpoint)
    except (PipeworkerError, OSError, zmq.ZMQError) as error:  # nothing is possible without it
        log.exception("the coordinator failed")
        match error:
            case PipeworkerError():
                text = str(error)
            case OSError():
                text = str(RecordError(error.filename or configuration.run_dir, error))
            case _:
                name = platform.node()
                text = f"the coordinator cannot listen at {host} ({name}): {error.strerror}"
        starter.tell(Verdict("failed", 1, 0, 0.0, (), 0.0, text))
        starter.finish()
        return 1
    except Exception:
        log.exception("the coordinator failed")
        raise
