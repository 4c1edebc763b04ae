"""``pipeworker trace``: the files that it writes, and its messages."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeworker.errors import UsageError
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.plan.simulate import Costs
from pipeworker.record.rundir import RunDir
from pipeworker.runs.trace import write_trace
from pipeworker.trace.timeline import ClockSample
from support.pure.facts import layer, network
from support.pure.orders import build
from support.pure.timelines import BASE, lives_of, write_lives, write_records

SCHEDULE = build("gpipe", 2, 4, "never")
LIVES = lives_of(SCHEDULE, Costs.even(2, 0.05, 0.1))
OPENS = "https://ui.perfetto.dev opens it, and sends it nowhere"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    return RunDir(Path("run"))


def names(events: list[dict[str, Any]], kind: str) -> set[str]:
    return {event["args"]["name"] for event in events if event["name"] == kind}


def traced(run: RunDir, facts: NetworkFacts | None) -> list[dict[str, Any]]:
    """Return the events of a trace of a run with these facts."""
    write_records(run, facts)
    write_lives(run, SCHEDULE, LIVES)
    write_trace(run.path, None, None)
    found: list[dict[str, Any]] = json.loads(Path("timeline.json").read_text())["traceEvents"]
    return found


def test_the_trace_of_one_host_is_a_file_of_json(run: RunDir) -> None:
    write_records(run)
    write_lives(run, SCHEDULE, LIVES)
    said = f"timeline.json: steps 1-2 of 2 workers; {OPENS}"
    assert write_trace(run.path, None, None) == said
    events = json.loads(Path("timeline.json").read_text())["traceEvents"]
    assert names(events, "process_name") == {"worker 0: stage 0", "worker 1: stage 1"}
    said = f"own.json: step 2 of 2 workers; {OPENS}"
    assert write_trace(run.path, "2:2", Path("own.json")) == said
    events = json.loads(Path("own.json").read_text())["traceEvents"]
    assert {e["args"]["step"] for e in events if "step" in e.get("args", {})} == {2}


def test_the_trace_of_several_hosts_is_an_archive_on_one_clock(run: RunDir) -> None:
    first, second = LIVES
    here = replace(first, samples=(ClockSample(BASE, 0.0, 0.001),))
    there = replace(second, host="node/2", clock="two", samples=(ClockSample(BASE, 2.0, 0.003),))
    write_records(run)
    write_lives(run, SCHEDULE, [here, there])
    assert write_trace(run.path, None, None).startswith("timeline.tar: steps 1-2 of 2 workers; ")
    with tarfile.open("timeline.tar") as archive:
        files = {name: archive.extractfile(name) for name in archive.getnames()}
        contents = {name: json.load(file) for name, file in files.items() if file is not None}
    assert contents.pop("perfetto_manifest.json")["perfetto_manifest"] == {
        "version": 1,
        "files": [
            {"path": "0-here.json", "machine": {"name": "here"}},
            {
                "path": "1-node-2.json",
                "machine": {"name": "node/2"},
                "clocks": {"sync_to": {"file": "0-here.json"}, "offset_ns": 0},
            },
        ],
        "attributes": {
            "pipeworker.run": "run",
            "pipeworker.clock_offset_ns.here": "0",
            "pipeworker.clock_error_ns.here": "1000000",
            "pipeworker.clock_offset_ns.node/2": "2000000000",
            "pipeworker.clock_error_ns.node/2": "3000000",
        },
    }
    events = [one["traceEvents"] for one in contents.values()]
    named = [names(one, "process_name") for one in events]
    assert named == [{"worker 0: stage 0"}, {"worker 1: stage 1"}]
    begins = [[e["ts"] for e in one if e["name"] == "step 1"] for one in events]
    assert begins == [[0.0], [2e6]]


def test_a_trace_has_the_planned_step_of_measured_layers(run: RunDir) -> None:
    measured = network([layer(0.05, 0.1, saved_bytes=100)] * 2)
    events = traced(run, measured)
    planned = {"planned: worker 0", "planned: worker 1"}
    assert planned < names(events, "process_name")
    held = [e["args"]["bytes"] for e in events if e["name"] == "graphs, as planned"]
    assert max(held) == 4 * 100
    events = traced(run, replace(measured, measured=False))
    assert not planned & names(events, "process_name")
    assert any(e["name"] == "graphs, as planned" for e in events)


@pytest.mark.parametrize("layers", [0, 3])
def test_facts_of_another_plan_are_not_drawn(run: RunDir, layers: int) -> None:
    events = traced(run, network([layer()] * layers) if layers else None)
    assert names(events, "process_name") == {"worker 0: stage 0", "worker 1: stage 1"}
    assert not any(e["name"] == "graphs, as planned" for e in events)


@pytest.mark.parametrize("plan", ["[]", '{"stages": []}', None])
def test_a_trace_needs_no_plan(run: RunDir, plan: str | None) -> None:
    write_records(run, network([layer()] * 2))
    write_lives(run, SCHEDULE, LIVES)
    run.plan.unlink()
    if plan is not None:
        run.plan.write_text(plan)
    assert write_trace(run.path, None, None).startswith("timeline.json: ")


def test_steps_that_are_left_out_are_named(run: RunDir) -> None:
    schedule = build("gpipe", 1, 1, "never")
    write_records(run, stages=1)
    write_lives(run, schedule, lives_of(schedule, steps=203))
    said = "timeline.json: steps 4-203 of 1 worker; --steps shows others of 1-3; "
    assert write_trace(run.path, None, None).startswith(said)
    assert write_trace(run.path, "2:5", None) == f"timeline.json: steps 2-5 of 1 worker; {OPENS}"


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        ((1, 3, 5, 7, 9, 11), "1, 3, 5, 7, 9, 11"),
        ((1, 2, 4, 6, 8, 10, 12, 14, 15), "1-2, 4, 6, 8, ..., 14-15"),
    ],
)
def test_many_ranges_of_steps_are_shortened(
    run: RunDir, steps: tuple[int, ...], shown: str
) -> None:
    schedule = build("gpipe", 1, 1, "never")
    (life,) = lives_of(schedule, steps=len(steps))
    commands = [replace(c, step=step) for c, step in zip(life.commands, steps, strict=True)]
    write_records(run, stages=1)
    write_lives(run, schedule, [replace(life, commands=tuple(commands))])
    assert write_trace(run.path, None, None).startswith(f"timeline.json: steps {shown} of ")


@pytest.mark.parametrize("steps", ["", "3", "5:4", "a:b", "1:2x", "-1:2", "1:2:3"])
def test_steps_that_are_no_range_are_refused(run: RunDir, steps: str) -> None:
    with pytest.raises(UsageError, match=rf"--steps {steps}: must be the first and the last step"):
        write_trace(run.path, steps, None)


def test_a_run_without_a_recorded_step_has_no_trace(run: RunDir) -> None:
    write_records(run)
    with pytest.raises(UsageError, match=r"^run: it has no recorded steps yet: no step has ended$"):
        write_trace(run.path, None, None)


def test_a_run_whose_timeline_is_gone_has_no_trace(run: RunDir) -> None:
    write_records(run)
    run.metrics.write_text('{"step": 1, "loss": 0.5}\n')
    with pytest.raises(UsageError, match=r"^run: it has no recorded steps: its timeline/ is gone"):
        write_trace(run.path, None, None)


def test_only_an_earlier_trace_is_replaced(run: RunDir) -> None:
    write_records(run)
    write_lives(run, SCHEDULE, LIVES)
    for name in ("own.json", "own.tar"):
        Path(name).write_text("earlier")
        assert write_trace(run.path, None, Path(name)).startswith(f"{name}: steps 1-2")
    Path("job.py").write_text("mine")
    with pytest.raises(UsageError, match=r"-o job\.py: exists already; choose another file"):
        write_trace(run.path, None, Path("job.py"))
    assert Path("job.py").read_text() == "mine"
