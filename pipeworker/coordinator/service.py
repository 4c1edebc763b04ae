"""The loop around the coordinator's state machine: sockets, clock, files, and nothing decided.

Run as a process of its own (:func:`main`). It imports neither torch nor the user's code.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from pipeworker.coordinator import report
from pipeworker.coordinator.effects import (
    Commit,
    Dropped,
    Effect,
    Ended,
    Log,
    Planned,
    Send,
    Warn,
)
from pipeworker.coordinator.events import (
    Arrived,
    Broken,
    Committed,
    Event,
    StarterGone,
    Ticked,
    Unreachable,
)
from pipeworker.coordinator.job import Job
from pipeworker.environment import timings
from pipeworker.errors import ProtocolError
from pipeworker.job.options import Options
from pipeworker.record.rundir import RunDir, write_json, write_summary
from pipeworker.wire import codec, lines, sockets
from pipeworker.wire.lines import (
    Bound,
    Configuration,
    FromCoordinator,
    Interrupt,
    ToCoordinator,
    Unwell,
    Warned,
    WorkerExited,
)
from pipeworker.wire.messages import (
    Evaluation,
    FromWorker,
    Heartbeat,
    Ping,
    StepResult,
    ToWorker,
)
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
        )
        self._descriptors = descriptors
        metrics = self._run_dir.metrics
        self._rows = {metrics: metrics.open("a", encoding="utf-8")}
        self._input: lines.Buffer[ToCoordinator] = lines.Buffer(ToCoordinator)
        self._dropped = 0
        self._received = 0
        self._sent = 0
        self._encoded: tuple[ToWorker, bytes] | None = None
        self._interrupted = False
        self._ended: Ended | None = None

    def run(self, endpoint: str) -> int:
        """Direct the job to its end; returns the exit status."""
        self._tell(Bound(endpoint))
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        next_tick = next_ping = time.monotonic()
        while self._ended is None:
            ready = dict(poller.poll(int(1000 * self._timings.tick)))
            heard_all = self._socket not in ready or self._receive()
            if sys.stdin.fileno() in ready:
                self._read_starter()
            now = time.monotonic()
            if self._interrupted:
                self._handle(Interrupt())
            if now >= next_tick and heard_all:
                next_tick = now + self._timings.tick
                self._handle(Ticked())
            if now >= next_ping:
                next_ping = now + self._timings.ping
                ping, generation = Ping(), self._job.generation.number
                for peer in self._job.peers:
                    self._send(Send(peer, ping, generation))
        for file in self._rows.values():
            file.close()
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
                peer, frame = sockets.receive(self._socket)
                generation, message = codec.decode(frame)
            except zmq.Again:
                return True
            except ProtocolError as error:
                self._drop(f"a malformed frame: {error}")
                continue
            if not isinstance(message, FromWorker):
                self._drop(f"{type(message).__name__}, which no worker sends")
                continue
            self._received += not isinstance(message, Heartbeat)
            self._handle(Arrived(peer, generation, message))
        return False

    def _drop(self, what: str) -> None:
        self._dropped += 1
        if self._dropped <= _SHOWN_DROPS or self._dropped % 1000 == 0:
            log.warning("dropped %s (%d so far)", what[:_SHOWN_CHARACTERS], self._dropped)

    def _read_starter(self) -> None:
        """Lines from the process that started this one; its end is the end of the job."""
        data = os.read(sys.stdin.fileno(), 65536)
        if not data:
            self._handle(StarterGone(self._configuration.starter))
        for event in self._input.feed(data):
            match event:
                case WorkerExited() | Unwell() | Interrupt():
                    self._handle(event)
                case Configuration():
                    raise ProtocolError("a second Configuration")
                case _:
                    lines.never(event)

    def _send(self, send: Send) -> None:
        peer, message = send.peer, send.message
        if self._encoded is None or self._encoded[0] is not message:  # often, all get the same
            self._encoded = message, codec.encode(message, send.generation)
        try:
            sockets.send(self._socket, peer, self._encoded[1])
            self._sent += not isinstance(message, Ping)
        except zmq.ZMQError as error:
            # The peer is gone or does not read; its silence is what the job acts on.
            self._drop(f"{type(message).__name__} to a peer: {error}")
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
            case Warn():
                log.warning("%s", effect.text)
                self._tell(Warned(effect.text))
            case Planned():
                plan = report.planned_json(effect, self._options)
                self._write(self._run_dir.plan, lambda: write_json(self._run_dir.plan, plan))
                self._tell(report.planned_line(effect, self._options))
            case StepResult():
                row = dataclasses.asdict(effect)
                if effect.loss_scale is None:
                    del row["loss_scale"]
                self._append(self._run_dir.metrics, row)
                self._tell(effect)
            case Evaluation():
                row = {"step": effect.step, **effect.row()}
                self._append(self._run_dir.evaluation, row)
                self._tell(effect)
            case Commit():
                self._commit(effect)
            case Ended():
                self._end(effect)
            case _:
                lines.never(effect)

    def _append(self, path: Path, row: dict[str, Any]) -> None:
        """A line more, in a file that is opened once."""

        def write() -> None:
            if path not in self._rows:
                self._rows[path] = path.open("a", encoding="utf-8")
            self._rows[path].write(json.dumps(row) + "\n")
            self._rows[path].flush()

        self._write(path, write)

    def _write(self, path: Path, write: Callable[[], None]) -> None:
        """With room to open the file; that it cannot be written ends the job, and is said."""
        try:
            self._descriptors.spare(write)
        except OSError as error:
            text = f"cannot write {path}: {error.strerror}"
            log.error("%s", text)
            if self._ended is None:
                self._handle(Broken(text))
            else:
                self._tell(Warned(text))

    def _commit(self, commit: Commit) -> None:
        placement = self._job.placement
        manifest: dict[str, Any] = {
            "version": 1,
            "step": commit.step,
            "stages": placement.stages,
            "parts": placement.ranks,
        }
        if commit.ties:
            manifest["ties"] = commit.ties
        if commit.scaler:
            manifest["scaler"] = dataclasses.asdict(commit.scaler)
        try:
            self._descriptors.spare(lambda: self._run_dir.commit_checkpoint(commit.step, manifest))
        except OSError as error:
            self._handle(Broken(f"cannot complete the checkpoint: {error}"))
        else:
            self._handle(Committed(commit.step))

    def _end(self, ended: Ended) -> None:
        self._ended = ended
        verdict = report.verdict(ended, time.monotonic() - self._started)
        stages = self._job.placement.stages
        self._write(self._run_dir.summary, lambda: write_summary(self._run_dir, verdict, stages))
        self._tell(verdict)

    def _tell(self, event: FromCoordinator) -> None:
        """One line to the starter; when it is gone, its end on standard input says so."""
        try:
            sys.stdout.buffer.write(lines.encode(event))
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            log.info("the process that started the job does not listen: %s", type(event).__name__)


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
    descriptors = Descriptors()
    logging.basicConfig(
        filename=RunDir(Path(configuration.run_dir)).coordinator_log(),
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    try:
        with sockets.server(configuration.token, configuration.host, timings()) as bound:
            socket, endpoint = bound
            log.info("bound to %s", endpoint)
            return Service(configuration, socket, descriptors).run(endpoint)
    except Exception:
        log.exception("the coordinator failed")
        raise
