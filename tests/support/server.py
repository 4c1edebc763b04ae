"""A process that has imported everything once, and forks what would be fresh interpreters.

Tests ask it over a socket of theirs to run a Python command line. What it forks is a process like
any other: it has the arguments, folder, environment, streams and signal handling it was given, and
ends with the status an interpreter would give. What it has in advance are the modules, and so the
seed of string hashes, which all processes of one server share.

The server ends when nobody holds a lease on it any more, and takes along what it has forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from support.interpreter import MAXIMUM, Request, become


def warm_up(modules: list[str]) -> None:
    """Import what the forked processes need; garbage of before is not looked at again."""
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    # Torch takes its operators out of its tables at the end: 45 ms in each process, for nothing.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.freeze()


@dataclass
class _Child:
    connection: socket.socket
    bound: bool  # to the connection: it is killed when that closes
    ended: bool = False  # and not reaped before its client knows: until then its pid is its own


@dataclass
class _Server:
    listener: socket.socket
    children: dict[int, _Child] = field(default_factory=dict)
    leases: set[socket.socket] = field(default_factory=set)

    def serve(self) -> Request | None:
        """Until the last lease is gone; in a fork, return what it is to become."""
        wake_in, wake_out = socket.socketpair()
        with self.listener, wake_in, wake_out, selectors.DefaultSelector() as self.selector:
            wake_in.setblocking(False)
            wake_out.setblocking(False)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            signal.set_wakeup_fd(wake_in.fileno(), warn_on_full_buffer=False)
            self.selector.register(self.listener, selectors.EVENT_READ)
            self.selector.register(wake_out, selectors.EVENT_READ)
            begun = False
            while self.leases or not begun:
                begun = begun or bool(self.leases)
                for key, _ in self.selector.select():
                    if key.fileobj is self.listener:
                        self._accept()
                    elif key.fileobj is wake_out:
                        wake_out.recv(4096)
                        self._reap()
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        request = self._hear(key.fileobj)
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

    def _hear(self, connection: socket.socket) -> Request | None:
        """Do what a client says; in a fork, give what it is to become."""
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, MAXIMUM, 3)
        except ConnectionResetError:
            data, descriptors = b"", []
        if not data:
            self._gone(connection)
            return None
        given: dict[str, Any] = json.loads(data)
        if "lease" in given:
            self.leases.add(connection)
            _say(connection, {"pid": os.getpid()})
            return None
        bound = given.pop("bound")
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            return Request(parent=parent, streams=tuple(descriptors), **given)
        for descriptor in descriptors:
            os.close(descriptor)
        self.children[pid] = _Child(connection, bound)
        _say(connection, {"pid": pid})
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
                _say(child.connection, {"exited": end.si_status if exited else -end.si_status})
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
        """In a fork: let go of what is the server's."""
        signal.set_wakeup_fd(-1)
        for key in list(self.selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()


def _say(connection: socket.socket, what: dict[str, Any]) -> None:
    """To a client, who may be gone."""
    with contextlib.suppress(OSError):
        connection.send(json.dumps(what).encode())


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    address = listener.getsockname()
    warm_up(sys.argv[2:])
    assert threading.active_count() == 1
    request = _Server(listener).serve()
    if request is not None:
        become(request, address)


if __name__ == "__main__":
    main()
