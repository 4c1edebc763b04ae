"""Memory of a device that another process on the host maps, and events that it sees.

What one process shares another maps by a handle, which is bytes and passes over a socket.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgpack
import torch

from pipeworker.worker.internals import map_storage, share_storage


class Signal(Protocol):
    """An event of two processes; a stream waits for what was recorded last."""

    def record(self, stream: Any) -> None:
        """Behind all that the stream was given so far."""


class Mapping(Protocol):
    """How memory and events are shared. Who cannot map what a handle says raises RuntimeError."""

    @property
    def kind(self) -> str:
        """Of whose handles this one understands."""

    def share(self, memory: torch.Tensor) -> bytes:
        """A handle of the whole storage of a tensor, for one other process."""

    def map(self, handle: bytes) -> torch.Tensor:
        """Its bytes, as memory of the device here."""

    def signal(self) -> tuple[Signal, bytes]:
        """A new one, recorded by this process; and its handle."""

    def signal_of(self, handle: bytes) -> Signal:
        """One that another process records."""


class CudaMapping:
    """By CUDA's own means: peers on one device, or on devices that reach each other's memory."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def share(self, memory: torch.Tensor) -> bytes:
        handle: bytes = msgpack.packb(share_storage(memory.untyped_storage()))
        return handle

    def map(self, handle: bytes) -> torch.Tensor:
        # The number that a device has there may be another's here: its memory is reached from ours.
        storage = map_storage(self._device, msgpack.unpackb(handle, use_list=False))
        found = torch.empty(0, dtype=torch.uint8, device=self._device)
        return found.set_(storage)

    def signal(self) -> tuple[Signal, bytes]:
        with torch.cuda.device(self._device):  # of the thread that asks
            event: Any = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            return event, event.ipc_handle()

    def signal_of(self, handle: bytes) -> Signal:
        event: Signal = torch.cuda.Event.from_ipc_handle(self._device, handle)  # type: ignore
        return event
