"""Where a worker is, and was when it died."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.host.position import Tracker
from pipeworker.wire.messages.position import Phase, Position

number = st.integers(-1, 2**62)


def test_it_begins_at_the_start() -> None:
    assert Tracker().get() == Position(Phase.STARTING, -1, -1, -1)


@given(st.sampled_from(Phase), number, number, number)
def test_what_is_set_is_read(phase: Phase, step: int, microbatch: int, layer: int) -> None:
    tracker = Tracker()
    tracker.set(phase, step, microbatch, layer)
    assert tracker.get() == Position(phase, step, microbatch, layer)
    tracker.close()


def test_what_is_not_given_does_not_stay() -> None:
    tracker = Tracker()
    tracker.set(Phase.FORWARD, 1, 2, 3)
    tracker.set(Phase.WAITING, 4)
    assert tracker.get() == Position(Phase.WAITING, 4, -1, -1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_parent_reads_what_a_dead_child_wrote() -> None:
    tracker = Tracker()
    pid = os.fork()
    if pid == 0:
        tracker.set(Phase.BACKWARD, 5, 6, 7)
        os._exit(0)
    os.waitpid(pid, 0)
    assert tracker.get() == Position(Phase.BACKWARD, 5, 6, 7)


def test_a_closed_tracker_is_not_read() -> None:
    tracker = Tracker()
    tracker.close()
    with pytest.raises(ValueError, match="closed"):
        tracker.get()
