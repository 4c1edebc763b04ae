"""The process that started the coordinator, at the other end of standard input and output.

Nothing here blocks, except the end: a suspended parent does not read, and must not suspend the
coordinator.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Iterator

from pipeworker.facts.step import StepResult
from pipeworker.host.lifetime import is_parent_stopped
from pipeworker.wire import lines
from pipeworker.wire.lines import Activity, FromCoordinator, JobEvent, KeepAlive

INPUT, OUTPUT = 0, 1
_MAX_WAITING = 1 << 10
"""Lines that may wait for the parent; steps beyond them are left out."""


class ParentProcess:
    """The coordinator's parent, which exchanges lines with it.

    It is `gone` once it has ended, as the end of input shows; `reads` and `writes` are descriptors.
    """

    def __init__(self) -> None:
        self.reads, self.writes = INPUT, OUTPUT
        self.gone = False
        self._input: lines.Buffer[JobEvent | KeepAlive] = lines.Buffer(JobEvent | KeepAlive)
        self._output: deque[bytes] = deque()
        self._last_heard: float | None = None
        self._patience = 0.0
        os.set_blocking(OUTPUT, False)

    @property
    def pending(self) -> bool:
        """Whether output waits to be read by the parent."""
        return bool(self._output)

    @property
    def has_room(self) -> bool:
        """Whether the next line, if it is not longer than ``PIPE_BUF``, does not wait."""
        return not self._output and bool(select.select([], [OUTPUT], [], 0)[1])

    def send(self, event: FromCoordinator) -> None:
        """Send a line as soon as the parent reads; drop it if the parent has ended.

        If the parent does not read at present, an `Activity` is left out, and so are the results of
        steps after many lines.
        """
        most = {Activity: 0, StepResult: _MAX_WAITING}.get(type(event))
        if most is None or len(self._output) <= most:
            self._output.append(lines.encode(event))
            self.flush()

    def flush(self) -> None:
        """Write as much output as the pipe takes now."""
        try:
            while self._output:
                line = self._output[0]
                written = os.write(OUTPUT, line)
                if written < len(line):
                    self._output[0] = line[written:]
                else:
                    self._output.popleft()
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._output.clear()

    def drain(self) -> None:
        """Wait until the parent has read all output or has ended.

        It may be suspended for any time: if the coordinator exited before, it would take the end of
        the job for the loss of the coordinator and start another one.
        """
        while self._output and not self.gone:
            readable, _, _ = select.select([INPUT], [OUTPUT], [])
            if readable:
                self.gone = not os.read(INPUT, 65536)
            self.flush()

    def receive(self, now: float) -> Iterator[JobEvent]:
        """Read what has arrived and yield its events, except for KeepAlive; `now` is in seconds."""
        data = os.read(INPUT, 65536)
        self.gone = not data
        for event in self._input.feed(data):
            if isinstance(event, KeepAlive):
                self._patience = event.timeout
                self._last_heard = now
            else:
                yield event

    def exceeded_silence(self, now: float) -> float | None:
        """Return the silence timeout in seconds of a parent that exceeds it at `now`, or None.

        A parent that the user has stopped does not exceed it: the job trains on.
        """
        if self._last_heard is None or now - self._last_heard <= self._patience:
            return None
        if is_parent_stopped():
            self._last_heard = now
            return None
        return self._patience
