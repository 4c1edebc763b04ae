"""A thread that performs tasks one after the other."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

Task = Callable[[], None]


class TaskThread:
    """A daemon thread that performs tasks in the order of submission.

    It starts at once: in the middle of a step the system might refuse it.

    Args:
        name: name of the thread.
        failed: called, on the thread, with what a task raised; the thread performs the next task.
            Without it the tasks handle every exception that they expect.
        niceness: how far the priority of the thread is below that of its process (:func:`os.nice`).

    Raises:
        RuntimeError: the system grants no thread.
    """

    def __init__(
        self, name: str, failed: Callable[[BaseException], None] | None = None, niceness: int = 0
    ) -> None:
        self._failed, self._niceness = failed, niceness
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Perform a task after those submitted before it; return at once."""
        self._tasks.put(task)

    def finish(self) -> None:
        """Wait for the tasks that were submitted so far."""
        if self._thread.is_alive():
            done = threading.Event()
            self._tasks.put(done.set)
            done.wait()

    def close(self, seconds: float | None = None) -> bool:
        """End the thread after the tasks that were submitted so far.

        It waits at most `seconds`; None: without a limit.

        Returns:
            Whether the thread has ended. If not, call again.
        """
        self._tasks.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._niceness:
            own = threading.get_native_id()
            with suppress(OSError):  # a sandbox refuses it: the tasks matter more
                # The process may run under `nice` already, and only root may raise a priority.
                lower = os.getpriority(os.PRIO_PROCESS, own) + self._niceness
                os.setpriority(os.PRIO_PROCESS, own, lower)
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:
                if self._failed is None:
                    raise
                self._failed(error)
