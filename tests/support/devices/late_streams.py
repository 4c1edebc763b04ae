"""Streams and events of a device that executes work late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.devices.device import LateDevice


@dataclass(eq=False)
class LateStream:
    """A queue of calls to execute in order, and of events to wait for."""

    name: str
    device: LateDevice
    submitted: int = 0
    done: int = 0
    queue: deque[Callable[[], object] | LateEvent] = field(default_factory=deque)

    def submit(self, work: Callable[[], object] | LateEvent) -> None:
        self.queue.append(work)
        self.submitted += 1

    def wait_event(self, event: Any) -> None:
        if f"{event.stream.name}>{self.name}" != self.device.without:
            self.device.submit(self, event.now())


@dataclass(eq=False)
class LateEvent:
    """A position in a stream."""

    stream: LateStream
    place: int

    def record(self, stream: Any) -> None:
        self.stream, self.place = stream, stream.submitted

    @property
    def reached(self) -> bool:
        return self.stream.done >= self.place

    def now(self) -> LateEvent:
        return self

    @property
    def _ignored(self) -> bool:
        return f"{self.stream.name}>host" == self.stream.device.without

    def query(self) -> bool:
        return self._ignored or self.reached

    def synchronize(self) -> None:
        if not self._ignored:
            self.stream.device.run_until(self)
