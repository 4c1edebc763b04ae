"""A thread that performs sends and posts receives while the main thread computes.

A send writes to a socket until it is full, which takes as long as a copy of the tensor; on the main
thread that would be time in which the stage does not compute.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from pipeworker.worker.transport.links.link import Pending


class Errand:
    """A task given to the courier: calls that start sends or receives, and what they started."""

    __slots__ = ("_error", "_issued", "_pending", "_start")

    def __init__(self, start: Callable[[], list[Pending]]) -> None:
        self._start = start
        self._issued = threading.Lock()
        self._issued.acquire()
        self._pending: list[Pending] = []
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._pending = self._start()
        except Exception as error:
            self._error = error  # raised where the errand is waited for
        finally:
            del self._start
            self._issued.release()

    @property
    def issued(self) -> bool:
        """Whether everything has been started."""
        return not self._issued.locked()

    def wait(self) -> None:
        """Return when everything the errand started is complete.

        Raises:
            PeerLost: the other end is gone.
        """
        with self._issued:
            if self._error is not None:
                raise self._error
        for pending in self._pending:
            pending.wait()
        self._pending = []  # the thread keeps the errand, but not what it sent


class Courier:
    """Performs errands in order on a thread of its own."""

    def __init__(self) -> None:
        self._errands: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()

    def submit(self, start: Callable[[], list[Pending]]) -> Errand:
        errand = Errand(start)
        self._errands.put(errand)
        return errand

    def close(self) -> None:
        """Perform what was submitted and end the thread."""
        self._errands.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            errand.run()
