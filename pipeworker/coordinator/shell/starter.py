"""The process that started the coordinator: what is said to it and by it, and whether it lives.

Nothing here blocks: a starter that is stopped does not read, and must not stop the coordinator.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

from pipeworker.wire import lines
from pipeworker.wire.lines import Beat, FromCoordinator, ToCoordinator

_READ, _WRITE = 0, 1


class Starter:
    """Standard input and output, as lines; its end is the end of input."""

    def __init__(self) -> None:
        self.reads, self.writes = _READ, _WRITE
        self.gone = False
        self._input: lines.Buffer[ToCoordinator] = lines.Buffer(ToCoordinator)
        self._output = b""
        self._heard: float | None = None
        self._patience = 0.0
        os.set_blocking(_WRITE, False)

    @property
    def pending(self) -> bool:
        """Whether something waits until it reads."""
        return bool(self._output)

    def tell(self, event: FromCoordinator) -> None:
        """One line, as soon as it reads; nothing when it is gone, which input says as well."""
        self._output += lines.encode(event)
        self.flush()

    def flush(self) -> None:
        """Write what it reads now."""
        try:
            while self._output:
                self._output = self._output[os.write(_WRITE, self._output) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._output = b""

    def finish(self) -> None:
        """Stay until it has read the rest, or is gone.

        However long it is stopped, it must not take the end of the job for a coordinator's that was
        lost: it would start another one.
        """
        while self._output and not self.gone:
            readable, _, _ = select.select([_READ], [_WRITE], [])
            if readable:
                self.gone = not os.read(_READ, 65536)
            self.flush()

    def hear(self, now: float) -> Iterator[ToCoordinator]:
        """What it says; with its end, it is gone."""
        data = os.read(_READ, 65536)
        self.gone = not data
        for event in self._input.feed(data):
            if isinstance(event, Beat):
                self._patience = event.patience
                self._heard = now
            else:
                yield event

    def silence(self, now: float) -> float | None:
        """The seconds it may be silent, when it has been for longer; only of one that beats."""
        if self._heard is None or now - self._heard <= self._patience:
            return None
        return self._patience
