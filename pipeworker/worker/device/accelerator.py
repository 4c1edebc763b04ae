"""A device that works on while the host goes on: in streams, and events say in which order.

What is given to one stream is done in turn; between streams nothing is ordered but by an event that
one records and another waits for. A worker has four: the one where its layers compute, which is
the current one of its main thread, and one each for what leaves the device and for what arrives.
So a micro-batch travels while the next one computes, in both directions. What waits in the host's
memory for its backward goes there and comes back in a fourth.

The tests have a device of this interface that does its work late and in any order, so that a wait
that is missing gives wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch

from pipeworker.host import streams
from pipeworker.worker.device.mapping import CudaMapping, Mapping
from pipeworker.worker.device.nccl import Communicators, Nccl
from pipeworker.worker.internals import has_nccl

_cuda: Any = torch.cuda  # not all of it has types


class Event(Protocol):
    """A place in a stream: behind all that it was given so far."""

    def query(self) -> bool:
        """Whether the device has come there."""

    def synchronize(self) -> None:
        """Wait until it has. Only the courier may, or where a number is read."""


class Stream(Protocol):
    """Work that is done in turn."""

    def wait_event(self, event: Any) -> None:
        """What is given to the stream from now on is done behind the event."""


class Accelerator(Protocol):
    """See the module."""

    @property
    def device(self) -> torch.device:
        """What its tensors say they are on."""

    @property
    def mapping(self) -> Mapping | None:
        """How other processes reach its memory, if they can."""

    @property
    def communicators(self) -> Communicators | None:
        """How it reaches devices of other hosts by itself, if it can."""

    @property
    def sends(self) -> Stream:
        """For what leaves the device."""

    @property
    def receives(self) -> Stream:
        """For what arrives."""

    @property
    def aside(self) -> Stream:
        """For what waits in the host's memory meanwhile."""

    @property
    def current(self) -> Stream:
        """Of the calling thread: where layers compute."""

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """What the calling thread gives the device within goes to this stream."""

    def event(self, stream: Stream) -> Event:
        """Where a stream is now."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is the device's."""

    def empty(self, count: int) -> torch.Tensor:
        """So many bytes of the device. When they are free, the current stream may use them."""

    def used(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Another stream than that of its memory uses a tensor: it is free behind what that has
        been given by the time nothing refers to it."""

    def pinned(self, count: int) -> torch.Tensor:
        """So many bytes of the host that the device copies to and from by itself.

        When nothing refers to them they are used again, behind the copies.
        """

    def pin(self, address: int, size: int) -> Callable[[], None] | None:
        """Have memory of the host be so; returns what undoes it, or None where it cannot be."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """In the current stream, between pinned memory and the device."""


class TorchAccelerator:
    """By torch's names for any accelerator.

    One that has a single stream (MPS) does all in turn.
    """

    mapping: Mapping | None = None
    communicators: Communicators | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sends = self.receives = self.aside = self.current
        with suppress(RuntimeError):
            self.sends, self.receives, self.aside = (self._stream() for _ in range(3))

    def _stream(self) -> Any:
        return torch.Stream(self.device)

    @property
    def current(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def using(self, stream: Any) -> AbstractContextManager[object]:
        within: AbstractContextManager[object] = stream
        return within

    def event(self, stream: Any) -> Event:
        event = torch.Event(self.device, blocking=True)  # who waits for it leaves the core
        event.record(stream)
        return event

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type

    def empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def used(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def pinned(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def pin(self, address: int, size: int) -> Callable[[], None] | None:
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)


class CudaAccelerator(TorchAccelerator):
    """By CUDA's own names: events of two processes are of these, and the two kinds do not mix."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.mapping = CudaMapping(device)
        self.communicators = Nccl(device) if has_nccl() else None

    def _stream(self) -> Any:
        return _cuda.Stream(self.device)

    @property
    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def using(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def event(self, stream: Any) -> Event:
        event: Event = _cuda.Event(blocking=True)
        stream.record_event(event)
        return event

    def pin(self, address: int, size: int) -> Callable[[], None] | None:
        runtime = _cuda.cudart()
        if int(runtime.cudaHostRegister(address, size, 0)):
            streams.note("warning: shared memory cannot be pinned, so copies from it take longer")
            return None
        return lambda: runtime.cudaHostUnregister(address)


def accelerator_for(device: torch.device) -> Accelerator | None:
    """None on the CPU, where a call returns when it is done."""
    if device.type == "cpu":
        return None
    return CudaAccelerator(device) if device.type == "cuda" else TorchAccelerator(device)
