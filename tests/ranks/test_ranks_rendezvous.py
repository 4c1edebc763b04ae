"""Rank 0's side of a rendezvous, with a store in memory."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import Any, NoReturn

import pytest
from torch import distributed

from pipeworker.errors import UsageError
from pipeworker.ranks.rank_info import RankInfo
from pipeworker.ranks.rendezvous import PeerInfo, rendezvous
from pipeworker.timings import DEFAULT

INFO = RankInfo(0, 2, 0, 1, "127.0.0.1", 1)
PEER = PeerInfo("word", "host", "identity", 0, "127.0.0.1")


def refuse(_: int) -> NoReturn:
    raise UsageError("no")


def rejecting(seconds: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str, threading.Thread]:
    """Begin a rendezvous that rank 0 ends by an error, which waits for rank 1 at most so long.

    Return the store, the rendezvous's key in it, and the thread of rank 0.
    """
    factor, store = seconds / DEFAULT.linger, distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr("pipeworker.ranks.rendezvous.timings", lambda: DEFAULT.scaled(factor))
    monkeypatch.setattr(RankInfo, "open_store", lambda _: store)

    def run() -> None:
        with suppress(UsageError):
            rendezvous(INFO, "job", refuse, lambda _: print)

    thread = threading.Thread(target=run)
    thread.start()
    key = store.get("pipeworker/job").decode()
    store.set(f"{key}/here/1", PEER.encode())
    return store, key, thread


def test_rank_0_stays_until_the_others_have_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store, key, thread = rejecting(60.0, monkeypatch)
    answer = json.loads(store.get(f"{key}/answer"))  # waits for it
    assert answer == {"words": ["word"], "error": "no", "status": 2}
    thread.join(0.3)
    assert thread.is_alive()
    store.set(f"{key}/told/1", "")
    thread.join(30)
    assert not thread.is_alive()


def test_rank_0_waits_a_moment_only_for_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, thread = rejecting(0.2, monkeypatch)
    thread.join(30)
    assert not thread.is_alive()
