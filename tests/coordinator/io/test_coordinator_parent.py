"""The coordinator's output to its parent, which may be suspended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from pipeworker.coordinator.io import parent
from pipeworker.coordinator.io.parent import ParentProcess
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.wire.lines import (
    Activity,
    Buffer,
    FromCoordinator,
    KeepAlive,
    Snapshot,
    Verdict,
    Warned,
    encode,
)

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


def result(step: int) -> StepResult:
    return StepResult(step, 0.5, 8, 0.1, 80.0, 1.0, 0.1, 0.5, 0, None)


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


def lines_of(data: bytes) -> list[FromCoordinator]:
    return Buffer[FromCoordinator](FromCoordinator).feed(data)


def read_all(pipes: Pipes, ends: ParentProcess) -> list[FromCoordinator]:
    """Read all output, as a parent does that was suspended."""
    received = b""
    while ends.pending:
        received += os.read(pipes.output, ROOM)
        ends.flush()
    return lines_of(received + os.read(pipes.output, ROOM))


def test_only_activity_and_steps_are_left_out_while_the_parent_does_not_read(pipes: Pipes) -> None:
    ends = ParentProcess()
    ends.send(Warned("w" * 2 * ROOM))
    assert ends.pending
    sent: list[FromCoordinator] = []
    for step in range(1, 3000):
        sent += [result(step), Activity((step,)), Evaluation(step, 0.5)]
    sent += [Snapshot(3000, 0, 2), VERDICT]
    for event in sent:
        ends.send(event)
    _, *received = read_all(pipes, ends)
    steps = [event.step for event in received if isinstance(event, StepResult)]
    assert steps == [*range(1, 1 + len(steps))]
    assert 500 < len(steps) < 600  # every second one of a thousand lines
    assert [event for event in received if not isinstance(event, StepResult)] == [
        event for event in sent if not isinstance(event, StepResult | Activity)
    ]
    ends.send(Activity((1,)))
    assert lines_of(os.read(pipes.output, ROOM)) == [Activity((1,))]


def test_waiting_lines_are_not_copied_with_each_further_line(
    pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, tried = ended(), list[int]()

    def write(handle: int, data: bytes) -> int:
        tried.append(len(data))
        raise BlockingIOError

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        for _ in range(5):
            ends.send(Warned("w" * ROOM))
    assert len(tried) == 5
    assert max(tried) < 2 * ROOM


def test_there_is_room_for_a_line_until_the_pipe_is_full(pipes: Pipes) -> None:
    ends, line = ParentProcess(), Snapshot(1, 0, 2)
    while ends.has_room:
        ends.send(line)
        assert not ends.pending
    ends.send(Warned("w" * ROOM))
    assert not ends.has_room
    read_all(pipes, ends)
    assert ends.has_room


def test_nothing_waits_for_a_parent_that_has_ended(pipes: Pipes) -> None:
    ends = ended()
    os.close(pipes.input)
    pipes.input = -1
    ends.drain()
    assert ends.gone


def test_a_silent_parent_is_lost_unless_the_user_has_stopped_it(
    pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent_process = ParentProcess()
    assert parent_process.exceeded_silence(100.0) is None  # it has sent no timeout yet
    os.write(pipes.input, encode(KeepAlive(3.0)))
    assert [*parent_process.receive(100.0)] == []
    monkeypatch.setattr(parent, "is_parent_stopped", lambda: True)
    assert parent_process.exceeded_silence(104.0) is None
    monkeypatch.setattr(parent, "is_parent_stopped", lambda: False)
    assert parent_process.exceeded_silence(106.0) is None  # since it was last stopped
    assert parent_process.exceeded_silence(107.5) == 3.0
