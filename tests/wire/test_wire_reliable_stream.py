"""Numbered messages arrive once and in order, although connections lose some."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ProtocolError
from pipeworker.wire import reliable_stream
from pipeworker.wire.reliable_stream import UNNUMBERED, ReliableStream, pack, unpack


class End:
    """One end: the messages it has received, and those in transit to the other end."""

    def __init__(self) -> None:
        self.exchange = ReliableStream()
        self.arrived: list[bytes] = []
        self.line: list[bytes | tuple[int, int, bool]] = []

    def beat(self, resend: bool = False) -> None:
        self.line.append((self.exchange.sent, self.exchange.received, resend))

    def receive(self, item: bytes | tuple[int, int, bool]) -> None:
        if isinstance(item, bytes):
            number, frame = unpack(item)
            if self.exchange.accept(number):
                self.arrived.append(frame)
            return
        sent, received, resend = item
        self.exchange.acknowledge(received)
        if resend:
            self.line += self.exchange.unacknowledged()
        if self.exchange.is_missing(sent):
            self.beat(resend=True)


@given(st.lists(st.sampled_from(["send 0", "send 1", "pass 0", "pass 1", "beat", "cut"])))
def test_each_message_arrives_once_and_in_order(events: list[str]) -> None:
    ends = End(), End()
    sent: tuple[list[bytes], list[bytes]] = [], []

    def passed(end: int) -> None:
        if ends[end].line:
            ends[1 - end].receive(ends[end].line.pop(0))

    for count, event in enumerate([*events, "cut"]):
        what, _, which = event.partition(" ")
        if what == "send":
            sent[int(which)].append(frame := b"%d" % count)
            ends[int(which)].line.append(ends[int(which)].exchange.sequence(frame))
        elif what == "pass":
            passed(int(which))
        elif what == "beat":
            for one in ends:
                one.beat()
        else:  # both directions lose the messages in transit
            for one in ends:
                one.line.clear()
        for end in (0, 1):
            assert ends[end].arrived == sent[1 - end][: len(ends[end].arrived)]
    for _ in range(4):  # to report missing messages, to send them again, and to acknowledge them
        for one in ends:
            one.beat()
        while ends[0].line or ends[1].line:
            passed(0)
            passed(1)
    for end in (0, 1):
        assert ends[end].arrived == sent[1 - end]
        assert ends[end].exchange.unacknowledged() == []
        assert not ends[end].exchange.is_pending


def test_an_unnumbered_message_is_always_accepted() -> None:
    end = ReliableStream()
    assert unpack(pack(UNNUMBERED, b"a ping")) == (UNNUMBERED, b"a ping")
    assert end.accept(UNNUMBERED)
    assert end.accept(UNNUMBERED)
    assert end.received == 0


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 8])
def test_data_without_a_number_is_rejected(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(data)


def test_invalid_acknowledgements_change_nothing() -> None:
    end = ReliableStream()
    end.sequence(b"one")
    for received in (-5, 0):
        end.acknowledge(received)
        assert len(end.unacknowledged()) == 1
    end.acknowledge(1 << 62)
    assert end.unacknowledged() == []


def test_an_end_that_acknowledges_nothing_is_not_waited_for() -> None:
    end = ReliableStream()
    end.sequence(b"one")
    end.acknowledge(0)
    assert not end.is_pending
    end.acknowledge(1)
    end.sequence(b"two")
    assert end.is_pending


def test_a_stream_that_is_never_acknowledged_is_overfull(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reliable_stream, "MAX_UNACKNOWLEDGED", 100)
    silent, listens = ReliableStream(), ReliableStream()
    for number in range(1, 10):
        for end in (silent, listens):
            end.sequence(bytes(20))
        listens.acknowledge(number)
    assert silent.is_overfull
    assert not listens.is_overfull
    silent.acknowledge(9)
    assert not silent.is_overfull
