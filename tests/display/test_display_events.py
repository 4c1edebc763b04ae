"""A job as events: a line of JSON each."""

from __future__ import annotations

import errno
import io
import json
import math
from pathlib import Path
from typing import Any, TextIO

from pipeworker.display.events import EventDisplay
from pipeworker.display.output import Printed
from pipeworker.display.style import Style
from pipeworker.facts.speed import Speed
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.job.options import Options
from pipeworker.record.rundir import RunDir
from pipeworker.wire.lines import Joined, Planned, Restart, Verdict, Warned
from support.in_process.checkpoints import complete


def display(out: TextIO, path: Path, error: TextIO | None = None) -> EventDisplay:
    style = Style(json=True, log_every=5)
    return EventDisplay(Options("job.py", 2, 4), RunDir(path), style, out, error or out)


def test_each_event_is_an_object_on_a_line(tmp_path: Path) -> None:
    out = io.StringIO()
    shown = display(out, tmp_path)
    shown.show(Planned("gpipe", 4, (2, 3), ((0,), (1,)), 0.2, steps=9))
    shown.show(Joined(0))
    shown.show(StepResult(1, math.nan, 8, 0.5, 16.0, math.inf, 0.1, 0.3, 0))
    shown.show(Evaluation(1, 0.5, ("accuracy",), (0.75,)))
    shown.show(Warned("careful"))
    shown.show(Warned("careful"))
    shown.show(Warned("by the way", note=True))
    shown.show_output([Printed("[stage 0]", "hello"), Printed("[stage 0]", "50%", whole=False)])
    shown.show(Verdict("failed", 1, 1, 2.0, (), 0.3, "it failed"))
    found: list[dict[str, Any]] = [json.loads(line) for line in out.getvalue().splitlines()]
    kinds = ["plan", "step", "evaluation", "warning", "note", "output", "end"]
    assert [event["event"] for event in found] == kinds
    plan, step, evaluation, warning, _, output, end = found
    assert (plan["stages"], plan["balance"], plan["steps"], plan["first_step"]) == (2, [2, 3], 9, 1)
    assert (plan["step_seconds"], plan["log_every"]) == (None, 5)
    assert plan["run_dir"] == end["run_dir"] == str(tmp_path)
    assert (step["step"], step["loss"], step["grad_norm"], step["lr"]) == (1, None, None, 0.1)
    assert evaluation == {"event": "evaluation", "step": 1, "loss": 0.5, "accuracy": 0.75}
    assert warning == {"event": "warning", "text": "careful"}
    assert output == {"event": "output", "worker": "[stage 0]", "text": "hello"}
    assert (end["status"], end["exit_status"], end["error"]) == ("failed", 1, "it failed")
    assert end["checkpoint"] is None
    assert "samples_per_second" not in end


def test_a_run_without_its_record_cannot_be_resumed(tmp_path: Path) -> None:
    out = io.StringIO()
    complete(RunDir(tmp_path), 3)
    display(out, tmp_path).show(Verdict("failed", 1, 3, 2.0, (), 0.3, "it failed"))
    end = json.loads(out.getvalue().splitlines()[-1])
    assert (end["checkpoint_step"], end["resume"]) == (3, None)


def test_new_checkpoints_and_restarts_are_events(tmp_path: Path) -> None:
    out = io.StringIO()
    shown = display(out, tmp_path)
    RunDir(tmp_path).run.write_text("{}")
    for earlier in (0, 1):
        complete(RunDir(tmp_path), earlier)
    shown.tick()
    shown.show(Planned("gpipe", 4, (2, 3), ((0,), (1,)), 0.2, steps=9))
    complete(RunDir(tmp_path), 2)
    shown.tick()
    shown.show(StepResult(2, 0.5, 8, 0.5, 16.0, 1.0, 0.1, 0.3, 0))
    shown.tick()
    shown.tick()
    shown.show(Restart(2, "a worker is lost", 2))
    shown.show(Restart(3, "the job failed, and saves a snapshot", 2, recovers=False))
    complete(RunDir(tmp_path), 3)
    speed = Speed(0.5, 16.0, 0.0, (0.25, 0.125), 0.1)
    shown.show(Verdict("done", 0, 3, 2.0, (), 0.3, None, speed=speed))
    _, step, saved, restart, last, end = map(json.loads, out.getvalue().splitlines())
    assert (step["event"], step["step"]) == ("step", 2)  # though it came after the checkpoint
    path = str(RunDir(tmp_path).checkpoints.at(2))
    assert saved == {"event": "checkpoint", "step": 2, "path": path}
    assert restart == {"event": "restart", "cause": "a worker is lost", "stages": 2}
    assert (last["event"], last["step"]) == ("checkpoint", 3)
    assert (end["event"], end["checkpoint_step"]) == ("end", 3)
    assert end["resume"].endswith(", steps=6)")
    assert (end["median_step_seconds"], end["samples_per_second"]) == (0.5, 16.0)
    assert (end["tokens_per_second"], end["busy_seconds"]) == (None, [0.25, 0.125])
    assert end["data_seconds"] == 0.1


def test_a_reader_that_is_gone_ends_the_job(tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    shown = display(Gone(), tmp_path)
    shown.show(Warned("careful"))
    assert isinstance(shown.lost, BrokenPipeError)


def test_a_full_disk_is_reported_once_and_ends_nothing(tmp_path: Path) -> None:
    error = io.StringIO()
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        shown = display(full, tmp_path, error)
        shown.show(Warned("careful"))
        shown.show(Warned("more careful"))
    assert shown.lost is None
    assert error.getvalue() == (
        "warning: standard output: cannot be written: No space left on device; "
        "the job continues, its events are lost\n"
    )
