"""What the coordinator says to who started it, which may be stopped and read nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from pipeworker.coordinator.shell import starter
from pipeworker.coordinator.shell.starter import Starter
from pipeworker.wire.lines import Verdict, Warned, encode

VERDICT = Verdict("failed", 1, 3, 1.0, (0, 0), 0.5, "the launcher has not answered for 3 s")
ROOM = 1 << 16
"""Bytes that a pipe takes while nobody reads."""


@dataclass
class Pipes:
    """Standard input and output of a coordinator, as its starter has them."""

    says: int
    hears: int


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipes]:
    (reads, says), (hears, writes) = os.pipe(), os.pipe()
    monkeypatch.setattr(starter, "_READ", reads)
    monkeypatch.setattr(starter, "_WRITE", writes)
    pipes = Pipes(says, hears)
    yield pipes
    for descriptor in (reads, writes, hears, pipes.says):
        if descriptor >= 0:
            os.close(descriptor)


def ended() -> Starter:
    """More is said than a pipe takes, and the verdict last."""
    ends = Starter()
    for _ in range(3):
        ends.tell(Warned("w" * ROOM))
    ends.tell(VERDICT)
    assert ends.pending
    return ends


def test_a_verdict_waits_until_a_starter_that_was_stopped_reads_again(pipes: Pipes) -> None:
    ends, heard = ended(), b""
    with ThreadPoolExecutor() as threads:
        finishing = threads.submit(ends.finish)
        os.write(pipes.says, b"what it says keeps nobody\n")
        while not heard.endswith(encode(VERDICT)):
            heard += os.read(pipes.hears, ROOM)
        finishing.result()
    assert not ends.pending


def test_nobody_waits_for_a_starter_that_is_gone(pipes: Pipes) -> None:
    ends = ended()
    os.close(pipes.says)
    pipes.says = -1
    ends.finish()
    assert ends.gone
