"""A process that has imported everything once, and forks what would be fresh interpreters.

A test connects to it and requests that a Python command line is run. The forked process is like any
other: it has the arguments, folder, environment, streams and signal handling of the request, and
ends with the status that an interpreter would return. Only the modules are imported already; so the
seed of string hashes is the same in all processes of one server.

The server ends when its last lease is returned, and kills the processes that it has forked.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import json
import os
import platform
import selectors
import signal
import socket
import struct
import sys
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgpack

import pipeworker
from pipeworker.errors import ProtocolError, UsageError
from support.processes.interpreter import MAXIMUM, PRELOAD, Request, become, reset_signals

_HUGE = 1 << 21
_MADV_COLLAPSE = 25
_FIRST_LEASE = 60.0
"""Seconds until the first lease; after that its client has been killed."""


def warm_up(modules: list[str]) -> None:
    """Import the modules of the forked processes; exempt their objects from garbage collection.

    What a process computes once and keeps, as the name of the platform, is computed here too.
    """
    gc.disable()
    root = str(Path(pipeworker.__file__).parents[1])  # holds cli.py and launcher/
    sys.path.insert(0, root)
    for name in filter(None, [os.environ.get(PRELOAD), *modules]):
        importlib.import_module(name)
    sys.path.remove(root)
    platform.platform()  # starts a program
    if modules:
        _rehearse()
    # At exit torch removes its operators from its tables, for 45 ms in each process, and reports
    # the times of compilations; no test needs either.
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        atexit.unregister(dynamo.dump_compile_times)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.detach()
    gc.freeze()
    _use_huge_pages()


def _rehearse() -> None:
    """Call what every process of a job calls, so that what it computes once and keeps is there.

    Each fork would compute it anew, and copy the pages of memory that it changes.
    """
    from pipeworker.job.options import Options
    from pipeworker.wire import codec, lines
    from pipeworker.wire.messages.directions import FromWorker, ToWorker

    for event in get_args(lines.Line):
        with contextlib.suppress(ProtocolError):
            lines.decode(json.dumps([event.__name__, []]).encode())
    for message in get_args(FromWorker) + get_args(ToWorker):
        with contextlib.suppress(ProtocolError):
            codec.decode(msgpack.packb([codec.VERSION, 0, message.__name__, []]))
    with contextlib.suppress(UsageError):
        Options.of(dict.fromkeys(field.name for field in dataclasses.fields(Options)))
    if "torch" in sys.modules:
        _rehearse_torch()


def _rehearse_torch() -> None:
    import torch

    from pipeworker.worker import torch_check

    # A backward starts threads for the accelerators that torch sees, and forks could then do none.
    if torch.accelerator.current_accelerator() is None:
        torch_check.check()
    with torch.profiler.record_function("rehearsal"):  # imports a module
        pass


def _use_huge_pages() -> None:
    """Move the private memory to huge pages, whose tables a fork copies in a tenth of the time.

    A kernel before Linux 6.1 refuses that; then forks take longer.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, name = [*line.split(maxsplit=5), ""][:6]
        if "w" in access and name in ("", "[heap]"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-begin // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE), _MADV_COLLAPSE)


@dataclass
class _Child:
    connection: socket.socket
    bound: bool  # to the connection: the process is killed when that closes
    ended: bool = False  # not reaped until its client knows, so that its pid is not reused


@dataclass
class _Server:
    listener: socket.socket
    children: dict[int, _Child] = field(default_factory=dict)
    leases: set[socket.socket] = field(default_factory=set)

    def serve(self) -> Request | None:
        """Serve until the last lease is returned; in a forked process, return its request."""
        wake_in, wake_out = socket.socketpair()
        with self.listener, wake_in, wake_out, selectors.DefaultSelector() as self.selector:
            wake_in.setblocking(False)
            wake_out.setblocking(False)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            signal.set_wakeup_fd(wake_in.fileno(), warn_on_full_buffer=False)
            self.selector.register(self.listener, selectors.EVENT_READ)
            self.selector.register(wake_out, selectors.EVENT_READ)
            leased = False
            while self.leases or not leased:
                leased = leased or bool(self.leases)
                ready = self.selector.select(None if leased else _FIRST_LEASE)
                if not (leased or ready):
                    break
                for key, _ in ready:
                    if key.fileobj is self.listener:
                        self._accept()
                    elif key.fileobj is wake_out:
                        wake_out.recv(4096)
                        self._reap()
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        request = self._receive(key.fileobj)
                        if request is not None:
                            self._forget_all()
                            return request
        self._kill_all()
        return None

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connection.close()
            return
        self.selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> Request | None:
        """Serve a client's request; in a forked process, return it."""
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, MAXIMUM, 3)
        except ConnectionResetError:
            data, descriptors = b"", []
        if not data:
            self._gone(connection)
            return None
        fields: dict[str, Any] = json.loads(data)
        if "lease" in fields:
            self.leases.add(connection)
            _send(connection, {"pid": os.getpid()})
            return None
        bound = fields.pop("bound")
        parent = os.getpid()
        began_in, began_out = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(began_in)
            os.close(began_out)
            return Request(parent=parent, streams=tuple(descriptors), **fields)
        for descriptor in (*descriptors, began_out):
            os.close(descriptor)
        os.read(began_in, 1)  # as after Popen, the process leads a session and a group
        os.close(began_in)
        self.children[pid] = _Child(connection, bound)
        _send(connection, {"pid": pid})
        return None

    def _gone(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()
        self.leases.discard(connection)
        for pid, child in list(self.children.items()):
            if child.connection is connection:
                if child.ended:
                    self._forget(pid)
                elif child.bound:
                    os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for pid, child in list(self.children.items()):
            end = None
            if not child.ended:
                end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                child.ended = True
                exited = end.si_code == os.CLD_EXITED
                _send(child.connection, {"exited": end.si_status if exited else -end.si_status})
                if child.connection.fileno() < 0:  # its client is gone
                    self._forget(pid)

    def _forget(self, pid: int) -> None:
        os.waitpid(pid, 0)
        del self.children[pid]

    def _kill_all(self) -> None:
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)

    def _forget_all(self) -> None:
        """Close the server's sockets in a forked process."""
        signal.set_wakeup_fd(-1)
        for key in list(self.selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message to a client, which may have ended."""
    with contextlib.suppress(OSError):
        connection.send(json.dumps(message).encode())


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    address = listener.getsockname()
    warm_up(sys.argv[2:])
    reset_signals()
    assert threading.active_count() == 1
    request = _Server(listener).serve()
    if request is not None:
        become(request, address)


if __name__ == "__main__":
    main()
