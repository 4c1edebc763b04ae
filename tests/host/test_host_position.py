"""The position of a worker, which outlives the worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.facts.position import Phase, Position
from pipeworker.host.position import Tracker
from support.real_jobs.jobs import Jobs

number = st.integers(-1, 2**62)


def test_a_tracker_starts_at_the_starting_phase() -> None:
    assert Tracker().get() == Position(Phase.STARTING, -1, -1, -1)


@given(st.sampled_from(Phase), number, number, number)
def test_the_recorded_position_is_returned(
    phase: Phase, step: int, microbatch: int, layer: int
) -> None:
    tracker = Tracker()
    tracker.set(phase, step, microbatch, layer)
    assert tracker.get() == Position(phase, step, microbatch, layer)
    tracker.close()


def test_omitted_fields_do_not_keep_their_values() -> None:
    tracker = Tracker()
    tracker.set(Phase.FORWARD, 1, 2, 3)
    tracker.set(Phase.WAITING, 4)
    assert tracker.get() == Position(Phase.WAITING, 4, -1, -1)


def test_the_numbers_of_an_evaluation_are_beside_the_position() -> None:
    tracker = Tracker()
    assert tracker.counts == (0, 0)
    tracker.set(Phase.EVALUATION, 3)
    tracker.count(2, 9)
    tracker.set(Phase.FORWARD, 4)
    assert tracker.counts == (2, 9)
    assert tracker.get() == Position(Phase.FORWARD, 4)


DIES = """
import os
from pipeworker.facts.position import Phase
from pipeworker.host.position import Tracker

tracker = Tracker()
pid = os.fork()
if not pid:
    tracker.set(Phase.BACKWARD, 5, 6, 7)
    os._exit(0)
os.waitpid(pid, 0)
print(tracker.get())
"""


def test_the_parent_reads_the_position_of_a_dead_child(jobs: Jobs) -> None:
    stdout, stderr = jobs.python("-c", DIES).communicate(timeout=60)
    assert stdout == f"{Position(Phase.BACKWARD, 5, 6, 7)}\n", stderr


def test_a_closed_tracker_cannot_be_read() -> None:
    tracker = Tracker()
    tracker.close()
    with pytest.raises(ValueError, match="closed"):
        tracker.get()


def test_a_tracker_records_whether_the_worker_waits() -> None:
    tracker = Tracker()
    assert not tracker.waiting
    tracker.wait(3, 1, 2)
    assert tracker.waiting
    assert tracker.get() == Position(Phase.WAITING, 3, 1, 2)
    tracker.set(Phase.LOSS, 3)
    assert not tracker.waiting
