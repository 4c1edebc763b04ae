"""One host: a fork server for the workers, the coordinator, and the loop between them."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic
from urllib.parse import urlsplit

from pipeworker.coordinator.job import SLOTS
from pipeworker.coordinator.roster import JOIN_FACTOR
from pipeworker.environment import timings
from pipeworker.errors import PipeworkerError, RecordError, UsageError
from pipeworker.host.lifetime import kill_group
from pipeworker.job.options import Options
from pipeworker.plan.orders import placement
from pipeworker.record.rundir import RunDir, write_summary
from pipeworker.session.processes import Heard, LineProcess, Said, coordinator, fork_server
from pipeworker.session.show import Show, show_for
from pipeworker.wire.keys import new_token
from pipeworker.wire.lines import (
    Again,
    Beat,
    Bound,
    CannotStart,
    Configuration,
    Fork,
    Forked,
    Interrupt,
    Joined,
    Planned,
    SaveAsked,
    Snapshot,
    Unwell,
    Verdict,
    Warned,
    WorkerExited,
    never,
)
from pipeworker.wire.messages import Evaluation, StepResult

_AT_ONCE = 8
"""Workers that may be starting, on a host with fewer cores."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KILLED = "the coordinator was killed"
_NOTICE = signal.SIGUSR1
"""Of a cluster that is about to take this host: a checkpoint now, and the job goes on."""


def run(options: Options, run_dir: RunDir, warnings: Sequence[str] = ()) -> int:
    """Run a job on this host to its end; returns the exit status.

    Args:
        warnings: to be shown first.
    """
    return _Launch(options, run_dir, warnings).run()


def check_job_file(path: Path) -> None:
    """Look at the job file without running it, so that a typing error starts no process.

    Raises:
        UsageError: it does not exist, cannot be read or is not Python.
    """
    try:
        compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise UsageError(f"job file {path}: {error.strerror}") from None
    except SyntaxError as error:
        marked = f"\n    {error.text.strip()}" if error.text else ""
        line = f", line {error.lineno}" if error.lineno else ""
        raise UsageError(f"job file {path}{line}: {error.msg}{marked}") from None
    except ValueError as error:
        raise UsageError(f"job file {path} is not Python source: {error}") from None


def accelerators() -> int:
    """How many accelerators this host has, as the default number of stages.

    Raises:
        UsageError: it has none.
    """
    code = "import torch; print(torch.cuda.device_count())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    count = int(answer.stdout or 0)
    if not count:
        raise UsageError("this host has no accelerator: say how many stages with --stages")
    return count


class _Child(Generic[Said, Heard]):
    """A process of the launcher's own, and when it was last heard of.

    Args:
        name: what it is called when it does not answer.
        patience: seconds it may be silent; its first word may take `start` seconds.
    """

    def __init__(
        self, process: LineProcess[Said, Heard], name: str, patience: float, start: float
    ) -> None:
        self.process = process
        self._name = f"{name} (pid {process.pid})"
        self._patience = patience
        self._start = start
        self._heard: float | None = None
        self._began = time.monotonic()

    def hear(self) -> tuple[list[Heard], bool]:
        self._heard = time.monotonic()
        return self.process.hear()

    @property
    def has_spoken(self) -> bool:
        return self._heard is not None

    def silence(self) -> str:
        """What to say of it when it has not been heard of for too long, else nothing."""
        since, limit = self._heard, self._patience
        if since is None:
            since, limit = self._began, self._start
        if time.monotonic() - since <= limit:
            return ""
        return f"{self._name} has not answered for {limit:g} s"


class _Launch:
    def __init__(self, options: Options, run_dir: RunDir, warnings: Sequence[str]) -> None:
        self._options = options
        self._warnings = warnings
        self._placement = placement(options.schedule, options.stages, options.replicas)
        self._run_dir = run_dir
        self._token = new_token()
        self._started = time.monotonic()
        self._timings = timings()
        self._patience = self._timings.patience(options.worker_timeout)
        self._verdict: Verdict | None = None
        self._failure = _KILLED
        self._lost_forks = "the fork server of this host was killed"
        self._deadline: float | None = None
        self._interrupts = 0
        self._steps = 0
        self._endpoint = ""
        self._generation = 1
        self._slots = SLOTS if options.restarts else 1
        self._asked = self._joined = 0  # workers of it
        self._lost = 0  # coordinators
        self._causes: list[str] = []
        self._snapshot: Snapshot | None = None
        self._balance: tuple[int, ...] = ()
        self._pids: dict[int, int] = {}  # by rank, of the workers that run
        self._wake_in, self._wake_out = socket.socketpair()

    def run(self) -> int:
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        taken = {*_SIGNALS, _NOTICE}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
            taken.remove(signal.SIGHUP)
        before = {number: signal.signal(number, lambda *_: None) for number in taken}
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        patience = self._patience
        importing = JOIN_FACTOR * patience
        server = fork_server()
        self._forks = _Child(server, "the fork server of this host", patience, importing)
        try:
            self._direct()
        except PipeworkerError:
            server.kill()
            server.finish(self._timings.leave)
            raise
        self._show: Show = show_for(self._options, str(self._run_dir.path))
        for text in self._warnings:
            self._shown(self._show.warning, text)
        try:
            self._loop()
        finally:
            if not self._forks.has_spoken:  # it imports torch: it has no workers, and hears nothing
                self._forks.process.kill()
            self._forks.process.hang_up()
            self._coordinator.process.hang_up()
            self._forks.process.finish(self._timings.leave)
            self._coordinator.process.finish(self._timings.leave)
            self._shown(self._show.close)
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._wake_in.close()
            self._wake_out.close()
        verdict = self._verdict or self._verdict_of_our_own()
        self._shown(self._show.ended, verdict)
        return verdict.exit_status

    def _direct(self) -> None:
        """Start a coordinator, the first one or one that goes on where another was lost.

        Raises:
            PipeworkerError: it cannot be started.
        """
        process = coordinator()
        patience = self._patience
        self._coordinator = _Child(process, "the coordinator", patience, JOIN_FACTOR * patience)
        options, run_dir = self._options.to_json(), str(self._run_dir.path)
        where = self._token, "127.0.0.1", self._generation, -1, self._slots
        snapshot, causes = self._snapshot, tuple(self._causes)
        process.say(Configuration(options, run_dir, *where, snapshot, causes))

    def _direct_again(self) -> bool:
        """Go on with another coordinator in the place of one that is gone; False when it is over.

        Its workers are ended as soon as the next ones are started.
        """
        if self._verdict or self._interrupts or self._lost >= self._options.restarts:
            return False
        if not self._endpoint and not self._lost:  # none has ever come so far
            return False
        self._lost += 1
        failure, self._failure = self._failure, _KILLED
        self._causes.append(failure)
        if self._coordinator.process in self._selector.get_map():  # it is silent, not gone
            self._selector.unregister(self._coordinator.process)
        self._coordinator.process.hang_up()
        self._coordinator.process.finish(0.0)
        self._generation += 1
        self._asked = self._joined = 0
        self._endpoint = ""
        self._direct()
        process = self._coordinator.process
        self._selector.register(process, selectors.EVENT_READ, self._hear_coordinator)
        step = self._snapshot.step if self._snapshot else self._options.resume_step
        self._shown(self._show.warning, f"{failure}; another one goes on after step {step}")
        return True

    def _loop(self) -> None:
        """Pass on what the processes say until the verdict is in and the workers are gone."""
        with selectors.DefaultSelector() as self._selector:
            selector = self._selector
            forks, coordinator = self._forks.process, self._coordinator.process
            selector.register(coordinator, selectors.EVENT_READ, self._hear_coordinator)
            selector.register(forks, selectors.EVENT_READ, self._hear_forks)
            selector.register(self._wake_out, selectors.EVENT_READ, self._on_signal)
            next_beat = time.monotonic()
            while self._verdict is None or self._pids:
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + self._timings.ping
                    beat = Beat(self._patience)
                    forks.say(beat)
                    coordinator.say(beat)
                until = next_beat if self._deadline is None else min(next_beat, self._deadline)
                ready = selector.select(max(0.0, until - now))
                heard = {key.fileobj for key, _ in ready}
                for key, _ in ready:
                    if not key.data():
                        if key.fileobj is coordinator and self._direct_again():
                            break
                        return
                else:
                    if not self._are_alive(heard) and not self._direct_again():
                        return
                forks, coordinator = self._forks.process, self._coordinator.process
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    return

    def _are_alive(self, heard: set[Any]) -> bool:
        """Give up who has been silent; False when that is the coordinator.

        Args:
            heard: who has just been, and what may have been while this process was stopped.
        """
        forks, coordinator = self._forks, self._coordinator
        if forks.process not in heard and (silence := forks.silence()):
            self._lost_forks = silence
            self._forks.process.kill()
        if self._verdict or coordinator.process in heard:
            return True
        if silence := coordinator.silence():
            self._failure = silence
            self._coordinator.process.kill()
            return False
        return True

    def _hear_coordinator(self) -> bool:
        events, more = self._coordinator.hear()
        for event in events:
            match event:
                case Beat():
                    continue
                case Bound():
                    self._endpoint = event.endpoint
                    if not self._reaches():
                        return False
                    self._fork_more()
                case Snapshot():
                    self._snapshot = event
                case Joined():
                    self._joined += 1
                    self._fork_more()
                case Again():
                    self._generation = event.generation
                    self._causes.append(event.cause)
                    options = self._options
                    self._placement = placement(options.schedule, event.stages, options.replicas)
                    self._asked = self._joined = 0
                    self._fork_more()
                case Verdict():
                    self._verdict = event
                    self._deadline = time.monotonic() + self._timings.leave
                case StepResult():
                    self._steps = event.step
                    self._shown(self._show.hear, event)
                case Planned():
                    if event.balance != self._balance:
                        self._balance = event.balance
                        self._shown(self._show.hear, event)
                case Evaluation() | Warned():
                    self._shown(self._show.hear, event)
                case _:
                    never(event)
        if not more:
            self._selector.unregister(self._coordinator.process)
        return more or self._verdict is not None

    def _reaches(self) -> bool:
        """Whether workers of this host will reach the coordinator; if not, the job has failed."""
        url = urlsplit(self._endpoint)
        address = url.hostname or "", url.port or 0
        try:
            socket.create_connection(address, self._timings.handshake).close()
        except OSError as error:
            where = f"{address[0]}:{address[1]} ({socket.gethostname()})"
            self._failure = f"the coordinator cannot be reached at {where}: {error.strerror}"
            self._endpoint = ""  # nor will another one be
            return False
        return True

    def _fork_more(self) -> None:
        """A few workers at a time, of many; the first shows whether there are layers for all."""
        ranks = self._placement.ranks
        few = max(_AT_ONCE, os.cpu_count() or 1)
        most = 1 if ranks > few and not self._joined else few
        while self._asked < ranks and self._asked - self._joined < most:
            rank = self._asked
            where = self._endpoint, self._token
            self._forks.process.say(Fork(rank, self._generation, *where, rank, self._slots))
            self._asked += 1

    def _hear_forks(self) -> bool:
        events, more = self._forks.hear()
        for event in events:
            match event:
                case Forked():
                    self._pids[event.rank] = event.pid
                case WorkerExited():
                    del self._pids[event.rank]
                    self._coordinator.process.say(event)
                case CannotStart():
                    self._coordinator.process.say(event)
                case Beat():
                    continue
                case _:
                    never(event)
        if not more:
            self._selector.unregister(self._forks.process)
            # The kernel kills the workers when their server dies, but not what they started.
            for pid in self._pids.values():
                kill_group(pid)
            self._pids.clear()
        if not more and self._verdict is None:
            self._coordinator.process.say(Unwell(self._lost_forks))
        return more or self._verdict is None

    def _on_signal(self) -> bool:
        numbers = self._wake_out.recv(4096)
        if _NOTICE in numbers:
            self._coordinator.process.say(SaveAsked())
        for _ in filter(_SIGNALS.__contains__, numbers):
            self._interrupts += 1
            if self._interrupts > 1:
                return False
            self._coordinator.process.say(Interrupt())
            text = "stopping after this step, with a checkpoint; again to stop at once"
            self._shown(self._show.warning, text)
        return True

    def _shown(self, show: Callable[..., None], *values: Any) -> None:
        """Show something; a terminal that is gone ends the job as an interrupt does."""
        try:
            show(*values)
        except OSError:
            if not self._interrupts and self._verdict is None:
                self._wake_in.send(bytes([signal.SIGHUP]))

    def _verdict_of_our_own(self) -> Verdict:
        """The coordinator left without one: it was killed, or the user did not wait for it."""
        interrupted = bool(self._interrupts)
        verdict = Verdict(
            status="interrupted" if interrupted else "failed",
            exit_status=130 if interrupted else 1,
            steps=self._steps,
            seconds=time.monotonic() - self._started,
            peak_memory=(0,) * self._placement.ranks,
            bubble=0.0,
            error=None if interrupted else self._failure,
        )
        try:
            write_summary(self._run_dir, verdict, self._placement.stages)
        except OSError as error:
            self._shown(self._show.warning, str(RecordError(self._run_dir.summary, error)))
        return verdict
