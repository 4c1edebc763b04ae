"""The mini-batches that the process that reads data keeps."""

from __future__ import annotations

import itertools
import resource

import pytest

from pipeworker.host import cgroups
from pipeworker.worker.data.packing import Packed
from pipeworker.worker.data.reader_requests import DataPlace
from pipeworker.worker.data.replies import Replies, Reply


def reply(before: DataPlace, after: DataPlace, size: int = 1, **more: bool) -> Reply:
    return Reply(Packed(bytes(size)), before, after, **{"is_last": False, **more})


def read(replies: Replies, *places: DataPlace) -> None:
    """Keep mini-batches between these places; the worker is sent all of them."""
    for before, after in itertools.pairwise(places):
        replies.add(reply(before if after[0] == before[0] else (after[0], 0), after))
        replies.next()


def next_place(replies: Replies) -> DataPlace | None:
    return replies.next().before


def test_a_worker_continues_at_a_place_that_is_kept() -> None:
    replies = Replies()
    read(replies, (0, 0), (0, 1), (0, 2), (1, 1), (1, 2))
    assert replies.seek((0, 1))
    assert [next_place(replies) for _ in range(3)] == [(0, 1), (1, 0), (1, 1)]
    assert replies.seek((0, 2))  # the end of an epoch is where the next one begins
    assert next_place(replies) == (1, 0)
    assert replies.seek((1, 2))
    assert not replies.waiting
    assert not replies.seek((1, 3))


def test_what_no_recovery_can_need_is_dropped() -> None:
    replies = Replies()
    read(replies, (0, 0), (0, 1), (0, 2), (0, 3))
    replies.drop_before((0, 2))
    assert not replies.seek((0, 1))
    assert replies.seek((0, 2))


def test_what_the_worker_was_not_sent_is_not_dropped() -> None:
    replies = Replies()
    read(replies, (0, 0), (0, 1))
    replies.add(reply((0, 1), (0, 2)))
    replies.drop_before((0, 2))
    replies.drop_sent()
    assert next_place(replies) == (0, 1)


def test_the_end_of_data_is_the_reply_to_every_further_request() -> None:
    replies = Replies()
    read(replies, (0, 0), (0, 1))
    replies.add(reply((0, 1), (0, 1), is_last=True))
    assert [replies.next().is_last for _ in range(3)] == [True] * 3
    assert replies.seek((0, 0))
    assert next_place(replies) == (0, 0)
    assert replies.next().is_last


def test_the_oldest_are_dropped_if_there_are_few_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    replies = Replies()
    read(replies, *((0, number) for number in range(10)))
    assert not replies.seek((0, 2))
    assert replies.seek((0, 4))


def test_the_oldest_are_dropped_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "available_memory", lambda: 700 << 20)
    replies = Replies()
    for number in range(8):
        replies.add(reply((0, number), (0, number + 1), 25 << 20))
        replies.next()
    assert not replies.seek((0, 2))
    assert replies.seek((0, 5))
