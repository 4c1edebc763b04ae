"""The device that a worker computes on, its peak memory and its stopwatch."""

from __future__ import annotations

import os
import pickle
import resource
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pipeworker.errors import UsageError
from pipeworker.record.files.atomic_file import write_bytes
from pipeworker.worker.internals import allocator_snapshot, map_tensor_leaves

STATM, _PAGE = "/proc/self/statm", resource.getpagesize()


def accelerator_type() -> str:
    """Return the type of the accelerators that torch sees, as ``cuda``; "" if there are none."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return current.type if current is not None and torch.accelerator.device_count() else ""


def device_for(requested: str, local_rank: int) -> torch.device:
    """Choose the device of a worker and make it the current one; few devices are shared.

    `requested` is ``auto``, ``cpu``, or a device type of torch.
    """
    kind = accelerator_type()
    if requested not in ("auto", "cpu", kind):
        instead = f"it sees {kind}, which --device auto uses" if kind else "see pipeworker env"
        raise UsageError(
            f"--device {requested}: torch sees no {requested.upper()} device on this host; "
            f"{instead}"
        )
    if requested == "cpu" or not kind:
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def unit_of(device: torch.device) -> str:
    """Return an identifier of a device on its host, the same in all processes; "" for the CPU."""
    if device.type == "cpu":
        return ""
    index = device.index or 0
    properties = getattr(torch.get_device_module(device.type), "get_device_properties", None)
    uuid: Any = getattr(properties(index), "uuid", None) if properties else None
    return f"{device.type}:{index}" if uuid is None else str(uuid)


def peak_memory(device: torch.device) -> int:
    """Return peak memory in bytes: of the accelerator's allocator, else of the process."""
    allocated = getattr(torch.get_device_module(device.type), "max_memory_allocated", None)
    if allocated is not None:
        return int(allocated(device))
    return peak_resident()


def used_memory(device: torch.device) -> int:
    """Return the present memory in bytes: of the accelerator's allocator, else of the process."""
    with closing(MemoryGauge(device)) as gauge:
        return gauge()


class MemoryGauge:
    """A reader of the present memory in bytes: of a device's allocator, else of the process.

    On the CPU a call takes a microsecond or two; torch takes longer to ask an allocator.
    """

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device.type)
        self._allocated = getattr(module, "memory_allocated", None)
        self._device, self._file = device, -1
        if self._allocated is None:
            with suppress(OSError):  # no descriptor is left
                self._file = os.open(STATM, os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> int:
        if self._allocated is not None:
            return int(self._allocated(self._device))
        if self._file < 0:
            return peak_resident()
        return int(os.pread(self._file, 64, 0).split(None, 2)[1]) * _PAGE

    def close(self) -> None:
        """Close the file of the system that it reads."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def write_allocator_snapshot(device: torch.device, path: Path) -> bool:
    """Write the state of a device's allocator to a file; return False if the device has none.

    https://pytorch.org/memory_viz shows such a file.

    Raises:
        OSError: the file cannot be written.
    """
    snapshot = allocator_snapshot(device)
    if snapshot is None:
        return False
    write_bytes(path, pickle.dumps(snapshot))
    return True


def peak_resident() -> int:
    """Return the peak of this process's resident bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def to_device(value: Any, device: torch.device) -> Any:
    """Copy the tensors of a nested value to a device."""
    if device.type == "cpu":
        return value
    return map_tensor_leaves(lambda t: t.to(device, non_blocking=True), value)


class Stopwatch:
    """A stopwatch for the CPU, where calls are synchronous."""

    mark: Callable[[], Any] = staticmethod(perf_counter)
    """To be called at each start and each stop; returns a mark."""

    def seconds(self, marks: Sequence[Any]) -> float:
        """Return the seconds between each start and its stop, added up; wait for the device.

        `marks` are those of starts and stops, alternating.
        """
        return sum(marks[1::2], 0.0) - sum(marks[::2], 0.0)


class EventStopwatch(Stopwatch):
    """A stopwatch for an asynchronous device; `event` creates an event with timing."""

    def __init__(self, event: Callable[[], Any]) -> None:
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
        milliseconds: float = sum((start.elapsed_time(stop) for start, stop in pairs), 0.0)
        self._free += marks
        return milliseconds / 1e3

    def offsets(self, marks: Sequence[Any]) -> list[float]:
        """Return the seconds from the first mark to each, and wait for the device."""
        marks[-1].synchronize()
        found = [marks[0].elapsed_time(mark) / 1e3 for mark in marks]
        self._free += marks
        return found


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Return a stopwatch for a device."""
    if device.type == "cpu":
        return Stopwatch()
    return EventStopwatch(lambda: torch.Event(device, enable_timing=True))
