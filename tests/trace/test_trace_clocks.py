"""The clocks of hosts: how far apart they are, within a bound that is stated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.plan.orders import ORDERS
from pipeworker.plan.placement import Placement
from pipeworker.trace import chrome
from pipeworker.trace.clocks import BestSamples, Clocks, aligned, measure
from pipeworker.trace.timeline import ActionSpan, ClockSample, Command, Span, WorkerLife
from support.pure.timelines import BASE, lives_of

_WAY = st.floats(0, 0.05)


@given(offset=st.floats(-1e6, 1e6), there=_WAY, back=_WAY, held=st.floats(0, 2))
def test_the_true_offset_is_within_the_error_bound(
    offset: float, there: float, back: float, held: float
) -> None:
    """Whatever part of the way each direction takes."""
    beat = 2e6
    sent = beat + offset + there + held
    now = beat + there + held + back
    found = measure(beat, held, sent, now)
    assert found is not None
    assert found.error == pytest.approx((there + back) / 2, abs=1e-6)
    assert abs(found.offset - offset) <= found.error + 1e-6


def test_times_that_contradict_each_other_show_nothing() -> None:
    assert measure(0.0, 0.0, 5.0, 1.0) is None  # no heartbeat has arrived yet
    assert measure(10.0, 2.0, 5.0, 11.0) is None
    # By so little the times are those of a way that took none.
    found = measure(10.0, 2.0, 5.0, 12.0 - 5e-7)
    assert found is not None
    assert found.error == 0


def test_the_most_exact_measurement_of_an_interval_is_recorded_once() -> None:
    best = BestSamples()
    assert best.take() is None
    best.add(ClockSample(1, 0.5, 0.010))
    assert best.take() == ClockSample(1, 0.5, 0.010)
    best.add(ClockSample(2, 0.5, 0.009))  # hardly better
    assert best.take() is None
    best.add(ClockSample(3, 0.5, 0.001))
    best.add(ClockSample(4, 0.5, 0.020))
    assert best.take() == ClockSample(3, 0.5, 0.001)
    assert best.take() is None
    best.add(ClockSample(40, 0.6, 0.015))  # of the next interval
    assert best.take() == ClockSample(40, 0.6, 0.015)


def test_a_drift_is_followed_between_measurements() -> None:
    (life,) = lives_of(ORDERS["gpipe"].build(Placement.identity(1), 1, ["never"]))
    samples = (ClockSample(1000, 5.0, 1e-4), ClockSample(1100, 5.1, 2e-4))
    clocks = Clocks.of([replace(life, samples=samples)])
    assert clocks.offset("one", 1050) == pytest.approx((5.05, 2e-4))
    assert clocks.offset("one", 900) == (5.0, 1e-4)
    assert clocks.offset("one", 2000) == (5.1, 2e-4)
    assert clocks.offset("another", 900) == (0.0, float("inf"))
    exact = ClockSample(1019, 5.0, 1e-5)  # of the same half minute as the second
    clocks = Clocks.of([replace(life, samples=(*samples[:1], ClockSample(1001, 7.0, 1e-3), exact))])
    assert clocks.samples["one"] == (exact,)
    worse = ClockSample(1019, 9.0, 1e-2)
    clocks = Clocks.of([replace(life, samples=(*samples, worse)), replace(life, samples=(exact,))])
    assert clocks.samples["one"] == (exact, samples[1])
    assert clocks.offset("one", 1060)[1] == 2e-4  # the larger one of both


class Searched(tuple[ClockSample, ...]):
    """Measurements that are not all read: a long run has thousands, for each of its commands."""

    __slots__ = ()

    def __iter__(self) -> Iterator[ClockSample]:
        raise AssertionError("all measurements are read")


def test_the_time_of_a_command_is_searched_among_the_measurements() -> None:
    clocks = Clocks({"a": Searched(ClockSample(30.0 * n, float(n), 0.5) for n in range(100))})
    assert clocks.offset("a", 45.0) == (1.5, 0.5)
    assert clocks.offset("a", -1.0) == (0.0, 0.5)
    assert clocks.offset("a", 1e6) == (99.0, 0.5)


def behind(life: WorkerLife, seconds: float) -> WorkerLife:
    """Return what a worker whose clock is behind would have recorded."""

    def moved(command: Command) -> Command:
        return replace(
            command,
            received=command.received - seconds,
            answered=None if command.answered is None else command.answered - seconds,
            spans=tuple(Span(s.name, s.begin - seconds, s.end - seconds) for s in command.spans),
            actions=tuple(
                ActionSpan(a.action, a.begin - seconds, (a.end or 0) - seconds)
                for a in command.actions
            ),
        )

    sample = ClockSample(BASE - seconds, seconds, 1e-6)
    commands = tuple(map(moved, life.commands))
    return replace(life, clock="other", samples=(sample,), commands=commands)


def times_of(command: Command) -> list[float]:
    """Return the times of a command that was answered."""
    pairs = [span[1:] for span in (*command.spans, *command.actions)]
    return [command.received, command.answered or 0, *(end or 0 for pair in pairs for end in pair)]


def test_a_host_whose_clock_is_behind_is_moved_onto_the_coordinators() -> None:
    lives = lives_of(ORDERS["1f1b"].build(Placement.identity(3), 4, ["never"] * 3))
    own = [replace(life, samples=(ClockSample(BASE, 0.0, 1e-6),)) for life in lives]
    found = aligned([own[0], own[1], behind(lives[2], 4321.5)])
    for command, original in zip(found[2].commands, lives[2].commands, strict=True):
        assert times_of(command) == pytest.approx(times_of(original), abs=1e-5)
    events = chrome.events(found)
    begins = {e["id"]: e["ts"] for e in events if e["ph"] == "b"}
    assert begins
    for event in events:
        if event["ph"] == "e":
            assert event["ts"] >= begins[event["id"]] - 1
    wanted = {(e["pid"], e.get("name")): e["ts"] for e in chrome.events(lives) if e["ph"] == "X"}
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] == pytest.approx(wanted[event["pid"], event["name"]], abs=2) or (
                event["name"] not in ("step 1", "step 2")
            )
    assert aligned(lives) == tuple(lives)
    (died,) = lives[2].commands[:1]
    died = replace(died, answered=None, actions=(died.actions[0]._replace(end=None),))
    late = replace(behind(replace(lives[2], commands=(died,)), 4321.5), began=BASE - 4320.5)
    late = replace(
        late,
        commands=tuple(
            replace(c, actions=tuple(a._replace(end=None) for a in c.actions))
            for c in late.commands
        ),
    )
    _, moved = aligned([own[0], late])
    assert moved.began == pytest.approx(BASE + 1)
    assert (moved.commands[0].answered, moved.commands[0].actions[0].end) == (None, None)
