"""The recorder of a worker: its ring, its rows, and which steps have them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.plan.actions import format_actions, parse_actions
from pipeworker.plan.orders import ORDERS
from pipeworker.plan.placement import Placement
from pipeworker.record.metrics.rows import Row
from pipeworker.trace.recorder import (
    EVALUATION,
    UPDATE,
    Recorder,
    microseconds,
    record_unfinished,
    record_unfinished_in,
    seconds,
)
from pipeworker.trace.ring import CAPACITY, MiniBatchTimes, Ring
from pipeworker.trace.sampling import BYTES_A_MINUTE, SHARE, Cost, Sampling, cost_of

ACTIONS = parse_actions("0F0 0>A0 0L0 0<G0 0B0")


def rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@given(st.floats(0, 1e6), st.lists(st.floats(0, 1000), max_size=50))
def test_differences_in_microseconds_add_up_to_the_times(base: float, offsets: list[float]) -> None:
    times = [base + offset for offset in sorted(offsets)]
    found = microseconds(base, times)
    assert min(found, default=0) >= 0
    assert seconds(base, found) == pytest.approx(times, abs=6e-7)


def test_a_ring_has_the_times_of_the_mini_batch_that_has_begun() -> None:
    ring = Ring()
    assert ring.unfinished() is None
    began = perf_counter()
    times = ring.begin(3, 8, 2, 5, began)
    for place in range(5):  # in the third action
        times[place] = began + place
    at = tuple(began + place for place in range(5))
    assert ring.unfinished() == MiniBatchTimes(3, 8, 2, began, at)
    later = began + 100
    times = ring.begin(4, 0, 2, 5, later)
    times[0] = later
    assert ring.unfinished() == MiniBatchTimes(4, 0, 2, later, (later,))
    ring.end()
    assert ring.unfinished() is None
    del times
    ring.close()


def test_a_ring_survives_its_writer() -> None:
    ring = Ring()
    if (pid := os.fork()) == 0:
        ring.path = "somewhere"
        ring.begin(1, 0, 1, 2, 1.0)[0] = 2.0
        os._exit(0)
    os.waitpid(pid, 0)
    assert ring.path == "somewhere"
    assert ring.unfinished() == MiniBatchTimes(1, 0, 1, 1.0, (2.0,))


def test_more_actions_than_the_ring_has_memory_for_do_not_outlive_the_worker() -> None:
    ring = Ring()
    times = ring.begin(1, 0, 1, CAPACITY + 1, 1.0)
    times[2 * CAPACITY + 1] = 5.0
    assert len(times) == 2 * CAPACITY + 2
    assert ring.unfinished() is None


def test_a_ring_has_all_times_of_a_mini_batch_that_was_not_answered() -> None:
    ring = Ring()
    times = ring.begin(1, 0, 1, 2, 1.0)
    times[0], times[1], times[2], times[3] = done = (1.0, 1.5, 1.5, 2.0)
    assert ring.unfinished() == MiniBatchTimes(1, 0, 1, 1.0, done)


def test_a_path_that_is_too_long_is_not_cut_off() -> None:
    ring = Ring()
    ring.path = "x" * 10_000
    assert ring.path == ""


def test_a_command_has_the_seconds_for_which_its_process_was_suspended(tmp_path: Path) -> None:
    so_far = 3.0
    recorder = Recorder(tmp_path / "rows", {}, pytest.fail, suspended=lambda: so_far)
    for later in (3.0, 3.5, 10.0001):
        recorder.receive(1, recorded=True)
        so_far = later
        recorder.write()
    recorder.close()
    _, none, little, found = rows(tmp_path / "rows")
    assert "suspended" not in {**none, **little}  # a busy host may be the reason
    assert found["suspended"] == 6.5


def test_rows_of_what_is_recorded_and_of_the_command_after_it(tmp_path: Path) -> None:
    path = tmp_path / "timeline" / "worker-0.jsonl"
    recorder = Recorder(path, {"worker": 0}, pytest.fail)
    recorder.use(1, ACTIONS)
    for step in (1, 2, 3):
        recorder.receive(step, recorded=step == 1)
        with recorder.during(UPDATE):
            began = perf_counter()
        recorder.run(MiniBatchTimes(step, 0, 1, began, tuple(began + n for n in range(10))))
        recorder.write()
    recorder.receive(3, recorded=False)
    with recorder.during(EVALUATION):
        pass
    recorder.write()
    recorder.close()
    first, program, one, two, evaluation = rows(path)
    assert first == {"worker": 0}
    assert program == {"program": 1, "actions": format_actions(ACTIONS)}
    assert one["step"] == 1
    assert one["times"] == [0, *[1_000_000] * 9]
    assert [name for name, *_ in one["spans"]] == [UPDATE]
    assert one["received"] <= one["began"] <= one["answered"]
    assert two["step"] == 2
    assert "times" not in two
    assert two["received"] >= one["answered"]
    assert [name for name, *_ in evaluation["spans"]] == [EVALUATION]


def test_the_first_command_and_what_belongs_to_a_recorded_step_have_rows(tmp_path: Path) -> None:
    path = tmp_path / "timeline" / "worker-0.jsonl"
    recorder = Recorder(path, {"worker": 0}, pytest.fail)
    recorder.write()  # no command has arrived
    recorder.receive_more()
    recorder.write()
    for step in (1, 2, 3, 4, 5):
        recorder.receive(step, recorded=step == 3)
        recorder.write()
        recorder.receive_more()  # a user's own loop updates
        with recorder.during(UPDATE):
            pass
        recorder.write()
    recorder.close()
    found = [(row["step"], [name for name, *_ in row.get("spans", [])]) for row in rows(path)[1:]]
    assert found == [(1, []), (3, []), (3, [UPDATE]), (4, [])]


def test_a_file_that_cannot_be_written_ends_the_recording_and_not_the_job(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("no folder")
    notes: list[str] = []
    recorder = Recorder(tmp_path / "timeline" / "worker-0.jsonl", {}, notes.append)
    for step in (1, 2):
        recorder.receive(step, recorded=True)
        recorder.write()
    assert len(notes) == 1
    assert "the timeline is not recorded any more" in notes[0]


def test_what_a_dead_worker_had_begun_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    ring = Ring()
    record_unfinished(ring)  # it has begun nothing
    ring.path = str(path)
    times = ring.begin(7, 0, 1, 5, 10.0)
    times[0], times[1], times[2] = 10.0, 10.5, 11.0
    record_unfinished(ring)
    (row,) = rows(path)
    times_in_row = [0, 500_000, 500_000]
    wanted = {"step": 7, "first": 0, "program": 1, "began": 10.0, "times": times_in_row}
    assert row == {**wanted, "lost": True}
    (tmp_path / "folder").mkdir()
    ring.path = str(tmp_path / "folder")
    record_unfinished(ring)  # it cannot be written, and no job depends on it


def test_samples_grow_by_a_bounded_number_of_bytes_a_minute() -> None:
    sampling, taken, cost = Sampling(), [], Cost(20_000, 0.0)
    for tick in range(60_000):  # ten minutes of steps of 10 ms
        if sampling.takes(cost, 100 + tick / 100):
            taken.append(tick)
    assert len(taken) * 20_000 == pytest.approx(10 * BYTES_A_MINUTE, rel=0.03)
    assert taken[:10] == [*range(10)]
    for tick in range(60_000, 60_000 + 24 * 360):  # a day of steps of 10 s
        if sampling.takes(cost, 700 + (tick - 60_000) * 10):
            taken.append(tick)
    assert len(taken) * 20_000 < 70 * BYTES_A_MINUTE
    assert Sampling().takes(Cost(1 << 40, 0.0), 1.0)  # of steps too large for any minute, one


def test_samples_take_a_bounded_share_of_short_steps() -> None:
    sampling, taken, cost = Sampling(), [], Cost(100, 0.001)
    for tick in range(60_000):  # ten minutes of steps of 10 ms
        if sampling.takes(cost, 100 + tick / 100):
            taken.append(tick)
    assert len(taken) * cost.seconds == pytest.approx(600 * SHARE, rel=0.05)
    assert taken[:10] == [*range(10)]
    assert Sampling().takes(Cost(100, 1e6), 1.0)  # of steps too long for any minute, one


def test_of_a_step_all_mini_batches_are_recorded_or_none() -> None:
    sampling, taken, cost = Sampling(), [], Cost(100, 0.001)
    for tick in range(60_000):
        taken.append(sampling.takes(cost, 100 + tick / 100, begins=tick % 4 == 0))
    steps = [taken[place : place + 4] for place in range(0, len(taken), 4)]
    assert all(step in ([True] * 4, [False] * 4) for step in steps)
    assert sum(taken) * cost.seconds == pytest.approx(600 * SHARE, rel=0.05)


def test_the_estimate_of_a_row_is_near(tmp_path: Path) -> None:
    schedule = ORDERS["1f1b"].build(Placement.identity(4), 16, ["never"] * 4)
    written = 0
    for rank, actions in enumerate(schedule.workers):
        path = tmp_path / f"worker-{rank}.jsonl"
        recorder = Recorder(path, {}, pytest.fail)
        recorder.receive(1, recorded=True)
        with recorder.during(UPDATE):
            pass
        gaps = [4 if place % 2 == 0 else 10_345 for place in range(2 * len(actions))]
        times = tuple(seconds(36_000.123456, gaps))
        memory = tuple((300 + 4 * (place % 2)) << 20 for place in range(len(actions)))
        recorder.run(MiniBatchTimes(1, 0, 1, 36_000.123456, times, memory))
        recorder.write()
        recorder.receive(2, recorded=False)
        with recorder.during(UPDATE):
            pass
        recorder.write()
        recorder.close()
        written += sum(len(line) for line in path.read_text().splitlines()[1:])
    assert cost_of([schedule]).size == pytest.approx(written, rel=0.15)


def test_a_ring_in_a_file_is_recorded_beside_it_and_removed(tmp_path: Path) -> None:
    path, other = tmp_path / "worker-3.ring", tmp_path / "other.txt"
    ring = Ring.new_file(path)
    ring.path = str(other)  # whatever a file says, nothing else is written
    times = ring.begin(7, 0, 1, 4, 5.0)
    times[0], times[1], times[2] = 5.0, 5.5, 6.0
    times.release()
    ring.close()
    record_unfinished_in(path)
    (row,) = map(json.loads, (tmp_path / "worker-3.jsonl").read_text().splitlines())
    assert (row["step"], row["times"], row["lost"]) == (7, [0, 500000, 500000], True)
    assert not path.exists()
    assert not other.exists()


def test_a_file_that_is_no_ring_and_an_empty_ring_add_nothing(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.ring"
    record_unfinished_in(path)
    path.write_text("no ring")
    record_unfinished_in(path)
    assert path.read_text() == "no ring"
    Ring.new_file(path).close()
    record_unfinished_in(path)
    assert not [*tmp_path.iterdir()]
