"""``--resume``: options and run directories, before any process starts."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import socket
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import nn

import cli
import pipeworker
from pipeworker.display.style import Style
from pipeworker.errors import UsageError
from pipeworker.job.options import Options
from pipeworker.ranks.rank_info import RankInfo
from pipeworker.runs.begin import PreparedRun, RunRequest
from support.in_process.checkpoints import complete
from support.real_jobs.resume_command import NEW, RESUME, Command, command_in

command = pytest.fixture(command_in)


def test_the_defaults_in_help_are_those_of_a_job() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    for option in cli.launch.params:
        if isinstance(option, click.Option) and option.show_default:
            assert option.default == defaults[str(option.name)], option.name


@pytest.mark.usefixtures("users_defaults", "users_device")
def test_the_record_of_a_new_run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pipeworker", "launch", "and so on"])
    before = datetime.now(timezone.utc).replace(microsecond=0)
    made = command.launch("--seed", "5", "--balance", "1,2", *NEW, "--", "a", "b")
    assert made == Options(
        *(str(command.job_file), 2, 8, ("a", "b")), seed=5, balance=(1, 2), threads=made.threads
    )
    found = command.record
    assert before <= datetime.fromisoformat(found.pop("started")) <= datetime.now(timezone.utc)
    options = {**dataclasses.asdict(made), "balance": [1, 2], "arguments": ["a", "b"]}
    for name in ("resume", "resume_step"):
        del options[name]
    assert found.pop("options") == options
    assert found.pop("job_sha256")
    assert found.pop("platform")
    assert found == {
        "version": 2,
        "origins": {},
        "command": ["pipeworker", "launch", "and so on"],
        "versions": {
            "pipeworker": pipeworker.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": "job.py",
        "arguments": ["a", "b"],
        "seed": 5,
        "resumed": [],
        "torchrun": None,
    }
    assert (command.run.path / "job.py").read_text() == "job = 1\n"


def test_options_that_are_not_given_stay(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    first = command.launch(
        *("--seed", "5", "--steps", "10", "--threads", "3", "--clip-grad-norm", "0.5"),
        *("--balance", "1,2", "--stop-on-nan", "--checkpoint-every", "30m", *NEW, "--", "a b"),
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert command.launch(*RESUME) == first
    moved = dataclasses.replace(first, steps=20, stages=3, balance=None, recompute="never")
    words = ("--steps", "20", "--stages", "3", "--recompute", "never")
    assert command.launch(*words, *RESUME) == moved
    assert command.launch(*RESUME) == moved  # as of the latest start
    calm = dataclasses.replace(moved, stop_on_nan=False)
    assert command.launch("--no-stop-on-nan", *RESUME) == calm
    assert [entry["options"] for entry in command.record["resumed"]] == [
        {},
        {"steps": 20, "stages": 3, "balance": None, "recompute": "never"},
        {},
        {"stop_on_nan": False},
    ]


def test_a_run_resumes_from_its_newest_intact_checkpoint(command: Command) -> None:
    command.launch(*NEW)
    for step in (2, 4, 6):
        complete(command.run, step)
    (command.run.checkpoints.at(6) / "state-00001-of-00001.json").unlink()
    rows = [json.dumps({"step": step}) + "\n" for step in range(1, 8)]
    command.run.metrics.write_text("".join(rows))
    command.run.summary.write_text("{}")
    options = command.launch(*RESUME)
    assert (options.resume, options.resume_step) == (str(command.run.checkpoints.at(4)), 4)
    (warning,) = command.warnings
    where = command.run.checkpoints.at(6) / "state-00001-of-00001.json"
    aside = "step-00000006 is damaged and set aside, as damaged-step-00000006: "
    assert warning.startswith(f"{aside}{where}: is missing; ")
    assert command.run.metrics.read_text() == "".join(rows[:4])
    assert not command.run.summary.exists()
    assert [(e["step"], e["options"]) for e in command.record["resumed"]] == [(4, {})]
    assert command.launch(*RESUME).resume_step == 4
    assert not command.warnings


def test_a_run_without_a_checkpoint_starts_again(command: Command) -> None:
    command.launch(*NEW)
    assert command.launch(*RESUME).resume == ""
    assert command.warnings == [
        "the run in run: no complete checkpoint yet; it starts again from step 1"
    ]


def test_resuming_a_finished_run_is_reported(command: Command) -> None:
    command.launch("--steps", "4", *NEW)
    complete(command.run, 4)
    assert command.launch(*RESUME).resume_step == 4
    warning = "the run in run has already done its 4 steps: give more --steps to train further"
    assert command.warnings == [warning]
    command.launch("--steps", "5", *RESUME)
    assert not command.warnings


def test_options_that_change_numbers_are_rejected_unless_allowed_by_name(command: Command) -> None:
    command.launch(*NEW, "--", "a")
    complete(command.run, 3)
    words = ("--seed", "1", "--microbatches", "4", *RESUME, "--", "b")
    assert command.refused(*words) == (
        "the run in run: would continue with other numbers, by --seed (0, now 1), "
        "--microbatches (8, now 4), arguments (a, now b); leave them out, or allow them to change: "
        "--allow-change seed --allow-change microbatches --allow-change arguments\n"
    )
    some = ("--allow-change", "seed", "--allow-change", "microbatches")
    assert "by arguments (a, now b); leave" in command.refused(*some, *words)
    found = command.launch(*some, "--allow-change", "arguments", *words)
    assert (found.seed, found.microbatches, found.arguments) == (1, 4, ("b",))
    assert command.launch(*RESUME) == found
    assert command.launch("--allow-change", "arguments", *RESUME).arguments == ()


def test_options_that_contradict_each_other(command: Command) -> None:
    command.launch(*NEW)
    complete(command.run, 3)
    for words, expected in (
        (("--resume", "job.py"), "--resume: no run is given; add --run-dir"),
        (("--resume",), "JOB_FILE: missing; write `"),
        (("--resume", "--steps", "9", "run"), "--resume: no run is given after it; write --resume"),
        (("--resume", "runs/typo"), "--resume runs/typo: no such run; give the directory"),
        (("--resume", "run", "--run-dir=b"), "--resume run and --run-dir: both name a run"),
        (
            ("--auto-resume", *RESUME),
            "--resume and --auto-resume: they exclude each other; choose one\n",
        ),
        (
            ("--allow-change", "seed", *NEW),
            "--allow-change: a new run may have any options; add --resume, or remove it",
        ),
        (
            ("--allow-change", "sead", *RESUME),
            "--allow-change sead: must be one of seed, microbatches, ",
        ),
        (("--steps", "2", *RESUME), "--steps 2: the run in run is at step 3 already"),
        (("--seed", "-1", *RESUME), "--seed -1: must be 0 or more"),
        (("--balance", "1,1,1", *RESUME), "--balance 1,1,1: is for 3 stages, but there are 2"),
        (("--run-dir", "run", *NEW), "run directory run: exists already; choose another"),
    ):
        assert command.refused(*words).startswith(expected)
    assert command.launch("--steps", "3", *RESUME).steps == 3


def test_auto_resume_allows_changes(command: Command) -> None:
    """The same command begins the run, and continues it with the changed option."""
    words = ("--auto-resume", "--allow-change", "seed", "--seed")
    assert command.launch(*words, "3", *NEW).seed == 3
    complete(command.run, 1)
    assert command.launch(*words, "4", *NEW).seed == 4
    error = command.refused("--auto-resume", "--run-dir=run", "--allow-change", "sead", *NEW)
    assert error.startswith("--allow-change sead: must be one of seed, ")


def test_a_directory_that_is_no_run_directory(command: Command) -> None:
    (command.folder / "run").mkdir()
    for name in ("run", "nowhere"):
        error = command.refused("--resume", "--run-dir", name, "job.py")
        where = command.folder / name
        assert error == f"{where}: not the directory of a run; give one that has a run.json\n"
    assert not (command.folder / "nowhere").exists()


def test_a_directory_without_an_intact_checkpoint(command: Command) -> None:
    command.launch(*NEW)
    for step in (2, 4):
        (complete(command.run, step) / "manifest.json").write_text("")
    error = command.refused(*RESUME)
    head, *damaged = error.splitlines()
    assert head == f"{command.run.checkpoints.path}: every checkpoint is damaged; restore one:"
    for line, step in zip(damaged, (4, 2), strict=True):
        path = command.run.checkpoints.at(step) / "manifest.json"
        assert line.startswith(f"  {path.parent.name}: {path}: cannot be read: ")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"fly": 1}, "there is no option 'fly'"),
        ({"seed": "1"}, "--seed '1': must be of type int, not str"),
        ({"stages": None}, "--stages None: must be of type int, not null"),
        ({"own_loop": True}, "the run in run: has the loop of a pipeworker.Pipeline"),
        ({"seed": -1}, "--seed -1: must be 0 or more"),
    ],
)
def test_invalid_recorded_options(command: Command, changed: dict[str, Any], expected: str) -> None:
    command.launch(*NEW)
    found = command.record
    found["options"] |= changed
    command.run.run.write_text(json.dumps(found))
    assert expected in command.refused(*RESUME)


def test_a_record_of_a_version_with_fewer_options(command: Command) -> None:
    command.launch("--seed", "4", "--keep", "5", *NEW)
    found = command.record
    del found["options"]["keep"]
    command.run.run.write_text(json.dumps(found))
    made = command.launch(*RESUME)
    assert (made.seed, made.keep) == (4, 2)
    del found["options"]["microbatches"]
    command.run.run.write_text(json.dumps(found))
    assert "the option microbatches is missing" in command.refused(*RESUME)


def test_system_errors_name_the_path(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device", str(command.run.run))

    monkeypatch.setattr("os.fsync", full)
    result = command("--run-dir", "run", *NEW)
    assert (result.exit_code, result.output) == (
        1,
        f"error: {command.run.run}: cannot be written: No space left on device\n",
    )


# A rank of a torchrun job, and a script.


@pytest.fixture
def ranks(command: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PreparedRun | None]:
    """Return a function that runs the command as a rank, and returns the run of rank 0."""
    prepared: list[PreparedRun] = []

    def run(place: RankInfo, requested: RunRequest, view: Style) -> int:
        if place.rank == 0:
            prepared.append(requested.prepare())
            prepared[0].close()
        return 0

    def start(rank: int, world: int, *words: str) -> PreparedRun | None:
        prepared.clear()
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for name, value in {"RANK": str(rank), "WORLD_SIZE": str(world), **address}.items():
            monkeypatch.setenv(name, value)
        result = command(*words, command=cli.worker)
        assert result.exit_code == 0, result.output
        return prepared[0] if prepared else None

    monkeypatch.setattr("launcher.torchrun.run", run)
    return start


def test_a_rank_of_torchrun(command: Command, ranks: Callable[..., PreparedRun | None]) -> None:
    command.launch("--balance", "1,2", *NEW)
    complete(command.run, 3)
    made = ranks(0, 4, *RESUME)
    assert made
    options = made.options
    assert (options.stages, options.microbatches, options.balance) == (4, 8, None)
    assert options.resume == str(command.run.checkpoints.at(3))
    before = command.content()
    assert ranks(1, 4, "--resume", "--run-dir", "on another host", "job.py") is None
    assert command.content() == before


def test_a_script(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[RunRequest] = []

    def session(place: RankInfo, job: object, request: RunRequest, **_: object) -> None:
        request.validate()
        requested.append(request)
        raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "pipeworker_job", raising=False)  # of another test
    monkeypatch.setattr("pipeworker.session.train.Session", session)
    job: dict[str, Any] = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD}

    def train(**words: Any) -> PreparedRun:
        with pytest.raises(KeyboardInterrupt):
            pipeworker.train([nn.ReLU()], **job, data=[], **words)
        prepared = requested.pop().prepare()
        prepared.close()
        return prepared

    first = train(run_dir="run", seed=3, microbatches=2, steps=5).options
    complete(command.run, 2)
    path = str(command.run.checkpoints.at(2))
    resumed = dataclasses.replace(first, steps=9, resume=path, resume_step=2)
    assert train(run_dir="run", resume=True, steps=9).options == resumed
    changed = dataclasses.replace(resumed, seed=4)
    assert train(run_dir=Path("run"), resume=True, seed=4, allow_change="seed").options == changed
    for wrong, expected in (
        ({"resume": True}, "--resume: no run is given; add --run-dir"),
        (
            {"resume": True, "run_dir": "run", "allow_change": ["x"]},
            "--allow-change x: must be one of",
        ),
        (
            {"allow_change": ["seed"]},
            "--allow-change: a new run may have any options; add --resume",
        ),
        ({"allow": "seed"}, "train\\(\\): allow: this option was renamed; use allow_change"),
        ({"read_data": "once"}, "use data_reader, where once is now called first"),
        ({"init_partial": True}, "use init_strict=False for init_partial=True"),
        ({"restarts": 3}, "restarts: this option was renamed, and is only for the command line"),
    ):
        with pytest.raises(UsageError, match=expected):
            pipeworker.train([nn.ReLU()], **job, data=[], **wrong)
    with pytest.raises(UsageError, match="--resume: no run is given"):
        pipeworker.Pipeline([nn.ReLU()], **job, resume=True)
