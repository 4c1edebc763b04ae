"""Sends on a thread: writing to a socket takes as long as a copy of the tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipeworker.host.task_thread import TaskThread
from pipeworker.worker.transport.links.link import Pending


class SendTask:
    """A call that starts sends on a thread, and the sends that it started."""

    __slots__ = ("_error", "_issued", "_pending", "_start")

    def __init__(self, start: Callable[[], list[Pending]], thread: TaskThread) -> None:
        self._start = start
        self._issued = threading.Lock()
        self._issued.acquire()
        self._pending: list[Pending] = []
        self._error: Exception | None = None
        thread.submit(self._run)

    def _run(self) -> None:
        try:
            self._pending = self._start()
        except Exception as error:
            self._error = error
        finally:
            del self._start
            self._issued.release()

    @property
    def issued(self) -> bool:
        """Whether all sends have been started."""
        return not self._issued.locked()

    def wait(self) -> None:
        """Wait until all sends are complete; raise the error of a send that failed."""
        with self._issued:
            if self._error is not None:
                raise self._error
        for pending in self._pending:
            pending.wait()
        self._pending = []  # the thread keeps the task, but not what it sent
