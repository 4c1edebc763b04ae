"""The coordinator's output to its parent, which may be suspended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from pipeworker.coordinator.io import parent
from pipeworker.coordinator.io.parent import ParentProcess
from pipeworker.wire.lines import Verdict, Warned, encode

VERDICT = Verdict("failed", 1, 3, 1.0, (0, 0), 0.5, "the launcher has not answered for 3 s")
ROOM = 1 << 16
"""Bytes that a pipe holds without a reader."""


@dataclass
class Pipes:
    """The parent's ends of a coordinator's standard input and output."""

    input: int
    output: int


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipes]:
    (reads, input), (output, writes) = os.pipe(), os.pipe()
    monkeypatch.setattr(parent, "INPUT", reads)
    monkeypatch.setattr(parent, "OUTPUT", writes)
    pipes = Pipes(input, output)
    yield pipes
    for descriptor in (reads, writes, output, pipes.input):
        if descriptor >= 0:
            os.close(descriptor)


def ended() -> ParentProcess:
    """Return a parent to which more was sent than a pipe holds, the verdict last."""
    ends = ParentProcess()
    for _ in range(3):
        ends.send(Warned("w" * ROOM))
    ends.send(VERDICT)
    assert ends.pending
    return ends


def test_the_verdict_waits_for_a_suspended_parent(pipes: Pipes) -> None:
    ends, received = ended(), b""
    with ThreadPoolExecutor() as threads:
        finishing = threads.submit(ends.drain)
        os.write(pipes.input, b"what it input keeps nobody\n")
        while not received.endswith(encode(VERDICT)):
            received += os.read(pipes.output, ROOM)
        finishing.result()
    assert not ends.pending


def test_nothing_waits_for_a_parent_that_has_ended(pipes: Pipes) -> None:
    ends = ended()
    os.close(pipes.input)
    pipes.input = -1
    ends.drain()
    assert ends.gone
