"""Failpoints in the processes of a job: the first process that reaches an armed one has a fault.

A failpoint has a name: an action, ``1F2``, and a layer in it, ``1F2:4``; a phase and its rank,
``restoring@1``; the others are listed below. It is armed by a symbolic link of that name, which
leads to the fault's name, in a folder that the environment variable specifies. The first process
that reaches it removes the link, leaves a note, and has the fault. Every process of the job imports
this module before all others.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

VARIABLE = "PIPEWORKER_TESTS_FAILPOINTS"
"""The environment variable that holds the folder."""
_RELEASED = "released"
STATUS = 7
"""The exit status of the fault ``exit``."""


@dataclass(frozen=True)
class Triggered:
    """The note of a failpoint: the process, the time by the monotonic clock, and a count."""

    pid: int
    when: float
    count: int


@dataclass(frozen=True)
class Failpoints:
    """The folder of failpoints, as a test uses it."""

    folder: Path

    def set(self, place: str, fault: str) -> None:
        assert fault in FAULTS, fault
        (self.folder / place).symlink_to(fault)

    def triggered(self, place: str) -> Triggered | None:
        """Return the note of a failpoint, or None while no process has reached it."""
        try:
            note = (self.folder / f"{place}.triggered").readlink()
        except FileNotFoundError:
            return None
        pid, when, count = str(note).split()
        return Triggered(int(pid), float(when), int(count))

    def release(self) -> None:
        """End the fault ``wait``."""
        (self.folder / _RELEASED).touch()

    def clear(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()


_folder = -1


class _Here:
    """The position of this process, or of its main thread."""

    rank = -1
    action = ""
    port = -1
    """The coordinator's port."""


def at(place: str) -> None:
    """Trigger the failpoint of this name, if it is armed."""
    try:
        os.rename(place, f"{place}.taken", src_dir_fd=_folder, dst_dir_fd=_folder)
    except FileNotFoundError:
        return
    fault = os.readlink(f"{place}.taken", dir_fd=_folder)
    when, count = time.monotonic(), 1
    if fault in _COUNTS:
        count = _COUNTS[fault]()
    os.symlink(f"{os.getpid()} {when} {count}", f"{place}.triggered", dir_fd=_folder)
    if fault not in _COUNTS:
        FAULTS[fault]()


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _wait() -> None:
    """Wait in this thread until the test releases it, as for a slow disk."""
    while True:
        with suppress(FileNotFoundError):
            os.stat(_RELEASED, dir_fd=_folder)
            return
        time.sleep(0.02)


def _fail() -> None:
    raise ConnectionError("a fault of the tests")


def _cut(data: bool) -> int:
    """Shut down this worker's connections to its neighbours, or that to the coordinator."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(path.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as found:
                if _is_data(found) if data else _is_control(found):
                    found.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def _is_control(found: socket.socket) -> bool:
    return found.family == socket.AF_INET and found.getpeername()[1] == _Here.port


def _is_data(found: socket.socket) -> bool:
    """Return whether a socket is connected to another process than the coordinator."""
    if found.family == socket.AF_INET:
        return bool(found.getpeername()[1] != _Here.port)
    peer = found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", peer)[0] not in (0, os.getpid())


_COUNTS = {"cut control": lambda: _cut(False), "cut data": lambda: _cut(True)}
FAULTS: dict[str, Callable[[], object]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "terminate": _signal(signal.SIGTERM),
    "exit": lambda: os._exit(STATUS),
    "raise": _fail,
    "wait": _wait,
    "kill parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
    **_COUNTS,
}


def _in_workers() -> None:
    """Patch what the agent has imported."""
    from torch import nn

    from pipeworker.facts.position import Phase
    from pipeworker.host.position import Tracker
    from pipeworker.worker.state.snapshot_writer import SnapshotWriter
    from pipeworker.worker.step import executor
    from pipeworker.worker.worker import Worker

    def known(self: Any, settings: Any, *rest: Any) -> None:
        _Here.rank, _Here.port = settings.rank, int(settings.endpoint.rpartition(":")[2])
        original["known"](self, settings, *rest)

    def placed(
        self: Any, phase: Phase, step: int = -1, microbatch: int = -1, layer: int = -1
    ) -> None:
        original["placed"](self, phase, step, microbatch, layer)
        _reach(phase.name.lower(), layer)

    def waiting(
        self: Any,
        step: int = -1,
        microbatch: int = -1,
        layer: int = -1,
        phase: Phase = Phase.WAITING,
    ) -> None:
        original["waiting"](self, step, microbatch, layer, phase)
        _reach(phase.name.lower(), layer)

    def program(actions: Sequence[Any], *rest: Any, **more: Any) -> Any:
        compiled = original["program"](actions, *rest, **more)
        instructions = [
            (_with_failpoint(str(action), handle), m, watched)
            for action, (handle, m, watched) in zip(actions, compiled.instructions, strict=True)
        ]
        return replace(compiled, instructions=instructions)

    def copying(self: Any, copy: Any, buffer: Any, pairs: Sequence[Any], *rest: Any) -> None:
        original["copying"](self, copy, buffer, _with_copy_failpoint(pairs), *rest)

    def dropout(self: Any, x: Any) -> Any:
        at(f"layer@{_Here.rank}")
        return original["dropout"](self, x)

    original: dict[str, Any] = {}
    for name, owner, attribute, replaced in (
        ("known", Worker, "__init__", known),
        ("placed", Tracker, "set", placed),
        ("waiting", Tracker, "wait", waiting),
        ("program", executor, "compile_program", program),
        ("copying", SnapshotWriter, "_copy", copying),
        ("dropout", nn.Dropout, "forward", dropout),
    ):
        original[name] = getattr(owner, attribute)
        setattr(owner, attribute, replaced)


def _reach(phase: str, layer: int) -> None:
    if not _Here.action:
        at(f"{phase}@{_Here.rank}")
        return
    at(_Here.action)
    if layer >= 0:
        at(f"{_Here.action}:{layer}")


def _with_failpoint(action: str, handle: Callable[[int], None]) -> Callable[[int], None]:
    def run(microbatch: int) -> None:
        _Here.action = action
        handle(microbatch)
        at(action)  # an action without a position of its own
        _Here.action = ""

    return run


def _with_copy_failpoint(later: Sequence[Any]) -> Iterator[Any]:
    """Yield the pairs, with a failpoint in the middle of a copy."""
    for number, pair in enumerate(later):
        if number == len(later) // 2:
            at(f"copying@{_Here.rank}")
        yield pair


def _in_agent() -> None:
    from pipeworker.host.agent import Agent

    def serve(self: Any) -> None:
        _in_workers()
        original_serve(self)

    def fork(self: Any, asked: Any) -> None:
        at(f"fork {asked.rank}")
        original_fork(self, asked)

    original_serve, original_fork = Agent.serve, Agent.fork
    replaced: Any = Agent
    replaced.serve, replaced.fork = serve, fork


def _in_coordinator() -> None:
    """Patch the coordinator.

    ``send Snapshot`` is before a line is sent to its parent, ``sent Advance`` after a message is
    sent to a worker; others are around a commit.
    """
    from pipeworker.coordinator.io.parent import ParentProcess
    from pipeworker.coordinator.io.workers import WorkerConnections
    from pipeworker.record.checkpoint import folder

    def send_line(self: Any, event: Any) -> None:
        at(f"send {type(event).__name__}")
        originals[0](self, event)

    def send(self: Any, effect: Any) -> None:
        originals[1](self, effect)
        at(f"sent {type(effect.message).__name__}")

    def write_json(path: Path, value: Any) -> None:
        at(f"before {path.name}")
        originals[2](path, value)
        at(f"after {path.name}")

    def commit(self: Any, manifest: Any) -> None:
        originals[3](self, manifest)
        at("committed")

    def rmtree(path: Path, **options: Any) -> None:
        at("removing")
        originals[4](path, **options)

    originals: list[Any] = []
    for owner, name, replaced in (
        (ParentProcess, "send", send_line),
        (WorkerConnections, "send", send),
        (folder, "write_json", write_json),
        (folder.CheckpointFolder, "commit", commit),
        (shutil, "rmtree", rmtree),
    ):
        originals.append(getattr(owner, name))
        setattr(owner, name, replaced)


def _in_writer() -> None:
    """Patch the writer: a failpoint between writing a file and syncing it to disk."""

    def fsync(handle: int) -> None:
        at(Path(f"/proc/self/fd/{handle}").readlink().name)
        original(handle)

    original = os.fsync
    vars(os)["fsync"] = fsync


_ROLES: dict[str, Callable[[], object]] = {
    "pipeworker.host.agent": _in_agent,
    "pipeworker.coordinator.service": _in_coordinator,
    "pipeworker.record.checkpoint.snapshot_memory": _in_writer,
    "pipeworker": lambda: None,
}


def _words() -> list[str]:
    """Return the command line of this process, or of the interpreter it was forked from."""
    return [*getattr(sys, "argv", ()), *sys.orig_argv]


if VARIABLE in os.environ:
    _folder = os.open(os.environ[VARIABLE], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for role in _ROLES.keys() & {*_words()}:
        _ROLES[role]()
