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
from pipeworker.coordinator.machine import Machine
from pipeworker.coordinator.rendezvous import Rendezvous
from pipeworker.coordinator.report import Configuration
from pipeworker.coordinator.roster import Exited
from pipeworker.errors import ProtocolError
from pipeworker.record.rundir import RunDir, write_json, write_summary
from pipeworker.wire import codec, sockets
from pipeworker.wire.messages import (
    Evaluation,
    FromWorker,
    Heartbeat,
    Hello,
    Ping,
    Position,
    StepResult,
    StoreRequest,
    ToWorker,
)

_TICK_SECONDS = 0.25
_PING_SECONDS = 1.0
_BURST_SECONDS = 0.2
_SHOWN_DROPS = 20
_SHOWN_CHARACTERS = 200

log = logging.getLogger("pipeworker.coordinator")


class Service:
    """One generation of one job, from the first Hello to the verdict."""

    def __init__(self, configuration: Configuration, socket: zmq.Socket[bytes]) -> None:
        self._configuration = configuration
        self._socket = socket
        self._run_dir = RunDir(Path(configuration.run_dir))
        self._started = time.monotonic()
        self._machine = Machine(configuration.options, configuration.run_dir, self._started)
        self._rendezvous = Rendezvous()
        self._metrics = self._run_dir.metrics.open("a", encoding="utf-8")
        self._input = b""
        self._dropped = 0
        self._received = 0
        self._sent = 0
        self._encoded: tuple[ToWorker, bytes] | None = None
        self._interrupted = False
        self._ended: Ended | None = None

    def run(self, endpoint: str) -> int:
        """Direct the job to its end; returns the exit status."""
        self._tell("bound", endpoint)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        next_tick = next_ping = time.monotonic()
        while self._ended is None:
            ready = dict(poller.poll(int(_TICK_SECONDS * 1000)))
            heard_all = self._socket not in ready or self._receive()
            if sys.stdin.fileno() in ready:
                self._read_starter()
            now = time.monotonic()
            if self._interrupted:
                self._perform(self._machine.interrupt(now))
            if now >= next_tick and heard_all:
                next_tick = now + _TICK_SECONDS
                self._perform(self._machine.tick(now))
            if now >= next_ping:
                next_ping = now + _PING_SECONDS
                ping = Ping()
                for peer in self._machine.peers:
                    self._send(peer, ping)
        self._metrics.close()
        log.info("control messages: %d received, %d sent", self._received, self._sent)
        return self._ended.exit_status

    def _on_signal(self, number: int, frame: object) -> None:
        self._interrupted = True

    def _receive(self) -> bool:
        """Handle what has arrived, for as long as a flood may keep the loop from all else.

        Returns whether that was everything: only then does a worker's silence mean something.
        """
        until = time.monotonic() + _BURST_SECONDS
        while time.monotonic() < until:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            if len(parts) != 2:
                self._drop("a frame of the wrong form")
                continue
            peer, frame = parts
            try:
                generation, message = codec.decode(frame)
            except ProtocolError as error:
                self._drop(f"a malformed frame: {error}")
                continue
            self._received += not isinstance(message, Heartbeat)
            if generation != self._configuration.generation:
                self._drop(f"{type(message).__name__} of generation {generation}")
            elif not isinstance(message, FromWorker):
                self._drop(f"{type(message).__name__}, which no worker sends")
            elif isinstance(message, StoreRequest):
                self._store(peer, message)
            elif isinstance(message, Hello) or self._machine.knows(peer):
                self._perform(self._machine.received(peer, message, time.monotonic()))
            else:
                self._drop(f"{type(message).__name__} of a peer that has not joined")
        return False

    def _store(self, peer: bytes, request: StoreRequest) -> None:
        if not self._machine.knows(peer):
            self._drop("a store request of a peer that has not joined")
            return
        try:
            answers = self._rendezvous.handle(peer, request)
        except ProtocolError as error:
            self._drop(f"a store request: {error}")
            return
        for who, reply in answers:
            self._send(who, reply)

    def _drop(self, what: str) -> None:
        self._dropped += 1
        if self._dropped <= _SHOWN_DROPS or self._dropped % 1000 == 0:
            log.warning("dropped %s (%d so far)", what[:_SHOWN_CHARACTERS], self._dropped)

    def _read_starter(self) -> None:
        """Lines from the process that started this one; its end is the end of the job."""
        data = os.read(sys.stdin.fileno(), 65536)
        if not data:
            self._perform(self._machine.abandoned(self._configuration.starter))
            return
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if "exited" in event:
                rank, code, position = event["exited"]
                exited = Exited(rank, code, Position.from_json(position))
                self._perform(self._machine.exited(exited, time.monotonic()))
            elif "failed" in event:
                self._perform(self._machine.lost(event["failed"]))
            elif "interrupt" in event:
                self._perform(self._machine.interrupt(time.monotonic()))

    def _send(self, peer: bytes, message: ToWorker) -> None:
        if self._encoded is None or self._encoded[0] is not message:  # often, all get the same
            self._encoded = message, codec.encode(message, self._configuration.generation)
        try:
            self._socket.send_multipart([peer, self._encoded[1]])
            self._sent += not isinstance(message, Ping)
        except zmq.ZMQError as error:
            # The peer is gone or does not read; its silence is what the machine acts on.
            self._drop(f"{type(message).__name__} to a peer: {error}")
            if error.errno == zmq.EHOSTUNREACH:
                self._machine.unreachable(peer, time.monotonic())

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect.peer, effect.message)
                case Log():
                    log.info("%s", effect.text)
                case Dropped():
                    self._drop(effect.text)
                case Warn():
                    log.warning("%s", effect.text)
                    self._tell("warning", effect.text)
                case Planned():
                    plan = report.planned_json(effect, self._configuration.options)
                    write_json(self._run_dir.plan, plan)
                    self._tell("planned", plan)
                case StepResult():
                    row = dataclasses.asdict(effect)
                    if effect.loss_scale is None:
                        del row["loss_scale"]
                    self._metrics.write(json.dumps(row) + "\n")
                    self._metrics.flush()
                    self._tell("step", row)
                case Evaluation():
                    row = {"step": effect.step, **effect.row()}
                    with self._run_dir.evaluation.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                    self._tell("evaluation", row)
                case Commit():
                    self._commit(effect)
                case Ended():
                    self._end(effect)

    def _commit(self, commit: Commit) -> None:
        stages = self._configuration.options.stages
        manifest: dict[str, Any] = {"version": 1, "step": commit.step, "stages": stages}
        if commit.ties:
            manifest["ties"] = commit.ties
        if commit.scaler:
            manifest["scaler"] = dataclasses.asdict(commit.scaler)
        try:
            self._run_dir.commit_checkpoint(commit.step, manifest)
        except OSError as error:
            self._perform(self._machine.defect(f"cannot complete the checkpoint: {error}"))
        else:
            self._perform(self._machine.committed())

    def _end(self, ended: Ended) -> None:
        self._ended = ended
        seconds = time.monotonic() - self._started
        verdict = report.ended_json(ended, seconds)
        write_summary(
            self._run_dir,
            status=verdict["status"],
            steps=ended.steps,
            stages=self._configuration.options.stages,
            seconds=seconds,
            peak_memory=verdict["peak_memory_bytes"],
            bubble=ended.bubble,
            error=verdict["error"],
        )
        self._tell("ended", verdict)

    def _tell(self, event: str, value: Any) -> None:
        """One line to the starter; when it is gone, its end on standard input says so."""
        try:
            sys.stdout.write(json.dumps({event: value}) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            log.info("the process that started the job does not listen: %s", event)


def main() -> int:
    """Read the configuration from standard input and direct the job."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return 1
        line += byte
    configuration = Configuration.from_json(json.loads(line))
    logging.basicConfig(
        filename=RunDir(Path(configuration.run_dir)).coordinator_log(),
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    try:
        with sockets.server(configuration.token, configuration.host) as (socket, endpoint):
            log.info("bound to %s", endpoint)
            return Service(configuration, socket).run(endpoint)
    except Exception:
        log.exception("the coordinator failed")
        raise
