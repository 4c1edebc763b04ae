"""Imports torch once and forks the workers of one host.

Standard input and output are pipes to the launcher, JSON objects one a line. In: ``fork``. Out:
``forked`` with the rank and the pid; ``exited`` with the rank, the exit code (negative for a
signal) and where the worker was. When input ends, every worker still there is killed with its
process group and the server ends. The kernel kills the workers when the server itself is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
from typing import Any

from pipeworker.worker.lifetime import die_with, kill_group
from pipeworker.worker.position import Tracker


class _ForkServer:
    def __init__(self) -> None:
        self._workers: dict[int, tuple[int, Tracker]] = {}  # by pid: rank and position
        self._input = b""
        self._wake_in, self._wake_out = socket.socketpair()

    def serve(self) -> None:
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._wake_out, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == 0 and not self._read():
                        self._kill_all()
                        return
                    if key.fd == self._wake_out.fileno():
                        self._wake_out.recv(4096)
                        self._reap()

    def _read(self) -> bool:
        """Do what the launcher says; False when it is gone."""
        data = os.read(0, 65536)
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            self._fork(json.loads(line)["fork"])
        return bool(data)

    def _fork(self, settings: dict[str, Any]) -> None:
        tracker = Tracker()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(parent, settings, tracker)
        self._workers[pid] = settings["rank"], tracker
        _say({"forked": [settings["rank"], pid]})

    def _become_worker(self, parent: int, settings: dict[str, Any], tracker: Tracker) -> None:
        """In the child: never returns."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with(parent)
            os.setsid()
            self._wake_in.close()
            self._wake_out.close()
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(2, 1)  # until the worker's log is known
            os.close(nothing)
            gc.enable()

            from pipeworker.worker import service
            from pipeworker.worker.worker import Settings

            status = service.run(Settings(**settings, tracker=tracker))
            atexit._run_exitfuncs()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        for pid in list(self._workers):
            done, wait_status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank, tracker = self._workers.pop(pid)
                kill_group(pid)  # what the worker started, a data loader's processes say
                position = tracker.get()
                tracker.close()
                _say({"exited": [rank, os.waitstatus_to_exitcode(wait_status), position.to_json()]})

    def _kill_all(self) -> None:
        for pid in self._workers:
            kill_group(pid)
            os.kill(pid, signal.SIGKILL)
        for pid in self._workers:
            os.waitpid(pid, 0)
            kill_group(pid)


def _say(report: dict[str, Any]) -> None:
    """One line to the launcher; when it is gone, the end of standard input says so."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, (json.dumps(report) + "\n").encode())


def main() -> int:
    """Import torch, then serve until the launcher is gone."""
    gc.disable()
    # Optimizers import torch._dynamo when they are built: once here, rather than in every worker.
    import torch._dynamo  # noqa: F401

    import pipeworker.worker.service  # noqa: F401

    gc.freeze()
    _ForkServer().serve()
    return 0
