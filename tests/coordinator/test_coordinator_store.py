"""The key-value store: its operations, and when each is answered."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.coordinator.store import MAX_BYTES, KeyValueStore, Reply
from pipeworker.errors import ProtocolError
from pipeworker.wire.codec import encode
from pipeworker.wire.messages.store import StoreOperation, StoreReply, StoreRequest

GET, SET, CHECK = StoreOperation.GET, StoreOperation.SET, StoreOperation.CHECK


class Store:
    """A store whose requests are numbered."""

    def __init__(self) -> None:
        self.rendezvous = KeyValueStore()
        self.numbers = itertools.count(1)

    def request(
        self,
        operation: StoreOperation,
        *keys: str,
        value: bytes = b"",
        peer: bytes = b"a",
    ) -> list[Reply]:
        request = StoreRequest(0, next(self.numbers), operation, keys, value)
        return self.rendezvous.handle(peer, request)

    def reply(self, operation: StoreOperation, *keys: str, **more: bytes) -> StoreReply:
        """Return the reply of an operation that is answered at once and alone."""
        ((peer, reply),) = self.request(operation, *keys, **more)
        assert peer == more.get("peer", b"a")
        return reply


@pytest.fixture
def store() -> Store:
    return Store()


def test_get_returns_what_was_set(store: Store) -> None:
    assert store.reply(SET, "k", value=b"\0v") == StoreReply(1)
    assert store.reply(GET, "k", peer=b"b") == StoreReply(2, (b"\0v",))
    store.reply(SET, "k", value=b"w")
    assert store.reply(GET, "k").values == (b"w",)


def test_get_is_answered_when_the_key_is_set(store: Store) -> None:
    assert store.request(GET, "k", peer=b"b") == []
    assert store.request(SET, "other", value=b"x") == [(b"a", StoreReply(2))]
    assert store.request(SET, "k", value=b"v") == [
        (b"a", StoreReply(3)),
        (b"b", StoreReply(1, (b"v",))),
    ]
    assert store.request(SET, "k", value=b"w") == [(b"a", StoreReply(4))]  # answered once


def test_wait_needs_every_key(store: Store) -> None:
    """torch's wait() is a GET of several keys."""
    assert store.request(GET, "one", "two", peer=b"b") == []
    assert len(store.request(SET, "two", value=b"2")) == 1
    assert store.request(SET, "one", value=b"1")[1:] == [(b"b", StoreReply(1, (b"1", b"2")))]
    assert store.reply(GET).values == ()


def test_every_waiting_request_is_answered(store: Store) -> None:
    for peer in (b"b", b"c", b"b"):  # b requests twice
        assert store.request(GET, "k", peer=peer) == []
    assert store.request(SET, "k", value=b"5")[1:] == [
        (peer, StoreReply(number, (b"5",))) for peer, number in ((b"b", 1), (b"c", 2), (b"b", 3))
    ]


def test_check(store: Store) -> None:
    store.reply(SET, "one", value=b"")
    assert store.reply(CHECK, "one").present
    assert not store.reply(CHECK, "one", "two").present
    store.reply(SET, "two", value=b"")
    assert store.reply(CHECK, "one", "two").present


requests = st.builds(
    StoreRequest,
    rank=st.just(0),
    number=st.integers(0, 99),
    operation=st.sampled_from(StoreOperation),
    keys=st.lists(st.sampled_from("abc"), max_size=3).map(tuple),
    value=st.binary(max_size=3),
)


@given(st.lists(st.tuples(st.sampled_from([b"p", b"q"]), requests), max_size=12))
def test_each_request_is_answered_at_most_once(history: list[tuple[bytes, StoreRequest]]) -> None:
    """For any requests, only ProtocolError is raised and every reply can be sent."""
    rendezvous = KeyValueStore()
    answered: list[tuple[bytes, int]] = []
    for number, (peer, request) in enumerate(history):
        numbered = StoreRequest(0, number, *(getattr(request, f) for f in request.__slots__[2:]))
        try:
            answers = rendezvous.handle(peer, numbered)
        except ProtocolError:
            continue
        for receiver, reply in answers:
            assert encode(reply, 1)
            answered.append((receiver, reply.number))
        if numbered.operation is not GET:
            assert (peer, number) in answered
    assert len(answered) == len(set(answered))
    assert set(answered) <= {(peer, number) for number, (peer, _) in enumerate(history)}


def test_the_size_of_the_store_is_limited(store: Store) -> None:
    """Neither values nor waiting requests exceed it; answered requests make room."""
    big = bytes(1 << 12)
    count, left = divmod(MAX_BYTES, len(big) + 5)
    for number in range(count):
        store.reply(SET, f"{number:05}", value=big)
    with pytest.raises(ProtocolError, match="the store is full"):
        store.reply(SET, "over", value=bytes(left))
    assert store.reply(SET, "00000", value=big)  # it replaces its old value
    with pytest.raises(ProtocolError, match="the store is full"):
        store.request(GET, *["never" * 100] * 10)
    with pytest.raises(ProtocolError, match="the store is full"):
        store.reply(SET, "new", value=big)
    assert not store.reply(CHECK, "new").present
    store.reply(SET, "00001", value=b"")
    assert store.request(GET, "never", peer=b"b") == []
    assert len(store.request(SET, "never", value=b"")) == 2


def test_many_waiting_requests_do_not_slow_others(store: Store) -> None:
    for _ in range(20_000):
        assert store.request(GET, "never") == []
    for number in range(20_000):
        assert len(store.request(SET, str(number), value=b"x")) == 1
    assert len(store.request(SET, "never", value=b"x")) == 20_001
