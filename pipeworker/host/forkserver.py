"""Imports torch once and forks the workers of one host.

Standard input and output are pipes to the launcher; what is said there is in
:mod:`pipeworker.wire.lines`. When input ends, every worker still there is killed with its process
group and the server ends; so when a launcher that beats has been silent for too long. The kernel
kills the workers when the server itself is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeworker.environment import facts, timings
from pipeworker.host.awake import Awake
from pipeworker.host.lifetime import die_with, dying_with, kill_group
from pipeworker.host.position import Tracker
from pipeworker.record.memory import Memory
from pipeworker.record.rundir import digest
from pipeworker.wire import lines, sockets
from pipeworker.wire.interfaces import unreached
from pipeworker.wire.lines import (
    Beat,
    CannotStart,
    Fork,
    Forked,
    FromForkServer,
    Here,
    Interrupt,
    SaveAsked,
    ToForkServer,
    WorkerExited,
)

_DESCRIPTORS = 1 << 16
_NOTICES: dict[int, FromForkServer] = {
    signal.SIGINT: Interrupt(),
    signal.SIGTERM: Interrupt(),
    signal.SIGUSR1: SaveAsked(),
}


class _ForkServer:
    """See the module.

    Args:
        carried: it is not the launcher's child, and signals that mean its whole host or job (what
            a cluster sends before it takes a node) do not reach the launcher but through it.
    """

    def __init__(self, *, carried: bool) -> None:
        self._carried, self._notices = carried, _NOTICES if carried else {}
        self._workers: dict[int, tuple[Fork, Tracker]] = {}  # by pid: as it was asked for
        self._memories: dict[int, list[Memory]] = {}  # by rank: copies of the state of its workers
        self._input: lines.Buffer[ToForkServer] = lines.Buffer(ToForkServer)
        self._wake_in, self._wake_out = socket.socketpair()

    def serve(self) -> None:
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _NOTICES:  # it ends with its input
            noted = number in self._notices
            signal.signal(number, (lambda *_: None) if noted else signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._wake_out, selectors.EVENT_READ)
            awake = Awake(timings().ping)
            heard, patience = awake.look(), 0.0  # none, until the launcher says how long
            _say(Beat(patience))
            while True:
                now = awake.look()  # it may be stopped before it has read what was said by then
                ready = {key.fd for key, _ in selector.select(timings().ping)}
                if 0 in ready:
                    data = os.read(0, 65536)
                    heard = awake.look()
                    for event in self._input.feed(data):
                        match event:
                            case Fork():
                                self._fork(event)
                            case Beat():
                                patience = event.patience
                            case _:
                                lines.never(event)
                    if not data:
                        self._kill_all()
                        return
                elif patience and now - heard > patience:
                    self._kill_all()
                    return
                if self._wake_out.fileno() in ready:
                    for number in set(self._wake_out.recv(4096)) & self._notices.keys():
                        _say(self._notices[number])
                    self._reap()
                if patience:
                    _say(Beat(patience))

    def _fork(self, asked: Fork) -> None:
        self._end_before(asked.generation)
        tracker = Tracker()
        parent = os.getpid()
        try:
            for rank in (asked.rank, *asked.keeps):
                memories = self._memories.setdefault(rank, [])
                while len(memories) < asked.slots:
                    memories.append(Memory())
            pid = os.fork()
        except OSError as error:
            _say(_cannot_start(asked, error))
            tracker.close()
            return
        if pid == 0:
            self._become_worker(parent, asked, tracker)
        self._workers[pid] = asked, tracker
        _say(Forked(asked.rank, asked.generation, pid))

    def _become_worker(self, parent: int, asked: Fork, tracker: Tracker) -> None:
        """In the child: never returns."""
        status = 1
        try:
            try:
                sockets.check_room(*sockets.WORKER)
            except OSError as error:  # said here: without them nobody else would hear of it
                _say(_cannot_start(asked, error))
                return
            if why := self._out_of_reach(asked):
                _say(CannotStart(asked.rank, asked.generation, why))
                return
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *self._notices):
                signal.signal(number, signal.SIG_DFL)
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
            from pipeworker.worker.settings import Settings

            settings = Settings(
                rank=asked.rank,
                endpoint=asked.endpoint,
                token=asked.token,
                local_rank=asked.local_rank,
                generation=asked.generation,
                tracker=tracker,
                memories=self._memories,
                keeps=asked.keeps,
                kept=asked.kept,
            )
            status = service.run(settings)
            atexit._run_exitfuncs()
        finally:
            os._exit(status)

    def _out_of_reach(self, asked: Fork) -> str:
        """Why this host cannot take part; only at first: a way that there was may come back."""
        if not self._carried or asked.local_rank or asked.generation > 1:
            return ""
        why = unreached(asked.endpoint, timings().reach)
        return why and (
            f"{socket.gethostname()} cannot reach the coordinator at {asked.endpoint}: {why}. The "
            "hosts of a job must reach each other at any port: no firewall may be between, and no "
            "other host that ssh goes through"
        )

    def _end_before(self, generation: int) -> None:
        """Workers of earlier generations have nothing left to do, and may be stuck."""
        old = [pid for pid, (asked, _) in self._workers.items() if asked.generation < generation]
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        self._reap(old, 0)

    def _reap(self, pids: Sequence[int] | None = None, how: int = os.WNOHANG) -> None:
        for pid in list(self._workers) if pids is None else pids:
            done, wait_status = os.waitpid(pid, how)
            if done:
                asked, tracker = self._workers.pop(pid)
                kill_group(pid)  # what the worker started, a data loader's processes say
                position = tracker.get()
                tracker.close()
                code = os.waitstatus_to_exitcode(wait_status)
                _say(WorkerExited(asked.rank, asked.generation, code, position))

    def _kill_all(self) -> None:
        for pid in self._workers:
            kill_group(pid)
            os.kill(pid, signal.SIGKILL)
        for pid in self._workers:
            os.waitpid(pid, 0)
            kill_group(pid)


def _make_room() -> None:
    """The memories of many workers take more descriptors than a process has at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _cannot_start(asked: Fork, error: OSError) -> CannotStart:
    text = f"cannot start the worker of rank {asked.rank}: {error.strerror}"
    return CannotStart(asked.rank, asked.generation, text)


def _say(event: FromForkServer) -> None:
    """One line to the launcher; when it is gone, the end of standard input says so."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, lines.encode(event))


def _here(job: str, run: str, variable: str) -> Here:
    """What there is to know of this host, where it is not the launcher's.

    Args:
        job, run: the job file and ``run.json``.
        variable: of the environment, which begins with the launcher's address.
    """
    versions = facts()["versions"]
    caller = os.environ.get(variable, "").split()
    return Here(
        versions["pipeworker"],
        versions["python"],
        versions["torch"] or "",
        socket.gethostname(),
        caller[0] if caller else "",
        digest(Path(job)),
        digest(Path(run)),
    )


def main() -> int:
    """Import torch, then serve until the launcher is gone.

    With words, which are those of :func:`_here`, this host is introduced first.
    """
    if words := sys.argv[3:]:
        _say(_here(*words))
    gc.disable()
    with dying_with(os.getppid()):
        # For its effect, and by name: a linter takes out an import that nothing refers to.
        importlib.import_module("pipeworker.worker.service")
        importlib.import_module("pipeworker.worker.internals").preload()
    gc.freeze()
    _make_room()
    _ForkServer(carried=bool(words)).serve()
    return 0
