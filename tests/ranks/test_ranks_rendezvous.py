"""Rank 0's side of a rendezvous, with a store in memory."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch import distributed

from pipeworker.errors import UsageError
from pipeworker.ranks.rank_info import RankInfo
from pipeworker.ranks.rendezvous import PeerInfo, rendezvous
from pipeworker.runs.begin import PreparedRun, RunRequest
from pipeworker.timings import DEFAULT
from pipeworker.wire.keys import TOKEN_VARIABLE

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


def test_nothing_remains_of_a_run_whose_coordinator_has_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command with another interface begins it."""
    job, run_dir = tmp_path / "job.py", tmp_path / "run"
    job.write_text("")
    options = {"interface": "lo"}
    request = RunRequest(str(job), None, options, run_dir, ranks=2)

    def begin(_: int) -> PreparedRun:
        prepared = request.prepare()
        assert (run_dir / "run.json").exists()
        return prepared

    info = dataclasses.replace(INFO, address="localhost")
    store = distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(RankInfo, "open_store", lambda _: store)
    monkeypatch.setattr("pipeworker.ranks.rendezvous.wait_until", lambda done, *_: None)
    monkeypatch.setattr("pipeworker.ranks.rendezvous.secrets.token_hex", lambda _: "key")
    store.set("pipeworker/job/key/here/1", PEER.encode())
    with pytest.raises(UsageError, match="--interface lo: other hosts of this job cannot reach"):
        rendezvous(info, "job", begin, lambda _: print)
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("tokens", "given", "error"),
    [
        (
            ("a" * 32, "b" * 32),
            {},
            "PIPEWORKER_TOKEN: {1} has another value than {0}; set the same",
        ),
        (("a" * 32, ""), {}, "PIPEWORKER_TOKEN: {1} has no value, unlike {0}; set the same"),
        (("", "b" * 32), {}, "PIPEWORKER_TOKEN: {1} has a value, and {0} has none; set"),
        (
            ("", ""),
            {"--microbatches": "8"},
            "--microbatches: {1} was started with 8, {0} with 4; start all ranks",
        ),
        (
            ("", ""),
            {"--microbatches": "4", "the words after --": "small x"},
            "the words after --: {1} was started with small x, {0} without it; start all ranks",
        ),
    ],
)
def test_a_rank_that_was_started_otherwise_is_named(
    monkeypatch: pytest.MonkeyPatch, tokens: tuple[str, str], given: dict[str, str], error: str
) -> None:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(RankInfo, "open_store", lambda _: store)
    monkeypatch.setattr("pipeworker.ranks.rendezvous.secrets.token_hex", lambda _: "key")
    monkeypatch.setattr("pipeworker.ranks.rendezvous.timings", lambda: DEFAULT.scaled(0.001))
    own, others = ({"--microbatches": "4"}, given) if given else ({}, {})
    monkeypatch.setenv(TOKEN_VARIABLE, tokens[1])
    peer = PeerInfo.of(dataclasses.replace(INFO, rank=1), others)
    store.set("pipeworker/job/key/here/1", peer.encode())
    monkeypatch.setenv(TOKEN_VARIABLE, tokens[0])
    with pytest.raises(UsageError) as raised:
        rendezvous(INFO, "job", refuse, lambda _: print, own)
    ranks = [f"rank {rank} on {socket.gethostname()}" for rank in range(2)]
    assert str(raised.value).startswith(error.format(*ranks))
    answer = json.loads(store.get("pipeworker/job/key/answer"))
    assert (answer["error"], answer["status"]) == (str(raised.value), 2)
