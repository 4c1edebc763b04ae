"""The process of a job's hooks, as the launcher or rank 0 starts and ends it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from pipeworker.environment import timings
from pipeworker.errors import PipeworkerError, UnreadableFile
from pipeworker.facts.failure import describe_exit
from pipeworker.host.lifetime import kill_group
from pipeworker.host.line_process import LineProcess, start_hooks
from pipeworker.job.options import Options
from pipeworker.record.run_feed import PlaceFile
from pipeworker.record.rundir import RunDir
from pipeworker.wire.lines import FromHooks, HookSetup, JobOver, ToHooks, Verdict, Warned

_NOTE_SECONDS = 5.0
"""Waiting for longer than this is shown."""


class HookProcess:
    """The process that calls the hooks of a job file; there is none until :meth:`start`.

    A thread starts and reads it, and lives as long: the kernel ends a process with the thread that
    started it, see :func:`pipeworker.host.lifetime.die_with_parent`.
    """

    def __init__(self, options: Options, run_dir: RunDir) -> None:
        self._options, self._run_dir = options, run_dir
        self._process: LineProcess[ToHooks, FromHooks] | None = None
        self._started, self._ended = threading.Event(), threading.Event()
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_over = self._is_killed = False
        self._sending = threading.Lock()  # held until the first line, the setup, is sent

    def start(self, names: Collection[str]) -> None:
        """Start the process, unless it was or there are no hooks of these `names`.

        The file with their place is made now: the process takes seconds to import the job file, and
        without the file a run that is resumed would begin behind its checkpoint.
        """
        if not names or self._thread is not None:
            return
        with suppress(OSError, UnreadableFile):  # the process fails with the same, and says so
            PlaceFile(self._run_dir.hooks, names, self._options.resume_step).close()
        self._thread = threading.Thread(target=self._run, name="hooks", daemon=True)
        self._thread.start()
        self._started.wait()

    def warnings(self) -> list[Warned]:
        """Return the warnings that have come since the last call."""
        return [Warned(self._warnings.get()) for _ in range(self._warnings.qsize())]

    def finish(
        self,
        show: Callable[[Warned], object],
        verdict: Verdict | None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until the hooks were called with everything, and end their process. Idempotent.

        There is nothing to call them with if the job has ended before its first step.

        Args:
            show: receives warnings.
            verdict: that of the job; None if its coordinator was lost.
            interrupted: whether to wait no longer.
        """
        if self._thread is None:
            return
        limit = timings().exit if verdict is None else timings().hooks
        if verdict and verdict.is_usage_error and verdict.steps <= self._options.resume_step:
            limit = 0.0
        began, noted, why = time.monotonic(), False, ""
        if self._process is not None and not self._ended.is_set():
            self._is_over = True
            with self._sending:
                self._process.send(JobOver())
        while not why and not self._ended.wait(min(timings().poll, limit)):
            waited = time.monotonic() - began
            if interrupted():
                why = "an interrupt has ended them"
            elif waited >= limit:
                why = f"they have not finished within {limit:g} s and were ended"
            elif waited >= _NOTE_SECONDS and not noted:
                noted = True
                text = (
                    f"waiting for the hooks of the job for at most {limit:g} s; interrupt to stop"
                )
                show(Warned(text, note=True))
        self.kill()
        self._thread.join(timings().exit)
        for warning in self.warnings():
            show(warning)
        if why and limit:
            show(Warned(f"hooks: {why}; --resume continues with the records that are left"))

    def kill(self) -> None:
        """End the process and those that it has started."""
        self._is_killed = True
        if self._process is not None and not self._ended.is_set():
            kill_group(self._process.pid)

    def _run(self) -> None:
        with self._sending:
            try:
                self._process = process = start_hooks()
            except PipeworkerError as error:
                self._warnings.put(f"hooks: {error}; no hook is called")
                self._ended.set()
                return
            finally:
                self._started.set()
            process.send(HookSetup(self._options.to_json(), str(self._run_dir.path)))
        more = True
        while more:
            received, more = process.receive()
            for warning in received:
                self._warnings.put(warning.text)
        kill_group(process.pid)  # what it has started
        code = process.wait(timings().exit)
        is_expected = self._is_killed or (self._is_over and code == 0)
        self._ended.set()  # finish() calls kill() now
        if not is_expected and code != 1:  # with 1, it has warned itself
            self._warnings.put(
                f"hooks: their process {describe_exit(code)}; none is called any more"
            )
