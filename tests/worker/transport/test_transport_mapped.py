"""Lanes between devices that map each other's memory: what the other process may not report."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import torch

from pipeworker.errors import PeerLost, ProtocolError
from pipeworker.worker.transport.links.mapped import ReceivingLane, SendingLane
from support.devices.mapped import MappedDevice, PosixMapping
from support.in_process.transport import FORTH

Sockets = tuple[socket.socket, socket.socket]


@pytest.fixture
def device() -> Iterator[MappedDevice]:
    made = MappedDevice()
    with made.active():
        yield made
    made.stop()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, other


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ((0, 0, 8), "posted 8 bytes at 0 of buffer 0"),
        ((0, 4, 8, "memory", "event"), "posted 8 bytes at 4 of buffer 0"),
        ((0, -4, 8, "memory", "event"), "not a posted buffer"),
        ((0, 0, 8, b"no memory", "event"), "posted memory that cannot be mapped"),
        ((0, 0, 8, "memory", b"no event"), "posted memory that cannot be mapped"),
    ],
    ids=["unknown", "too long", "before its begin", "no memory", "no event"],
)
def test_the_sender_writes_only_into_memory_that_it_maps(
    sockets: Sockets, device: MappedDevice, record: tuple[Any, ...], message: str
) -> None:
    mapping = PosixMapping(device)
    source = SendingLane(FORTH, sockets[0], device, mapping)
    memory, (signal, event) = device.empty(8), mapping.signal()
    handles = {"memory": mapping.share(memory), "event": event}
    sockets[1].send(msgpack.packb([handles.get(field, field) for field in record]))
    with pytest.raises(ProtocolError, match=message):
        source.send(device.put(torch.ones(2)), 0)
    source.close()
    del signal  # until here: the handle of a freed event cannot be opened


@pytest.mark.parametrize(
    ("notice", "message"),
    [((1, b""), "buffer 1 was not posted"), ((0, b""), "buffer 0 has no event")],
)
def test_the_receiver_waits_only_for_buffers_that_it_has_posted(
    sockets: Sockets, device: MappedDevice, notice: tuple[int, bytes], message: str
) -> None:
    target = ReceivingLane(FORTH, sockets[0], device, PosixMapping(device))
    (pending,) = target.receive([target.allocate(8)], 0)
    sockets[1].send(msgpack.packb(notice))
    with pytest.raises(ProtocolError, match=f"0>1/activation: {message}"):
        pending.wait()


def test_an_end_that_is_gone_is_a_lost_peer(sockets: Sockets, device: MappedDevice) -> None:
    target = ReceivingLane(FORTH, sockets[0], device, PosixMapping(device))
    (pending,) = target.receive([target.allocate(8)], 0)
    sockets[1].close()
    with pytest.raises(PeerLost, match="0>1/activation closed"):
        pending.wait()
    with pytest.raises(PeerLost, match="0>1/activation closed"):
        target.receive([target.allocate(8)], 0)
