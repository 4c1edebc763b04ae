"""Rank 0's side of a rendezvous, with a store in memory."""

from __future__ import annotations

import json
import threading

import pytest
from torch import distributed

from pipeworker.ranks.rank_info import RankInfo
from pipeworker.ranks.rendezvous import PeerInfo, _Host
from pipeworker.timings import DEFAULT

INFO = RankInfo(0, 2, 0, 1, "127.0.0.1", 1)
PEER = PeerInfo("word", "host", "identity", 0, "127.0.0.1")


def rejecting(seconds: float, monkeypatch: pytest.MonkeyPatch) -> tuple[_Host, threading.Thread]:
    """Return rank 0, and a thread in which it rejects rank 1 and waits at most so long."""
    factor = seconds / DEFAULT.linger
    monkeypatch.setattr("pipeworker.ranks.rendezvous.timings", lambda: DEFAULT.scaled(factor))
    host = _Host(INFO, distributed.HashStore(), "job")  # type: ignore[attr-defined]
    return host, threading.Thread(target=host._reject, args=({1: PEER}, "no", 2))


def test_rank_0_stays_until_the_others_have_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    host, thread = rejecting(60.0, monkeypatch)
    thread.start()
    answer = json.loads(host._store.get(f"{host._key}/answer"))  # waits for it
    assert answer == {"words": ["word"], "error": "no", "status": 2}
    thread.join(0.3)
    assert thread.is_alive()
    host._store.set(f"{host._key}/told/1", "")
    thread.join(30)
    assert not thread.is_alive()


def test_rank_0_waits_a_moment_only_for_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    _, thread = rejecting(0.2, monkeypatch)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
