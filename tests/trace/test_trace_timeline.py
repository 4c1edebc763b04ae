"""The timeline of a run, as it is read, and as a trace of Chrome's format."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeworker.errors import UnreadableFile, UsageError
from pipeworker.job.options import Options
from pipeworker.plan.actions import parse_actions
from pipeworker.plan.orders import ORDERS
from pipeworker.plan.placement import Placement
from pipeworker.record import run_record
from pipeworker.record.run_record import RunRecord
from pipeworker.record.rundir import RunDir
from pipeworker.runs.trace import write_trace
from pipeworker.trace import chrome
from pipeworker.trace.recorder import Recorder, record_unfinished
from pipeworker.trace.ring import MiniBatchTimes, Ring
from pipeworker.trace.timeline import LAST, ClockSample, Timeline, WorkerLife, read_timeline
from support.pure.timelines import BASE, lives_of, start_of, write_lives

SCHEDULE = ORDERS["1f1b"].build(Placement.identity(3), 4, ["never"] * 3)


@pytest.fixture
def lives() -> list[WorkerLife]:
    return lives_of(SCHEDULE)


def test_a_timeline_has_what_was_recorded(lives: list[WorkerLife], tmp_path: Path) -> None:
    write_lives(RunDir(tmp_path), SCHEDULE, lives)
    for life, wanted in zip(read_timeline(RunDir(tmp_path)).lives, lives, strict=True):
        assert life.began == life.commands[0].received
        assert replace(life, commands=()) == replace(wanted, commands=(), began=life.began)
        for command, other in zip(life.commands, wanted.commands, strict=True):
            assert (command.step, command.first) == (other.step, other.first)
            assert command.received == pytest.approx(other.received, abs=1e-6)
            (span,), (like,) = command.spans, other.spans
            assert span.name == like.name
            assert span.begin == pytest.approx(like.begin, abs=1e-6)
            assert command.memory == tuple(
                (100 + 2 * place) << 20 for place in range(len(command.actions))
            )
            for action, wanted_action in zip(command.actions, other.actions, strict=True):
                assert action.action == wanted_action.action
                assert action[1:] == pytest.approx(wanted_action[1:], abs=1e-6)


def test_the_life_of_a_worker_ends_with_what_it_died_in(tmp_path: Path) -> None:
    path = RunDir(tmp_path).worker_timeline(0)
    actions = parse_actions("0F0 0>A0 0<G0 0B0")
    recorder = Recorder(path, start_of(0), pytest.fail)
    recorder.use(1, actions)
    ring = Ring()
    ring.path = str(path)
    times = ring.begin(3, 8, 1, 4, BASE)
    times[0], times[1], times[2] = BASE, BASE + 1, BASE + 2
    record_unfinished(ring)
    Recorder(path, start_of(0, 2), pytest.fail).use(1, actions[:1])
    first, second = read_timeline(RunDir(tmp_path)).lives
    (command,) = first.commands
    assert (command.step, command.first, command.answered) == (3, 8, None)
    forward, send = command.actions
    assert (forward.begin, forward.end) == (BASE, BASE + 1)
    assert (send.action, send.begin, send.end) == (actions[1], BASE + 2, None)
    assert (second.generation, second.commands) == (2, ())
    (died,) = [e for e in chrome.events([first, second]) if e.get("args", {}).get("died")]
    assert died["name"] == "0>A0"


def test_slices_nest_and_no_receive_ends_before_its_send(lives: list[WorkerLife]) -> None:
    found = chrome.events(lives)
    json.loads(json.dumps(found, allow_nan=False))
    assert {event["ph"] for event in found} == {"M", "X", "b", "e", "s", "f", "C"}
    stacks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in found:
        if event["ph"] != "X":
            continue
        begin, end = event["ts"], event["ts"] + event["dur"]
        stack = stacks[event["pid"]]
        while stack and stack[-1][1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1][1] + 1e-3, event
        stack.append((begin, end))
    begins = {e["id"]: e["ts"] for e in found if e["ph"] == "b"}
    ends = {e["id"]: e["ts"] for e in found if e["ph"] == "e"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 2 * (2 * 2 * 4 + 4)  # both ways over two cuts, and the targets
    assert all(begins[number] <= ends[number] for number in begins)
    lasts = [e["args"]["micro-batches"] for e in found if e["ph"] == "C"]
    assert max(lasts) == 3
    assert min(lasts) == 0


def test_a_flow_ends_within_the_slice_of_its_receive(lives: list[WorkerLife]) -> None:
    found = chrome.events(lives)
    slices = [e for e in found if e["ph"] == "X" and e["name"][1:2] in "<>"]
    for event in (e for e in found if e["ph"] in "sf"):
        around = [
            s
            for s in slices
            if s["pid"] == event["pid"] and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
        ]
        assert around, event


def test_steps_are_chosen(lives: list[WorkerLife]) -> None:
    found = chrome.events(lives, range(2, 3))
    assert {e["args"]["step"] for e in found if "step" in e.get("args", {})} == {2}
    assert min(e["ts"] for e in found if "ts" in e) == 0
    assert chrome.events(lives, range(7, 9)) == []


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"worker": "x"}',
        '{"step": 1, "times": [1, 2], "program": 9}',
        '{"program": 1, "actions": "what"}',
        '{"step": 1, "times": [[1]], "program": 1}',
        '{"step": 1, "spans": 5}',
        '{"step": 1, "received": 1e400}',
        '{"at": 1e400, "offset": 0.0, "error": 0.0}',
        '{"step": 1, "times": [99999999999999999999999], "program": 1}',
        '{"what": 1}',
        "\x00",
    ],
)
def test_rows_that_no_worker_has_written_are_one_message(tmp_path: Path, line: str) -> None:
    path = RunDir(tmp_path).worker_timeline(0)
    path.parent.mkdir()
    path.write_text(json.dumps(start_of(0)) + "\n" + line + "\n")
    with pytest.raises(UnreadableFile, match=r"worker-0.jsonl: cannot be read: line 2 is not what"):
        read_timeline(RunDir(tmp_path))


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1}',
        '{"program": 1, "actions": "0F0"}',
        '{"at": 1.0, "offset": 0.0, "error": 0.0}',
    ],
)
def test_a_file_that_does_not_begin_with_its_worker_is_one_message(
    tmp_path: Path, line: str
) -> None:
    path = RunDir(tmp_path).worker_timeline(0)
    path.parent.mkdir()
    path.write_text(line + "\n" + json.dumps(start_of(0)) + "\n")
    with pytest.raises(UnreadableFile, match=r"line 1 is not what a worker records \(it has no"):
        read_timeline(RunDir(tmp_path))


def test_a_folder_that_cannot_be_listed_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "timeline").symlink_to("timeline")
    with pytest.raises(UnreadableFile, match="timeline: cannot be read: Too many levels"):
        read_timeline(RunDir(tmp_path))


def test_the_clock_that_a_worker_measures_is_read(tmp_path: Path) -> None:
    measured = (BASE, 0.25, 0.0001)
    path = RunDir(tmp_path).worker_timeline(0)
    recorder = Recorder(path, start_of(0), pytest.fail, clock=lambda: measured)
    recorder.use(1, parse_actions("0F0 0B0"))
    for step in (1, 2):
        recorder.receive(step, recorded=step == 1)
        recorder.run(MiniBatchTimes(step, 0, 1, BASE, (BASE, BASE + 1)))
        recorder.write()
    recorder.close()
    found = read_timeline(RunDir(tmp_path))
    (life,) = found.lives
    assert life.samples == (ClockSample(*measured),) * 2
    assert [(c.step, len(c.actions)) for c in life.commands] == [(1, 1), (2, 0)]
    assert found.recorded == (1,)


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = RunDir(tmp_path).worker_timeline(0)
    path.parent.mkdir()
    path.write_text(json.dumps(start_of(0)) + '\n{"step": 1, "rec')
    (life,) = read_timeline(RunDir(tmp_path)).lives
    assert life.commands == ()


def test_no_timeline_is_none(tmp_path: Path) -> None:
    assert read_timeline(RunDir(tmp_path)) == Timeline()
    with pytest.raises(UsageError):
        write_trace(tmp_path, None, tmp_path / "t.json")


@pytest.mark.parametrize("resumed", [False, True])
def test_steps_that_are_not_recorded_are_refused(
    lives: list[WorkerLife], tmp_path: Path, *, resumed: bool
) -> None:
    run_dir, options = RunDir(tmp_path), asdict(Options("job.py", 3, 4))
    process = {"host": "here", "pid": 1, "started": "2026-11-26"}
    run_record.write(run_dir, options, process)
    if resumed:
        RunRecord.read(run_dir).add_resume(options, process, 1)
    write_lives(run_dir, SCHEDULE, lives)
    since = "recorded since the run was resumed; " if resumed else "recorded; "
    with pytest.raises(UsageError, match=rf"--steps 7:9: none of them is {since}recorded: 1-2 "):
        write_trace(tmp_path, "7:9", tmp_path / "t.json")


def test_only_what_was_done_since_the_run_was_resumed_is_read(tmp_path: Path) -> None:
    actions = parse_actions("0F0 0B0")
    for attempt, ranks, moment in (("a-0", (0, 1, 2), 1e9), ("b-6", (0, 1), 1e9 + 50)):
        for rank in ranks:
            start = start_of(rank, attempt=attempt, time=moment + rank)
            path = RunDir(tmp_path).worker_timeline(rank)
            Recorder(path, start, pytest.fail).use(1, actions)
    lives = read_timeline(RunDir(tmp_path)).lives
    assert [(life.rank, life.attempt) for life in lives] == [(0, "b-6"), (1, "b-6")]


def test_of_a_long_run_the_last_commands_are_read_or_those_that_are_asked_for(
    tmp_path: Path,
) -> None:
    path = RunDir(tmp_path).worker_timeline(0)
    recorder = Recorder(path, start_of(0), pytest.fail)
    recorder.use(1, parse_actions("0F0 0B0"))
    for step in range(1, 2 * LAST + 1):
        recorder.receive(step, recorded=True)
        recorder.run(MiniBatchTimes(step, 0, 1, BASE, (BASE, BASE + 1)))
        recorder.write()
    recorder.close()
    found = read_timeline(RunDir(tmp_path))
    assert [c.step for c in found.lives[0].commands] == [*range(LAST + 1, 2 * LAST + 1)]
    assert found.lives[0].began < found.lives[0].commands[0].received
    assert found.recorded == tuple(range(1, 2 * LAST + 1))
    (life,) = read_timeline(RunDir(tmp_path), range(7, 9)).lives
    assert [c.step for c in life.commands] == [7, 8]
