"""What one host's memory has, and another one's worker needs."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator

import pytest

from pipeworker.record.memory import Memory
from pipeworker.worker.transport import proof
from pipeworker.worker.transport.memories import (
    Lender,
    Mirror,
    Pantry,
    _credentials,
    _proven,
    borrow,
)
from pipeworker.worker.transport.network import Network
from pipeworker.worker.transport.proof import Left, Membership
from support.transport import ENDPOINT, MEMBERSHIP, Meeting


@pytest.fixture(params=["gloo", "tls"])
def network(request: pytest.FixtureRequest) -> Network:
    return Network(ENDPOINT, request.param)


@pytest.fixture
def memories() -> Iterator[dict[int, list[Memory]]]:
    """Of two ranks, with two slots each; a file is larger than what passes at once."""
    made = {rank: [Memory(), Memory()] for rank in (3, 5)}
    for rank, slots in made.items():
        for slot, memory in enumerate(slots):
            memory.put(0, bytes([rank, slot]) * 700_000)
            memory.put(1, b"")
            memory.put(2, f"{rank}/{slot}".encode())
    yield made
    for slots in made.values():
        for memory in slots:
            memory.close()


def test_what_is_lent_arrives_as_it_is(network: Network, memories: dict[int, list[Memory]]) -> None:
    meeting, before = Meeting(), threading.active_count()
    lender = Lender(memories, [3, 5], meeting.store(), network, MEMBERSHIP)
    for rank, slot in ((5, 1), (3, 0), (3, 1)):
        taken = borrow(rank, slot, meeting.store(), network, MEMBERSHIP)
        kept = memories[rank][slot]
        assert [p.read_bytes() for p in taken.paths] == [p.read_bytes() for p in kept.paths]
        taken.close()
    lender.close()
    assert threading.active_count() == before


def test_a_neighbour_keeps_what_is_whole(
    network: Network, memories: dict[int, list[Memory]]
) -> None:
    meeting, before = Meeting(), threading.active_count()
    kept = {rank: [Memory(), Memory()] for rank in memories}
    pantry = Pantry(kept, meeting.store(), network, MEMBERSHIP)
    mirrors = {rank: Mirror(rank, meeting.store(), network, MEMBERSHIP) for rank in memories}
    for step in (7, 8):
        for rank, slots in memories.items():
            slots[step % 2].put(0, bytes([rank, step]) * (step * 100_000))
            slots[step % 2].put(2, json.dumps({"step": step, "rank": rank}).encode())
            assert mirrors[rank].keep(step % 2, slots[step % 2], step)
    for rank, slots in memories.items():
        for mine, theirs in zip(slots, kept[rank], strict=True):
            assert [p.read_bytes() for p in mine.paths] == [p.read_bytes() for p in theirs.paths]
    memories[3][0].put(2, b"")  # it is used again while it is sent
    assert not mirrors[3].keep(0, memories[3][0], 8)
    assert kept[3][0].paths[2].read_bytes() == b""
    assert mirrors[5].keep(0, memories[5][0], 8)
    pantry.close()
    assert not mirrors[5].keep(0, memories[5][0], 8)
    for mirror in mirrors.values():
        mirror.close()
    assert threading.active_count() == before
    for slots in kept.values():
        for memory in slots:
            memory.close()


def test_who_is_of_another_generation_gets_nothing(
    network: Network,
    memories: dict[int, list[Memory]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    meeting = Meeting()
    lender = Lender(memories, [3], meeting.store(), network, MEMBERSHIP)
    old = Membership(MEMBERSHIP.token, MEMBERSHIP.generation + 1)
    host, port = meeting.store().get("memory/3").decode().split()
    until = time.monotonic() + 20
    connection = socket.create_connection((host, int(port)), timeout=20)
    steps = _proven(connection, old.memory_key(), _credentials(network, old), sends=True)
    with pytest.raises((Left, ConnectionError, ssl.SSLEOFError)):
        proof.finish(steps, connection, until)
    said = ""
    while "the channel of copies of the state: somebody who is not the peer" not in said:
        said += capfd.readouterr().err  # as soon as the lender comes to say so
        assert time.monotonic() < until
    taken = borrow(3, 0, meeting.store(), network, MEMBERSHIP)
    assert taken.size == memories[3][0].size
    taken.close()
    lender.close()
