"""A thread that performs tasks one after the other."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable

Task = Callable[[], None]


class TaskThread:
    """A daemon thread, started by its first task, that performs tasks in the order of submission.

    Args:
        name: name of the thread.
        failed: called, on the thread, with what a task raised; the thread performs the next task.
            Without it the tasks handle every exception that they expect.
        niceness: priority of the thread, as :func:`os.setpriority` takes it. Only on Linux does a
            thread have a priority of its own.
    """

    def __init__(
        self,
        name: str,
        failed: Callable[[BaseException], None] | None = None,
        niceness: int = 0,
    ) -> None:
        self._name, self._failed, self._niceness = name, failed, niceness
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Task) -> None:
        """Perform a task after those submitted before it; return at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def finish(self) -> None:
        """Wait for the tasks that were submitted so far."""
        if self._thread is not None:
            done = threading.Event()
            self._tasks.put(done.set)
            done.wait()

    def close(self, seconds: float | None = None) -> bool:
        """End the thread after the tasks that were submitted so far.

        It waits at most `seconds`; None: without a limit.

        Returns:
            Whether the thread has ended. If not, call again.
        """
        if self._thread is None:
            return True
        self._tasks.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def _run(self) -> None:
        if self._niceness and sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:
                if self._failed is None:
                    raise
                self._failed(error)
