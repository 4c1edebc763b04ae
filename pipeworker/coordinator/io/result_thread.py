"""Performs slow work in a thread: training waits neither for the disk nor for a search."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from pipeworker.host.task_thread import TaskThread

T = TypeVar("T")

NEEDS = 2, 1
"""Descriptors and threads that a :class:`ResultThread` takes."""


class ResultThread:
    """Tasks that a thread performs one after the other, and whose results the loop handles.

    `reads` is a descriptor that can be read while there are results.
    """

    def __init__(self, name: str) -> None:
        self.reads, self._writes = os.pipe()
        os.set_blocking(self.reads, False)
        self._ended: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = TaskThread(name)

    def submit(self, task: Callable[[], T], handle: Callable[[T], None]) -> None:
        """Perform a task after those submitted before it; return at once.

        :meth:`handle_results` calls `handle` with the result, or raises what the task has raised.
        """

        def perform() -> None:
            result: Future[T] = Future()
            try:
                result.set_result(task())
            except BaseException as error:
                result.set_exception(error)
            self._ended.put(lambda: handle(result.result()))
            os.write(self._writes, b"\0")

        self._thread.submit(perform)

    def handle_results(self) -> None:
        """Handle the results of all tasks that have ended, in order."""
        with suppress(BlockingIOError):
            os.read(self.reads, 4096)
        for _ in range(self._ended.qsize()):
            self._ended.get()()
