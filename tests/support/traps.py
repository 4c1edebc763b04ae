"""Traps in the processes of a job: who comes to a place where one is set meets a fault there.

A place has a name: an action, ``1F2``, and a layer in it, ``1F2:4``; a phase and its rank,
``restoring@1``; what else is below. A trap is a symbolic link of that name, to the fault's, in a
folder that the environment names. Whoever comes first takes it away, leaves a note of it, and has
the fault. Imported before all else by every process of the job.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "PIPEWORKER_TESTS_TRAPS"
"""Of the environment: the folder."""
STATUS = 7
"""Of who exits."""


@dataclass(frozen=True)
class Sprung:
    """What a trap has done: to whom, when (of the monotonic clock), and how often."""

    pid: int
    when: float
    count: int


@dataclass(frozen=True)
class Traps:
    """The folder, as a test sees it."""

    folder: Path

    def set(self, place: str, fault: str) -> None:
        assert fault in FAULTS, fault
        (self.folder / place).symlink_to(fault)

    def sprung(self, place: str) -> Sprung | None:
        """What the trap that was set there has done; None while nobody has come."""
        try:
            note = (self.folder / f"{place}.sprung").readlink()
        except FileNotFoundError:
            return None
        pid, when, count = str(note).split()
        return Sprung(int(pid), float(when), int(count))

    def clear(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()


_folder = -1


class _Here:
    """Where this process, or its main thread, is."""

    rank = -1
    action = ""
    port = -1
    """Of the coordinator."""


def at(place: str) -> None:
    """Somebody comes to a place."""
    try:
        os.rename(place, f"{place}.taken", src_dir_fd=_folder, dst_dir_fd=_folder)
    except FileNotFoundError:
        return
    fault = os.readlink(f"{place}.taken", dir_fd=_folder)
    when, count = time.monotonic(), 1
    if fault in _COUNTS:
        count = _COUNTS[fault]()
    os.symlink(f"{os.getpid()} {when} {count}", f"{place}.sprung", dir_fd=_folder)
    if fault not in _COUNTS:
        FAULTS[fault]()


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


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
    """To another process, which is not the coordinator."""
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
    "kill parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
    **_COUNTS,
}


def _in_workers() -> None:
    """Patch what the fork server has imported."""
    from torch import nn

    from pipeworker.host.position import Tracker
    from pipeworker.wire.messages.position import Phase
    from pipeworker.worker.state.keeper import Keeper
    from pipeworker.worker.step.executor import Executor
    from pipeworker.worker.worker import Worker

    def known(self: Any, settings: Any, *rest: Any) -> None:
        _Here.rank, _Here.port = settings.rank, int(settings.endpoint.rpartition(":")[2])
        original["known"](self, settings, *rest)

    def placed(
        self: Any, phase: Phase, step: int = -1, microbatch: int = -1, layer: int = -1
    ) -> None:
        original["placed"](self, phase, step, microbatch, layer)
        _come(phase.label, layer)

    def waiting(
        self: Any,
        step: int = -1,
        microbatch: int = -1,
        layer: int = -1,
        phase: Phase = Phase.WAITING,
    ) -> None:
        original["waiting"](self, step, microbatch, layer, phase)
        _come(phase.label, layer)

    def program(self: Any, actions: Sequence[Any]) -> None:
        original["program"](self, actions)
        self._program = [
            (_watched(str(action), handle), m, computes)
            for action, (handle, m, computes) in zip(actions, self._program, strict=True)
        ]

    def copying(self: Any, step: int, album: Any, later: Sequence[Any], spent: float) -> None:
        original["copying"](self, step, album, _with_a_trap(later), spent)

    def dropout(self: Any, x: Any) -> Any:
        at(f"layer@{_Here.rank}")
        return original["dropout"](self, x)

    original: dict[str, Any] = {}
    for name, owner, attribute, replaced in (
        ("known", Worker, "__init__", known),
        ("placed", Tracker, "set", placed),
        ("waiting", Tracker, "wait", waiting),
        ("program", Executor, "program", program),
        ("copying", Keeper, "_copy", copying),
        ("dropout", nn.Dropout, "forward", dropout),
    ):
        original[name] = getattr(owner, attribute)
        setattr(owner, attribute, replaced)


def _come(phase: str, layer: int) -> None:
    if not _Here.action:
        at(f"{phase}@{_Here.rank}")
        return
    at(_Here.action)
    if layer >= 0:
        at(f"{_Here.action}:{layer}")


def _watched(action: str, handle: Callable[[int], None]) -> Callable[[int], None]:
    def run(microbatch: int) -> None:
        _Here.action = action
        handle(microbatch)
        at(action)  # of one that does not say where it is
        _Here.action = ""

    return run


def _with_a_trap(later: Sequence[Any]) -> Iterator[Any]:
    """In the middle of a copy: some of it is there."""
    for number, pair in enumerate(later):
        if number == len(later) // 2:
            at(f"copying@{_Here.rank}")
        yield pair


def _in_fork_server() -> None:
    from pipeworker.host.forkserver import _ForkServer

    def serve(self: Any) -> None:
        _in_workers()
        original_serve(self)

    def fork(self: Any, asked: Any) -> None:
        at(f"fork {asked.rank}")
        original_fork(self, asked)

    original_serve, original_fork = _ForkServer.serve, _ForkServer._fork
    replaced: Any = _ForkServer
    replaced.serve, replaced._fork = serve, fork


def _in_coordinator() -> None:
    """``tell Snapshot``, before it is told; ``sent Advance``, to one of all; around a commit."""
    from pipeworker.coordinator.service import Service
    from pipeworker.coordinator.shell.starter import Starter
    from pipeworker.record import rundir

    def tell(self: Any, event: Any) -> None:
        at(f"tell {type(event).__name__}")
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
        (Starter, "tell", tell),
        (Service, "_send", send),
        (rundir, "write_json", write_json),
        (rundir.RunDir, "commit_checkpoint", commit),
        (shutil, "rmtree", rmtree),
    ):
        originals.append(getattr(owner, name))
        setattr(owner, name, replaced)


def _in_writer() -> None:
    """Between writing a file and having it on disk."""

    def fsync(handle: int) -> None:
        at(Path(f"/proc/self/fd/{handle}").readlink().name)
        original(handle)

    original = os.fsync
    vars(os)["fsync"] = fsync


_ROLES: dict[str, Callable[[], object]] = {
    "pipeworker.host.forkserver": _in_fork_server,
    "pipeworker.coordinator.service": _in_coordinator,
    "pipeworker.record.writer": _in_writer,
    "pipeworker": lambda: None,
}


def _words() -> list[str]:
    """What this process was started with: forked, or as an interpreter."""
    return [*getattr(sys, "argv", ()), *sys.orig_argv]


if VARIABLE in os.environ:
    _folder = os.open(os.environ[VARIABLE], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for role in _ROLES.keys() & {*_words()}:
        importlib.import_module("support.registered")  # the orders of the tests
        _ROLES[role]()
