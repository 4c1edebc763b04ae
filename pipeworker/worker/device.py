"""What a worker has of its host: a device, its memory and clock, a place for what is printed.

What a device needs beyond tensors (events now; streams and pinned memory where links use them)
belongs here.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from pipeworker.errors import RecordError, UsageError
from pipeworker.host import streams
from pipeworker.worker.internals import pytree


def redirect_output(path: Path) -> None:
    """Everything the worker prints, C code included, goes to its log, from where it is shown.

    Raises:
        RecordError: there can be none.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise RecordError(path, error) from None
    streams.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    streams.by_line()


def device_for(asked: str, local_rank: int) -> torch.device:
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise UsageError("--device cuda: torch sees no CUDA device on this host")
    if asked == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def peak_memory(device: torch.device) -> int:
    """Bytes: of the accelerator's allocator, or of the process on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def to_device(value: Any, device: torch.device) -> Any:
    """The value with its tensors on a device."""
    if device.type == "cpu":
        return value
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), value)


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
    if device.type == "cuda":
        event: Any = torch.cuda.Event
        return EventStopwatch(lambda: event(enable_timing=True))
    return HostStopwatch()
