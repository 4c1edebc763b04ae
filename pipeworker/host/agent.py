"""The agent of a host: imports torch once, and forks the host's workers.

Standard input and output are pipes to the launcher, which carry :mod:`pipeworker.wire.lines`. When
its input ends, or the launcher is silent for longer than its timeout, the agent kills the remaining
workers with their process groups and exits. If the agent itself is killed, the kernel kills them,
and a watcher kills what they had started.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from typing_extensions import assert_never

from pipeworker.environment import timings, versions
from pipeworker.errors import AGAIN, PipeworkerError
from pipeworker.host import cgroups
from pipeworker.host.data_readers import DataReaders, ReaderLink, ReadingClock
from pipeworker.host.descriptors import check_available, check_tasks, raise_limit
from pipeworker.host.device_files import remove_device_files
from pipeworker.host.lifetime import die_with_parent, has_ended, is_parent_stopped, kill_group
from pipeworker.host.position import Tracker
from pipeworker.host.session_watcher import (
    SessionWatcher,
    choose_sockets_folder,
    keep_sockets_folder,
    share_sockets_folder,
)
from pipeworker.host.signals import SignalSocket
from pipeworker.host.start_progress import reported_progress
from pipeworker.host.streams import connect_to_null, flush_files, printed_to_stderr
from pipeworker.host.suspend_clock import SuspendAwareClock
from pipeworker.record.checkpoint.snapshot_memory import SnapshotMemory
from pipeworker.record.rundir import file_digest
from pipeworker.trace.recorder import record_unfinished
from pipeworker.trace.ring import Ring
from pipeworker.wire import lines
from pipeworker.wire.interfaces import connection_error
from pipeworker.wire.sockets import WORKER_NEEDS

_NOTIFICATIONS: dict[int, lines.FromAgent] = {
    signal.SIGINT: lines.Interrupt(),
    signal.SIGTERM: lines.Interrupt(),
    signal.SIGUSR1: lines.SaveRequest(),
}

_REAP_SECONDS = 0.002
"""Between two checks whether killed workers have ended."""
_KEEP_SECONDS = 3600.0
"""Seconds after which the folder of sockets is made new again."""


class Agent:
    """The agent of a host.

    If it is not the launcher's child (`remote`), the launcher does not receive signals to the whole
    host or job, such as a cluster sends before it reclaims a node: the agent reports them.
    """

    def __init__(self, watcher: SessionWatcher, *, remote: bool) -> None:
        self._watcher, self._sockets = watcher, watcher.folder
        self._kept_at = 0.0
        """When :attr:`_sockets` was last made new."""
        self._remote, self._notifications = remote, _NOTIFICATIONS if remote else {}
        self._workers: dict[int, tuple[lines.Fork, Tracker, Ring]] = {}  # by pid
        self._held: set[int] = set()
        """Workers that were killed and have not ended: a debugger or a driver holds them."""
        self._memories: dict[int, list[SnapshotMemory]] = {}  # by rank
        self._memory_kills = cgroups.memory_kills()
        """The number of processes that the kernel had killed for memory, when last read."""
        self._readers = DataReaders(watcher, self._run_reader)
        self._input: lines.Buffer[lines.ToAgent] = lines.Buffer(lines.ToAgent)
        self._signals = SignalSocket([signal.SIGCHLD, *self._notifications])

    def serve(self) -> None:
        """Handle requests until the launcher is gone."""
        for number in _NOTIFICATIONS.keys() - self._notifications.keys():
            signal.signal(number, signal.SIG_IGN)  # it exits at the end of its input
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._signals, selectors.EVENT_READ)
            selector.register(self._readers, selectors.EVENT_READ)
            clock = SuspendAwareClock(timings().ping)
            received_at, timeout = clock.now(), 0.0  # none until the launcher sends it
            _send(lines.KeepAlive(timeout))
            while True:
                now = clock.now()  # before reading: it may be suspended with input unread
                if now - self._kept_at > _KEEP_SECONDS:
                    keep_sockets_folder(self._sockets)
                    self._kept_at = now
                ready = {key.fd for key, _ in selector.select(timings().ping)}
                if 0 in ready:
                    data = os.read(0, 65536)
                    received_at = clock.now()
                    for event in self._input.feed(data):
                        match event:
                            case lines.Fork():
                                self.fork(event)
                            case lines.KeepAlive():
                                timeout = event.timeout
                            case _:
                                assert_never(event)
                    if not data:
                        break
                elif timeout and now - received_at > timeout:
                    if not is_parent_stopped():
                        break
                    received_at = clock.now()
                if self._signals.fileno() in ready:
                    for number in set(self._signals.read()) & self._notifications.keys():
                        _send(self._notifications[number])
                    self._reap()
                    self._readers.reap()
                if self._readers.fileno() in ready:
                    self._readers.start_requested()
                if timeout:
                    _send(lines.KeepAlive(timeout))
        self._kill_all()
        self._readers.kill_all()
        self._watcher.resume()
        self._signals.close()

    def fork(self, request: lines.Fork) -> None:
        """Start a worker; kill those of earlier generations first."""
        self._kill_earlier(request.generation)
        keep_sockets_folder(self._sockets)
        parent = os.getpid()
        link: ReaderLink | None = None
        with contextlib.ExitStack() as undo:
            try:
                check_tasks(request.tasks)
                tracker = undo.enter_context(contextlib.closing(Tracker()))
                ring = undo.enter_context(contextlib.closing(Ring()))
                for rank in (request.rank, *request.mirrors):
                    memories = self._memories.setdefault(rank, [])
                    while len(memories) < request.slots:
                        memories.append(SnapshotMemory())
                if request.slots > 1:  # a loss of a worker does not end the job
                    link = self._readers.link(request.rank)
                if link is not None:
                    undo.callback(link.close)
                pid = os.fork()
            except OSError as error:
                _send(self._cannot_start(request, error))
                return
            undo.pop_all()
        if pid == 0:
            self._become_worker(parent, request, tracker, ring, link)
        if link is not None:
            link.close()
        self._watcher.add(pid)
        self._workers[pid] = request, tracker, ring
        _send(lines.Forked(request.rank, request.generation, pid))

    def _cannot_start(self, request: lines.Fork, error: OSError) -> lines.CannotStart:
        where = f" on {socket.gethostname()}" if self._remote else ""
        text = f"cannot start the worker of rank {request.rank}{where}: {error.strerror}"
        return lines.CannotStart(request.rank, request.generation, text)

    def _become_worker(
        self,
        parent: int,
        request: lines.Fork,
        tracker: Tracker,
        ring: Ring,
        link: ReaderLink | None,
    ) -> None:
        """Run the worker in the forked child; never return."""
        status = 1
        try:
            self._watcher.close()
            self._readers.close()
            try:
                check_available(*WORKER_NEEDS)
            except OSError as error:  # reported here: the worker cannot without them
                _send(self._cannot_start(request, error))
                return
            if self._remote and (reason := unreachable_reason(request)):
                _send(lines.CannotStart(request.rank, request.generation, reason))
                return
            self._leave(parent)

            from pipeworker.worker import process
            from pipeworker.worker.model.survey_process import SurveyProcess
            from pipeworker.worker.settings import Settings

            settings = Settings(
                rank=request.rank,
                endpoint=request.endpoint,
                token=request.token,
                local_rank=request.local_rank,
                generation=request.generation,
                tracker=tracker,
                ring=ring,
                memories=self._memories,
                mirrors=request.mirrors,
                mirrored=request.mirrored,
                survey=None if request.rank else SurveyProcess(),
                reader=link,
            )
            status = process.run(settings)
            _run_exit_handlers()
        except BaseException:  # no worker is there to report it
            traceback.print_exc()
        finally:
            os._exit(status)

    def _run_reader(
        self, connection: socket.socket, control: socket.socket, clock: ReadingClock
    ) -> int:
        """Read a worker's data in a forked child; return the exit status."""
        self._watcher.close()
        self._leave(os.getppid())

        from pipeworker.worker.data import reader_process

        status = reader_process.run(connection, control, clock)
        _run_exit_handlers()
        return status

    def _leave(self, parent: int) -> None:
        """Give a forked child a session, signals and streams of its own."""
        self._signals.close()
        die_with_parent(parent)
        os.setsid()
        connect_to_null(0)
        os.dup2(2, 1)  # until the worker's log is known
        gc.enable()

    def _kill_earlier(self, generation: int) -> None:
        """Kill the workers of earlier generations, which have no work left and may be stuck."""
        old = {pid for pid, (fork, _, _) in self._workers.items() if fork.generation < generation}
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + timings().linger
        while old & self._workers.keys() - self._held:
            self._reap()
            if time.monotonic() > until:
                self._held |= old & self._workers.keys()
            time.sleep(_REAP_SECONDS)

    def _reap(self) -> None:
        for pid in list(self._workers):
            ended, wait_status = os.waitpid(pid, os.WNOHANG)
            if ended:
                request, tracker, ring = self._workers.pop(pid)
                self._held.discard(pid)
                kill_group(pid)  # the processes that the worker started, as a data loader's
                remove_device_files(pid)
                self._watcher.remove(pid)
                position = tracker.get()
                tracker.close()
                record_unfinished(ring)
                ring.close()
                code = os.waitstatus_to_exitcode(wait_status)
                reason = ""
                if code == AGAIN:
                    reason = _cannot_reach(request, "it does not answer", remote=self._remote)
                lacks_memory = code == -signal.SIGKILL and self._has_killed_for_memory()
                exited = request.rank, request.generation, code, position, reason, lacks_memory
                _send(lines.WorkerExited(*exited))

    def _has_killed_for_memory(self) -> bool:
        """Return whether the kernel has killed a process of this host since the last call."""
        before, self._memory_kills = self._memory_kills, cgroups.memory_kills()
        return self._memory_kills > before

    def _kill_all(self) -> None:
        for pid in self._workers:
            kill_group(pid)
            os.kill(pid, signal.SIGKILL)
        for pid in self._workers.keys() - self._held:
            os.waitpid(pid, 0)
            kill_group(pid)
            remove_device_files(pid)
            self._watcher.remove(pid)


def unreachable_reason(request: lines.Fork) -> str:
    """Return why this host cannot reach the coordinator, or "".

    Only the host's first worker of the first generation checks: later, the network may recover.
    """
    if request.local_rank or request.generation > 1:
        return ""
    error = connection_error(request.endpoint, timings().reach)
    return error and _cannot_reach(request, error, remote=True)


def _cannot_reach(request: lines.Fork, error: str, *, remote: bool) -> str:
    """Return the error message for workers of this host that cannot reach the coordinator."""
    text = f"{socket.gethostname()} cannot reach the coordinator at {request.endpoint}: {error}"
    if remote:
        text += "; the hosts of a job must reach each other at any port, with no firewall or ssh "
        text += "jump host between them"
    return text


def _send(event: lines.FromAgent) -> None:
    """Send an event to the launcher; if that is gone, standard input ends too."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, lines.encode(event))


def _agent_hello(job: str, run: str, variable: str) -> lines.AgentHello:
    """Return the introduction of this host.

    `job` and `run` are the paths of the job file and ``run.json``; the environment's `variable`
    begins with the launcher's address.
    """
    found = {name: version or "" for name, version in versions().items()}
    address = "".join(os.environ.get(variable, "").split()[:1])
    return lines.AgentHello(
        **found, caller=address, job=file_digest(Path(job)), run=file_digest(Path(run))
    )


def _run_exit_handlers() -> None:
    """Do what Python does for the user's code at the end of a process that is not forked."""
    atexit._run_exitfuncs()
    flush_files()


def main() -> int:
    """Import torch, then serve until the launcher is gone.

    With arguments, which are those of :func:`_agent_hello`, introduce this host first.
    """
    if words := sys.argv[3:]:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, b"\n")  # what the host's shell has printed may lack the end of its line
        _send(_agent_hello(*words))
    gc.disable()
    parent = os.getppid()
    watcher = SessionWatcher(choose_sockets_folder())  # forked while this process is small
    share_sockets_folder(watcher.folder)
    die_with_parent(parent)  # until it can watch its input
    if has_ended(0):  # the parent has ended before that: importing torch may take long
        return 0
    # Standard output is the pipe to the launcher, and a backend of torch may print at its import.
    progress = reported_progress(lambda seconds: _send(lines.Starting(seconds)))
    with progress, printed_to_stderr():
        # For its effect, and by name: a linter removes an import that nothing refers to.
        try:
            importlib.import_module("torch")
        except Exception as error:  # of a library that it needs, or of a file with its name
            sys.exit(
                f"{socket.gethostname()}: torch cannot be imported: {type(error).__name__}: "
                f"{error}; {sys.executable} -c 'import torch' shows where"
            )
        try:
            importlib.import_module("pipeworker.worker.internals").preload()
        except PipeworkerError as error:
            sys.exit(f"{socket.gethostname()}: {error}")
        for name in ("process", "model.survey_process", "data.reader_process"):
            importlib.import_module(f"pipeworker.worker.{name}")
    die_with_parent(parent, signal.SIGCONT)  # a stopped agent would not see its input end
    gc.freeze()
    raise_limit()  # the memories of many workers need more than a process has at first
    Agent(watcher, remote=bool(words)).serve()
    return 0
