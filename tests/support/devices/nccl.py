"""A substitute for NCCL on a late device: one stream a group, and bytes that pass in order.

Like NCCL it accepts only bytes, has no tags, and works on the device. It fails where NCCL would mix
up messages.
"""

from __future__ import annotations

import uuid
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeworker.worker.device.nccl import Nccl
from pipeworker.worker.internals import Store
from support.devices.device import LateDevice
from support.devices.late_streams import LateEvent, LateStream
from support.devices.mapped import MappedDevice

_WIRES: dict[bytes, deque[bytes]] = defaultdict(deque)


@dataclass(eq=False)
class _Arrived(LateEvent):
    """The event that a message has been sent."""

    wire: deque[bytes]

    @property
    def reached(self) -> bool:
        return bool(self.wire)


@dataclass
class _LateWork:
    device: LateDevice
    done: LateEvent

    def wait(self) -> None:
        self.device.current.wait_event(self.done)


class LateGroup:
    """One end of a group."""

    def __init__(self, device: LateDevice, wire: deque[bytes]) -> None:
        self._device, self._wire = device, wire
        self._stream = device.stream("nccl")
        self._remote = LateStream("wire", LateDevice())
        self.aborted = False

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _LateWork:
        assert (rank, tag) == (1, 0)
        bare, kept = self._submitted(tensors)

        def leave(kept: Any = kept) -> None:
            self._wire.append(bare.numpy().tobytes())

        return self._do(leave)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _LateWork:
        assert (rank, tag) == (0, 0)
        bare, kept = self._submitted(tensors)

        def arrive(kept: Any = kept) -> None:
            data = self._wire.popleft()
            assert len(data) == bare.numel(), "messages of other sizes meet"
            bare.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

        self._device.submit(self._stream, _Arrived(self._remote, 0, self._wire))
        return self._do(arrive)

    def abort(self) -> None:
        self.aborted = True

    def _submitted(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Wait for the current stream; return the bytes, and an object that keeps them."""
        (tensor,) = tensors
        assert tensor.dtype is torch.uint8
        assert tensor.is_contiguous()
        assert not self.aborted
        device = self._device
        self._stream.wait_event(device.event(device.current))
        device.used(tensor, self._stream)
        return device.bare(tensor)

    def _do(self, work: Any) -> _LateWork:
        self._device.submit(self._stream, work)
        return _LateWork(self._device, self._device.event(self._stream))


class LateCommunicators(Nccl):
    """Groups whose ends meet at a store, by a name that rank 0 makes."""

    def __init__(self, device: LateDevice, unit: str) -> None:
        self._late, self.unit = device, unit
        self.groups: list[LateGroup] = []
        self.interfaces: list[str] = []

    def group(self, store: Store, rank: int, interface: str) -> LateGroup:
        if rank == 0:
            store.set("name", uuid.uuid4().hex)
        self.groups.append(LateGroup(self._late, _WIRES[store.get("name")]))
        self.interfaces.append(interface)
        return self.groups[-1]


class NcclDevice(MappedDevice):
    """A device with communicators."""

    def __init__(self, eager: Sequence[str] = (), without: str = "", unit: str = "") -> None:
        super().__init__(eager, without)
        self.made = self.communicators = LateCommunicators(self, unit or uuid.uuid4().hex)
