"""Numbered messages arrive once and in order, whatever connections lose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ProtocolError
from pipeworker.wire import exchange
from pipeworker.wire.exchange import OUTSIDE, Exchange, numbered, taken_apart


class End:
    """One end: what it has received, and what is on its way to the other."""

    def __init__(self) -> None:
        self.exchange = Exchange()
        self.arrived: list[bytes] = []
        self.line: list[bytes | tuple[int, int, bool]] = []

    def beat(self, again: bool = False) -> None:
        self.line.append((self.exchange.sent, self.exchange.received, again))

    def take(self, item: bytes | tuple[int, int, bool]) -> None:
        if isinstance(item, bytes):
            number, frame = taken_apart(item)
            if self.exchange.receive(number):
                self.arrived.append(frame)
            return
        sent, received, again = item
        self.exchange.heard(received)
        if again:
            self.line += self.exchange.again()
        if self.exchange.lacks(sent):
            self.beat(again=True)


@given(st.lists(st.sampled_from(["say 0", "say 1", "pass 0", "pass 1", "beat", "cut"])))
def test_each_message_arrives_once_and_in_order(events: list[str]) -> None:
    ends = End(), End()
    said: tuple[list[bytes], list[bytes]] = [], []

    def passed(end: int) -> None:
        if ends[end].line:
            ends[1 - end].take(ends[end].line.pop(0))

    for count, event in enumerate([*events, "cut"]):
        what, _, which = event.partition(" ")
        if what == "say":
            said[int(which)].append(frame := b"%d" % count)
            ends[int(which)].line.append(ends[int(which)].exchange.send(frame))
        elif what == "pass":
            passed(int(which))
        elif what == "beat":
            for one in ends:
                one.beat()
        else:  # both directions lose what is under way
            for one in ends:
                one.line.clear()
        for end in (0, 1):
            assert ends[end].arrived == said[1 - end][: len(ends[end].arrived)]
    for _ in range(4):  # one to say what is missing, one to send it, one to say that it is there
        for one in ends:
            one.beat()
        while ends[0].line or ends[1].line:
            passed(0)
            passed(1)
    for end in (0, 1):
        assert ends[end].arrived == said[1 - end]
        assert ends[end].exchange.again() == []
        assert not ends[end].exchange.awaited


def test_what_stands_outside_is_taken_as_it_comes() -> None:
    end = Exchange()
    assert taken_apart(numbered(OUTSIDE, b"a ping")) == (OUTSIDE, b"a ping")
    assert end.receive(OUTSIDE)
    assert end.receive(OUTSIDE)
    assert end.received == 0


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 8])
def test_what_is_not_numbered_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        taken_apart(data)


def test_counts_that_cannot_be_change_nothing() -> None:
    end = Exchange()
    end.send(b"one")
    for received in (-5, 0):
        end.heard(received)
        assert len(end.again()) == 1
    end.heard(1 << 62)
    assert end.again() == []


def test_an_end_that_never_says_what_it_has_is_told_from_one_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "MOST_KEPT", 100)
    silent, listens = Exchange(), Exchange()
    for number in range(1, 10):
        for end in (silent, listens):
            end.send(bytes(20))
        listens.heard(number)
    assert silent.overfull
    assert not listens.overfull
    silent.heard(9)
    assert not silent.overfull
