"""Stopwatches: how long a device computes, by the host's clock or by events in its stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch


class Stopwatch(Protocol):
    """Tells how long a device computes."""

    @property
    def mark(self) -> Callable[[], Any]:
        """Gives a mark in the device's time, at each start and at each stop."""

    def seconds(self, marks: Sequence[Any]) -> float:
        """Between starts and stops, in turn; waits for what the device has not done yet."""


class HostStopwatch:
    """On the CPU, where a call returns when it is done."""

    mark = staticmethod(perf_counter)

    def seconds(self, marks: Sequence[float]) -> float:
        return sum(marks[1::2], 0.0) - sum(marks[::2], 0.0)


class EventStopwatch:
    """On a device that works while the host goes on: by events in its stream.

    Args:
        event: makes an event that can be recorded, waited for, and asked for the milliseconds to
            another.
    """

    def __init__(self, event: Any) -> None:
        self._event = event
        self._free: list[Any] = []

    def mark(self) -> Any:
        event = self._free.pop() if self._free else self._event()
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> float:
        if marks:
            marks[-1].synchronize()
        pairs = zip(marks[::2], marks[1::2], strict=True)
        milliseconds: float = sum((began.elapsed_time(ended) for began, ended in pairs), 0.0)
        self._free += marks
        return milliseconds / 1e3


def stopwatch_for(device: torch.device) -> Stopwatch:
    """One that measures on this device."""
    if device.type == "cpu":
        return HostStopwatch()
    return EventStopwatch(lambda: torch.Event(device, enable_timing=True))
