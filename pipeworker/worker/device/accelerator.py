"""Accelerators: devices that compute asynchronously, in streams ordered by events.

Work of one stream is done in order; work of two streams is ordered only by an event that one stream
records and the other waits for. Layers compute in the current stream of the main thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import msgpack
import torch
from torch.distributed import is_nccl_available

from pipeworker.host import streams
from pipeworker.worker.device.nccl import Nccl
from pipeworker.worker.internals import map_storage, share_storage


class Signal(Protocol):
    """An event shared by two processes; a stream waits for its last record."""

    def record(self, stream: Any) -> None:
        """Record the event after all work submitted to the stream so far."""


class CudaIpc:
    """CUDA IPC, between processes on one device or on devices that reach each other's memory.

    A process maps what another one shares by a handle: bytes that are sent over a socket.

    Methods raise RuntimeError if a handle cannot be mapped.

    Attributes:
        kind: the type of handles: both processes must use the same.
    """

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def share(self, memory: torch.Tensor) -> bytes:
        """Return a handle of a tensor's whole storage, for one other process."""
        handle: bytes = msgpack.packb(share_storage(memory.untyped_storage()))
        return handle

    def map(self, handle: bytes) -> torch.Tensor:
        """Map a shared storage; return a uint8 tensor on this process's device."""
        # Device numbers may differ between processes: open the memory from this worker's device.
        storage = map_storage(self._device, msgpack.unpackb(handle, use_list=False))
        found = torch.empty(0, dtype=torch.uint8, device=self._device)
        return found.set_(storage)

    def signal(self) -> tuple[Signal, bytes]:
        """Create an event that this process records; return it and its handle."""
        with torch.cuda.device(self._device):  # the current device is per thread
            event: Any = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            return event, event.ipc_handle()

    def signal_of(self, handle: bytes) -> Signal:
        """Return the event of a handle, which another process records."""
        event: Signal = torch.cuda.Event.from_ipc_handle(self._device, handle)  # type: ignore
        return event


_cuda: Any = torch.cuda  # not all of it has types


class Event(Protocol):
    """A point in a stream, after all work submitted to it so far."""

    def query(self) -> bool:
        """Return whether the device has reached the point."""

    def synchronize(self) -> None:
        """Wait until the device has reached it; only in the send thread, or to read a number."""


class _Using:
    """A context in which the calling thread's work is submitted to a stream.

    That of torch.Stream cannot be entered by two threads, and that of torch.cuda takes 10 us.
    """

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_stream(self._stream.device_index)
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self._before)


class Accelerator:
    """A device by torch's device-independent interface.

    A device with a single stream (MPS) does all work in order.

    Attributes:
        mapping: the means by which other processes map its memory, if there are any.
        communicators: the means by which it transfers to devices of other hosts directly, if there
            are any.
        sends: stream of tensors that leave the device.
        receives: stream of tensors that arrive.
        offloads: stream of offloaded tensors.
        snapshots: stream of copies of the state that are made while a step runs.
    """

    mapping: CudaIpc | None = None
    communicators: Nccl | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._arriving: set[int] = set()
        self.sends = self.receives = self.offloads = self.snapshots = self.current
        with suppress(RuntimeError):
            own = (self._stream() for _ in range(4))
            self.sends, self.receives, self.offloads, self.snapshots = own

    def _stream(self) -> Any:
        return torch.Stream(self.device)

    @property
    def current(self) -> Any:
        """The calling thread's current stream, where layers compute."""
        return torch.accelerator.current_stream(self.device)

    def using(self, stream: Any) -> AbstractContextManager[object]:
        """Submit the calling thread's work inside the context to this stream."""
        return _Using(stream)

    def event(self, stream: Any) -> Event:
        """Record an event after the work submitted to a stream so far."""
        event = torch.Event(self.device, blocking=True)  # a waiting thread sleeps
        event.record(stream)
        return event

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is in the device's memory."""
        return tensor.device.type == self.device.type

    def empty(self, count: int) -> torch.Tensor:
        """Allocate a uint8 tensor of shape [count] on the device, for the current stream."""
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def arriving(self, memory: torch.Tensor) -> torch.Tensor:
        """Note that another device writes into memory, and return it."""
        storage = memory.untyped_storage()
        address = storage.data_ptr()
        self._arriving.add(address)
        weakref.finalize(storage, self._arriving.discard, address).atexit = False
        return memory

    def is_arrived(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in memory that another device writes into."""
        return tensor.untyped_storage().data_ptr() in self._arriving

    def used(self, tensor: torch.Tensor, stream: Any) -> None:
        """Record that a stream uses a tensor allocated for another one.

        Its memory is reused after the work submitted to that stream until the last reference goes.
        """
        tensor.record_stream(stream)

    def pinned(self, count: int) -> torch.Tensor:
        """Allocate a uint8 tensor of shape [count] in pinned host memory.

        After the last reference is gone, its memory is reused once pending copies are done.
        """
        return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)

    def pin(self, address: int, size: int) -> Callable[[], None] | None:
        """Pin memory of the host; return a function that unpins it, or None if that fails."""
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in the current stream, between pinned memory and the device."""
        target.copy_(source, non_blocking=True)


class CudaAccelerator(Accelerator):
    """A CUDA device by torch.cuda's own classes, which events between processes require."""

    def __init__(self, device: torch.device) -> None:
        self._streams: dict[int, Any] = {}
        super().__init__(device)
        self.mapping = CudaIpc(device)
        self.communicators = Nccl(device) if is_nccl_available() else None

    def _stream(self) -> Any:
        return _cuda.Stream(self.device)

    @property
    def current(self) -> Any:
        # torch.cuda.current_stream takes ten times as long, and this is called for each tensor.
        number = torch.accelerator.current_stream(self.device.index).stream_id
        found = self._streams.get(number)
        if found is None:
            found = self._streams[number] = torch.cuda.current_stream(self.device)
        return found

    def event(self, stream: Any) -> Event:
        event: Event = _cuda.Event(blocking=True)
        stream.record_event(event)
        return event

    def pin(self, address: int, size: int) -> Callable[[], None] | None:
        runtime = _cuda.cudart()
        if int(runtime.cudaHostRegister(address, size, 0)):
            streams.note("warning: shared memory cannot be pinned; copies from it take longer")
            return None
        return lambda: runtime.cudaHostUnregister(address)


def accelerator_for(device: torch.device) -> Accelerator | None:
    """Return the accelerator of a device; None for the CPU, where calls are synchronous."""
    if device.type == "cpu":
        return None
    return CudaAccelerator(device) if device.type == "cuda" else Accelerator(device)
