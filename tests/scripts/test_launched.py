"""``pipeworker.launch``: the words of its command, and the errors that it raises."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import click
import pytest

import pipeworker
from launcher.options import LAUNCH_PARAMETERS
from pipeworker.display.progress import JobProgress
from pipeworker.display.text import strict
from pipeworker.facts.step import StepResult
from pipeworker.session.launched import command_words
from support.real_jobs.compare import plain_loop
from support.real_jobs.jobs import Jobs
from support.real_jobs.sources import JOB


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stages": 4, "lr": None}, ["--stages=4"]),
        ({"resume": True, "sync": False}, ["--resume"]),
        ({"init_strict": False, "csv": True}, ["--no-init-strict", "--csv"]),
        ({"balance": [3, 5], "hosts": "a:1"}, ["--balance=3,5", "--hosts=a:1"]),
        ({"set": {"image": "i", "queue": "q"}}, ["--set=image=i", "--set=queue=q"]),
        ({"allow_change": ("seed", "threads")}, ["--allow-change=seed", "--allow-change=threads"]),
        ({"run_dir": Path("a b")}, ["--run-dir=a b"]),
    ],
)
def test_options_become_words(options: dict[str, Any], words: list[str]) -> None:
    assert command_words("job.py", [], options) == ["launch", "--json", *words, "job.py"]
    line = command_words("job.py", ["--lr", "1"], options)
    assert line[-4:] == ["job.py", "--", "--lr", "1"]


def test_every_switch_of_the_command_can_be_turned_off() -> None:
    for parameter in LAUNCH_PARAMETERS:
        for word in parameter.secondary_opts:
            if not word.startswith("--init-partial"):
                name = str(parameter.name)
                assert word in command_words("job.py", [], {name: False})
    assert "no_profile" in {parameter.name for parameter in LAUNCH_PARAMETERS}
    assert command_words("job.py", [], {"no_profile": False}) == command_words("job.py", [], {})


def test_a_bool_is_no_value_of_an_option_that_takes_one() -> None:
    """The next word of the command must not become the value, nor a path be called True."""
    for parameter in LAUNCH_PARAMETERS:
        word = max(parameter.opts, key=len)
        name = word[2:].replace("-", "_")
        if not isinstance(parameter, click.Option) or name in ("debug", "dry_run", "json"):
            continue
        if parameter.is_flag:
            assert command_words("job.py", [], {name: True})[2:-1] == [word]
            continue
        for value in (True, False):
            with pytest.raises(pipeworker.UsageError, match=f"{name}: is {value}; give its value"):
                command_words("job.py", [], {name: value})


def test_every_option_of_the_command_is_known() -> None:
    for parameter in LAUNCH_PARAMETERS:
        for word in parameter.opts:
            name = word.removeprefix("--").replace("-", "_")
            if word.startswith("--") and name not in ("debug", "dry_run", "json"):
                assert len(command_words("job.py", [], {name: 1})) == 4


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"lr": 3}, "lr: no such option; is it for the job file? Write: arguments=['--lr', '3']"),
        (
            {"from_zero": True},
            "from_zero: no such option; is it for the job file? Write: arguments=['--from-zero']",
        ),
        ({"stage": 3}, "stage: no such option; did you mean stages?"),
        ({"read_data": "once"}, "read_data: this option was renamed; use data_reader, where once"),
        ({"init_partial": True}, "init_partial: this option was renamed; use init_strict=False "),
        ({"elastic": 3}, "elastic: this option was renamed; use min_stages"),
        ({"batch_size": 3}, "batch_size: no such option; the batch is what data() yields"),
    ],
)
def test_an_unknown_option_is_answered_in_python(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(pipeworker.UsageError) as raised:
        command_words("job.py", [], options)
    assert str(raised.value).startswith(f"pipeworker.launch(): {advice}")


def test_arguments_are_words_and_the_job_file_is_a_path() -> None:
    assert command_words("job.py", ["--lr", 0.1], {})[-3:] == ["--", "--lr", "0.1"]
    with pytest.raises(
        pipeworker.UsageError, match=r"arguments: is a string; give a list: \['--lr"
    ):
        command_words("job.py", "--lr 1", {})
    for wrong in (3, b"ab", {"lr": 1}):
        with pytest.raises(pipeworker.UsageError, match=r"arguments: is .*; give a list of words"):
            command_words("job.py", wrong, {})  # type: ignore[arg-type]
    for words in (("a\0b", []), ("job.py", ["a\0b"])):
        with pytest.raises(pipeworker.UsageError, match=r"'a\\x00b' has a null character"):
            command_words(*words, {})
    with pytest.raises(pipeworker.UsageError, match="job_file: is a function; give the path of a"):
        command_words(test_a_mistake_is_raised, [], {})  # type: ignore[arg-type]


def test_a_run_to_resume_needs_no_job_file() -> None:
    assert command_words(None, ["1"], {"resume": "RUN"}) == [
        *("launch", "--json", "--resume=RUN", "--", "1")
    ]
    assert command_words(None, [], {"resume": True, "run_dir": "RUN"})[2:] == [
        *("--resume", "--run-dir=RUN")
    ]
    for options in ({"stages": 2}, {"resume": True}):
        with pytest.raises(pipeworker.UsageError, match="job_file: missing; give its path, or res"):
            command_words(None, [], options)


def test_a_mistake_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pipeworker.UsageError, match=r"^job file .*no\.py: No such file"):
        pipeworker.launch("no.py", stages=1)
    with pytest.raises(pipeworker.UsageError, match=r"^pipeworker\.launch\(\): debug: it needs"):
        pipeworker.launch("no.py", debug=True)
    assert not list(tmp_path.iterdir())


def launch_events(
    folder: Path, monkeypatch: pytest.MonkeyPatch, found: tuple[str, str, int], **more: Any
) -> pipeworker.LaunchResult:
    """Launch a job whose command writes these events and errors, and ends with this status."""
    (folder / "events").write_text(found[0])
    (folder / "errors").write_text(found[1])
    program = folder / "program"
    texts = f"cd '{folder}'; cat events; cat errors >&2"
    program.write_text(f"#!/bin/sh\n{texts}; exit {found[2]}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return pipeworker.launch("job.py", **more)


ROW = StepResult(1, math.nan, 4, 0.1, 40.0, math.nan, 0.1, 0.25, 0)
EVENTS = [
    {"event": "plan", "steps": 2, "first_step": 1},
    {"event": "evaluation", "step": 0, "loss": 2.5, "accuracy": None},
    {"event": "step", **strict(dataclasses.asdict(ROW))},
    {"event": "output", "worker": "[0]", "text": "printed"},
    {"event": "note", "text": "noted"},
    {"event": "warning", "text": "warned"},
    {
        "event": "end",
        "run_dir": "R",
        "steps": 2,
        "loss": None,
        "seconds": 1.5,
        "checkpoint": None,
    },
]


def test_what_a_job_reports_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    events = "the cluster's own words\n[3]\n" + "\n".join(map(json.dumps, EVENTS))
    result = launch_events(tmp_path, monkeypatch, (events, "", 0))
    assert (result.steps, result.loss, result.seconds, result.summary) == (2, None, 1.5, {})
    assert result.checkpoint is None
    shown, errors = capfd.readouterr()
    assert shown.splitlines() == [
        *("the cluster's own words", "[3]", "step 0/2  starting"),
        "evaluation before step 1  loss 2.5000  accuracy nan",
        "step 1/2  loss nan  lr 0.1  40.0 samples/s  bubble 25.0%",
        "[0] printed",
    ]
    assert errors == "note: noted\nwarning: warned\n"
    launch_events(tmp_path, monkeypatch, (events, "", 0), quiet=True)
    assert capfd.readouterr() == ("", "warning: warned\n")


def test_the_steps_and_the_figures_of_lines_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan, *_, end = EVENTS
    rows = [dataclasses.replace(ROW, step=step, lr=step) for step in range(2, 9)]
    steps = [{"event": "step", **strict(dataclasses.asdict(row))} for row in rows]
    events = [plan | {"steps": 8, "first_step": 2}, *steps, end]
    found = "\n".join(map(json.dumps, events)), "", 0
    launch_events(tmp_path, monkeypatch, found, log_every=3, verbose=True)
    _, *shown = capfd.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown] == ["2/8", "3/8", "6/8", "8/8"]
    assert all("  gradient norm nan  epoch 0" in line for line in shown)
    assert not any("loss scale" in line for line in shown)
    events[0] |= {"log_every": 3}  # pipeworker.toml gives it
    found = "\n".join(map(json.dumps, events)), "", 0
    launch_events(tmp_path, monkeypatch, found, verbose=True)
    assert capfd.readouterr().out.splitlines()[1:] == shown
    for wrong in ({"log_every": 0}, {"log_every": "3"}, {"quiet": True, "verbose": True}):
        with pytest.raises(pipeworker.UsageError, match=r"must be an integer|they exclude each"):
            launch_events(tmp_path, monkeypatch, found, **wrong)


@pytest.mark.parametrize(
    ("status", "events", "errors", "message"),
    [
        (1, '{"event": "end", "error": "it failed"}', "", "it failed"),
        (2, "", "note: n\nerror: --x: wrong\n  and more\n", "--x: wrong\n  and more"),
        (1, "", "Killed\n", "Killed"),
        (3, "", "", "the job ended with status 3"),
    ],
)
def test_the_error_of_the_command_is_raised(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    events: str,
    errors: str,
    message: str,
) -> None:
    with pytest.raises(pipeworker.PipeworkerError) as raised:
        launch_events(tmp_path, monkeypatch, (events, errors, status))
    assert str(raised.value) == message
    assert isinstance(raised.value, pipeworker.UsageError) == (status == 2)


INTERRUPTED = """
import os
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print("leads its session:", os.getsid(0) == os.getpid())
print("begun", flush=True)
signal.sigwait([signal.SIGINT])
"""
TWICE = """
print("again", flush=True)
signal.sigwait([signal.SIGINT])
"""


@pytest.mark.parametrize(
    ("saved", "more"),
    [(True, ""), (False, ""), (False, TWICE)],
    ids=["saved", "not saved", "interrupted again"],
)
def test_an_interrupt_is_passed_on_and_raised_when_the_job_has_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved: bool,
    more: str,
) -> None:
    end = {"event": "end", "checkpoint": "R/c" if saved else None, "checkpoint_step": 7}
    program, ended = tmp_path / "program", tmp_path / "ended"
    # A shell could not trap a signal that is ignored when it starts, as in a job of the background.
    last = f"print({json.dumps(end)!r})\nopen({str(ended)!r}, 'w')\nexit(130)\n"
    program.write_text(f"#!{sys.executable}\n{INTERRUPTED}{more}{last}")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    shown: list[str] = []

    def line(self: JobProgress, text: str, *, error: bool = False) -> None:
        shown.append(text)
        if text in ("begun", "again"):
            raise KeyboardInterrupt

    monkeypatch.setattr(JobProgress, "line", line)
    with pytest.raises(KeyboardInterrupt):
        pipeworker.launch("job.py")
    how = "interrupted: step 7 is saved in R/c; resume=True continues"
    first = "leads its session: True"  # else Ctrl-C would reach it from the terminal as well
    assert ended.exists()
    assert shown == [first, "begun", *(["again"] if more else []), *([how] if saved else [])]


def test_a_job_ends_if_it_cannot_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, ended = tmp_path / "program", tmp_path / "ended"
    program.write_text(f"#!{sys.executable}\n{INTERRUPTED}open({str(ended)!r}, 'w')\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    def line(self: JobProgress, text: str, *, error: bool = False) -> None:
        if text == "begun":
            raise BrokenPipeError

    monkeypatch.setattr(JobProgress, "line", line)
    with pytest.raises(BrokenPipeError):
        pipeworker.launch("job.py")
    assert ended.exists()


def test_a_command_that_only_submits_the_job_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As ``--on kubernetes`` does, it shows how to follow the job, and ends without its result."""
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    with pytest.raises(pipeworker.PipeworkerError, match="the job was submitted, and its end is"):
        pipeworker.launch("job.py", on="kubernetes", stages=1)
    assert "launch --json --on=kubernetes --stages=1 job.py" in capfd.readouterr().out
    with pytest.raises(pipeworker.PipeworkerError, match="own commands:\n-m pipeworker launch"):
        pipeworker.launch("job.py", on="kubernetes", stages=1, quiet=True)


def test_a_job_is_launched(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    losses, _, _ = plain_loop(jobs.write(JOB), microbatches=4, steps=3)
    monkeypatch.chdir(jobs.folder)
    for name, value in jobs.forking.items():
        monkeypatch.setenv(name, value)
    result = pipeworker.launch("job.py", stages=1, steps=3, run_dir="launched")
    assert (result.run_dir, result.steps) == (jobs.folder / "launched", 3)
    assert result.loss == losses[-1]
    assert (result.summary["status"], result.best_evaluation) == ("done", None)
    assert result.checkpoint == jobs.folder / "launched/checkpoints/step-00000003"
    assert "step 3/3  loss " in capfd.readouterr().out
    assert pipeworker.launch(resume="launched", steps=4).steps == 4
