"""What stands for NCCL on a device that works late: a stream a group, and bytes that pass in turn.

As NCCL it takes bytes alone, knows no tags, and does on the device what it is given. Where NCCL
would mix up messages this fails.
"""

from __future__ import annotations

import uuid
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeworker.worker.device.nccl import Communicators
from pipeworker.worker.internals import Store
from support.device import LateDevice, LateEvent, LateStream
from support.mapped import MappedDevice

_WIRES: dict[bytes, deque[bytes]] = defaultdict(deque)


@dataclass(eq=False)
class _Arrived(LateEvent):
    """There is a message that was sent."""

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
    """An end; see the module."""

    def __init__(self, device: LateDevice, wire: deque[bytes]) -> None:
        self._device, self._wire = device, wire
        self._stream = device.stream("nccl")
        self._theirs = LateStream("wire", LateDevice())
        self.aborted = False

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _LateWork:
        assert (rank, tag) == (1, 0)
        bare, kept = self._given(tensors)

        def leave(kept: Any = kept) -> None:
            self._wire.append(bare.numpy().tobytes())

        return self._do(leave)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _LateWork:
        assert (rank, tag) == (0, 0)
        bare, kept = self._given(tensors)

        def arrive(kept: Any = kept) -> None:
            data = self._wire.popleft()
            assert len(data) == bare.numel(), "messages of other sizes meet"
            bare.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

        self._device.give(self._stream, _Arrived(self._theirs, 0, self._wire))
        return self._do(arrive)

    def abort(self) -> None:
        self.aborted = True

    def _given(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Behind what the current stream has been given; and its memory stays until it is used."""
        (tensor,) = tensors
        assert tensor.dtype is torch.uint8
        assert tensor.is_contiguous()
        assert not self.aborted
        device = self._device
        self._stream.wait_event(device.event(device.current))
        device.used(tensor, self._stream)
        return device.bare(tensor)

    def _do(self, work: Any) -> _LateWork:
        self._device.give(self._stream, work)
        return _LateWork(self._device, self._device.event(self._stream))


class LateCommunicators:
    """Groups that meet at the store they are given, by a name that the first makes."""

    def __init__(self, device: LateDevice, unit: str) -> None:
        self._device, self.unit = device, unit
        self.groups: list[LateGroup] = []
        self.interfaces: list[str] = []

    def group(self, store: Store, rank: int, interface: str) -> LateGroup:
        if rank == 0:
            store.set("name", uuid.uuid4().hex)
        self.groups.append(LateGroup(self._device, _WIRES[store.get("name")]))
        self.interfaces.append(interface)
        return self.groups[-1]


class NcclDevice(MappedDevice):
    """A device with communicators."""

    def __init__(self, eager: Sequence[str] = (), without: str = "", unit: str = "") -> None:
        super().__init__(eager, without)
        self.made = LateCommunicators(self, unit or uuid.uuid4().hex)

    @property
    def communicators(self) -> Communicators:
        return self.made
