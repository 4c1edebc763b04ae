"""One host: a fork server for the workers, the coordinator, and the loop between them."""

from __future__ import annotations

import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeworker.environment import timings
from pipeworker.errors import UsageError
from pipeworker.host.lifetime import kill_group
from pipeworker.job.options import Options
from pipeworker.plan.orders import placement
from pipeworker.record.rundir import RunDir, write_summary
from pipeworker.session.processes import coordinator, fork_server
from pipeworker.session.show import Show, show_for
from pipeworker.wire.keys import new_token
from pipeworker.wire.lines import (
    Bound,
    Configuration,
    Fork,
    Forked,
    Interrupt,
    Planned,
    Unwell,
    Verdict,
    Warned,
    WorkerExited,
    never,
)
from pipeworker.wire.messages import Evaluation, StepResult

_GENERATION = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(options: Options, run_dir: RunDir) -> int:
    """Run a job on this host to its end; returns the exit status."""
    return _Launch(options, run_dir).run()


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


class _Launch:
    def __init__(self, options: Options, run_dir: RunDir) -> None:
        self._options = options
        self._placement = placement(options.schedule, options.stages)
        self._run_dir = run_dir
        self._token = new_token()
        self._started = time.monotonic()
        self._timings = timings()
        self._verdict: Verdict | None = None
        self._deadline: float | None = None
        self._interrupts = 0
        self._steps = 0
        self._pids: dict[int, int] = {}  # by rank, of the workers that run
        self._wake_in, self._wake_out = socket.socketpair()

    def run(self) -> int:
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        self._forks = fork_server()
        self._coordinator = coordinator()
        options, run_dir = self._options.to_json(), str(self._run_dir.path)
        self._coordinator.say(
            Configuration(options, run_dir, self._token, "127.0.0.1", _GENERATION)
        )
        self._show: Show = show_for(self._options, str(self._run_dir.path))
        try:
            self._loop()
        finally:
            self._forks.hang_up()
            self._coordinator.hang_up()
            self._forks.finish(self._timings.leave)
            self._coordinator.finish(self._timings.leave)
            self._shown(self._show.close)
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._wake_in.close()
            self._wake_out.close()
        verdict = self._verdict or self._verdict_of_our_own()
        self._shown(self._show.ended, verdict)
        return verdict.exit_status

    def _loop(self) -> None:
        """Pass on what the processes say until the verdict is in and the workers are gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._coordinator, selectors.EVENT_READ, self._hear_coordinator)
            selector.register(self._forks, selectors.EVENT_READ, self._hear_forks)
            selector.register(self._wake_out, selectors.EVENT_READ, self._on_signal)
            while self._verdict is None or self._pids:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    return
                for key, _ in selector.select(left):
                    if not key.data():
                        return

    def _hear_coordinator(self) -> bool:
        events, more = self._coordinator.hear()
        for event in events:
            match event:
                case Bound():
                    self._fork_all(event.endpoint)
                case Verdict():
                    self._verdict = event
                    self._deadline = time.monotonic() + self._timings.leave
                case StepResult():
                    self._steps = event.step
                    self._shown(self._show.hear, event)
                case Planned() | Evaluation() | Warned():
                    self._shown(self._show.hear, event)
                case _:
                    never(event)
        return more or self._verdict is not None

    def _fork_all(self, endpoint: str) -> None:
        for rank in range(self._placement.ranks):
            self._forks.say(Fork(rank, _GENERATION, endpoint, self._token, local_rank=rank))

    def _hear_forks(self) -> bool:
        events, more = self._forks.hear()
        for event in events:
            match event:
                case Forked():
                    self._pids[event.rank] = event.pid
                case WorkerExited():
                    del self._pids[event.rank]
                    self._coordinator.say(event)
                case _:
                    never(event)
        if not more:
            # The kernel kills the workers when their server dies, but not what they started.
            for pid in self._pids.values():
                kill_group(pid)
            self._pids.clear()
        if not more and self._verdict is None:
            self._coordinator.say(Unwell("the fork server of this host was killed"))
        return more or self._verdict is None

    def _on_signal(self) -> bool:
        numbers = [n for n in self._wake_out.recv(4096) if n in _SIGNALS]
        for _ in numbers:
            self._interrupts += 1
            if self._interrupts > 1:
                return False
            self._coordinator.say(Interrupt())
            self._deadline = self._deadline or time.monotonic() + self._timings.interrupted
            self._shown(self._show.warning, "stopping after this step; again to stop at once")
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
            error=None if interrupted else "the coordinator was killed",
        )
        write_summary(self._run_dir, verdict, self._placement.stages)
        return verdict
