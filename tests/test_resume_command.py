"""``--resume``: what is made of words and of a run directory before a process is started."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import socket
from collections.abc import Callable
from datetime import datetime, timezone
from io import StringIO
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import cli
import pipeworker
from pipeworker.errors import UsageError
from pipeworker.job.options import Options
from pipeworker.record.rundir import RunDir
from pipeworker.session.begin import Asked, Begun
from pipeworker.session.place import Place
from pipeworker.session.show.plain import Show
from pipeworker.session.show.view import View
from pipeworker.wire.lines import Planned
from support.checkpoints import complete
from support.jobs import Jobs
from support.ranks import Scripts, script
from support.sources import JOB


class Command:
    """The command line in a folder with a job file; jobs themselves are only noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job_file = folder / "job.py"
        self.job_file.write_text("job = 1\n")
        self.run = RunDir(folder / "run")
        self.begun: list[tuple[Options, RunDir, tuple[str, ...]]] = []

    def __call__(self, *words: str, command: click.Command = cli.main) -> Result:
        line = ["launch", *words] if command is cli.main else list(words)
        return CliRunner().invoke(command, line)

    def launch(self, *words: str) -> Options:
        """A new run, or one that goes on: with which options."""
        before = len(self.begun)
        result = self("--run-dir", "run", *words)
        assert result.exit_code == 0, result.output
        ((options, run_dir, _),) = self.begun[before:]
        assert run_dir == self.run
        return options

    def refused(self, *words: str) -> str:
        """What is said of words that are wrong, when nothing was begun or changed."""
        before, content = len(self.begun), self.content()
        result = self(*words)
        assert result.exit_code == 2, result.output
        assert result.output.startswith("error: ")
        assert (len(self.begun), self.content()) == (before, content)
        return result.output.removeprefix("error: ")

    @property
    def warnings(self) -> list[str]:
        """Of the run that was begun last."""
        return list(self.begun[-1][2])

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run.run.read_text())
        return found

    def content(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)
    made = Command(tmp_path.resolve())

    def run(begun: Begun, view: View) -> int:
        made.begun.append((begun.options, begun.run_dir, begun.warnings))
        begun.close()
        return 0

    monkeypatch.setattr("launcher.local.run", run)
    return made


NEW = ("--stages", "2", "job.py")
RESUME = ("--resume", "--run-dir", "run", "job.py")


def test_what_the_command_shows_as_defaults_are_those_of_a_job() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    for option in cli.launch.params:
        if isinstance(option, click.Option) and option.show_default:
            assert option.default == defaults[str(option.name)], option.name


def test_a_run_is_recorded_as_it_begins(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
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
        "version": 1,
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


def test_what_is_not_said_is_as_it_was(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    first = command.launch(
        *("--seed", "5", "--steps", "10", "--threads", "3", "--clip-grad-norm", "0.5"),
        *("--balance", "1,2", "--stop-on-nan", "--checkpoint-every", "30m", *NEW, "--", "a b"),
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert command.launch(*RESUME) == first
    moved = dataclasses.replace(first, steps=20, stages=3, balance=None, recompute="never")
    words = ("--steps", "20", "--stages", "3", "--recompute", "never")
    assert command.launch(*words, *RESUME) == moved
    assert command.launch(*RESUME) == moved  # as it was the last time
    calm = dataclasses.replace(moved, stop_on_nan=False)
    assert command.launch("--no-stop-on-nan", *RESUME) == calm
    assert [entry["options"] for entry in command.record["resumed"]] == [
        {},
        {"steps": 20, "stages": 3, "balance": None, "recompute": "never"},
        {},
        {"stop_on_nan": False},
    ]


def test_a_run_goes_on_from_its_newest_whole_checkpoint(command: Command) -> None:
    command.launch(*NEW)
    for step in (2, 4, 6):
        complete(command.run, step)
    (command.run.checkpoint(6) / "state-00001-of-00001.json").unlink()
    rows = [json.dumps({"step": step}) + "\n" for step in range(1, 8)]
    command.run.metrics.write_text("".join(rows))
    command.run.summary.write_text("{}")
    options = command.launch(*RESUME)
    assert (options.resume, options.resume_step) == (str(command.run.checkpoint(4)), 4)
    (warning,) = command.warnings
    assert warning.startswith("a damaged checkpoint is set aside: ")
    assert "step-00000006/state-00001-of-00001.json is missing" in warning
    assert command.run.metrics.read_text() == "".join(rows[:4])
    assert not command.run.summary.exists()
    assert [(e["step"], e["options"]) for e in command.record["resumed"]] == [(4, {})]
    assert command.launch(*RESUME).resume_step == 4
    assert not command.warnings


def test_a_run_without_a_checkpoint_begins_anew(command: Command) -> None:
    command.launch(*NEW)
    assert command.launch(*RESUME).resume == ""
    assert command.warnings == ["run has no complete checkpoint yet: it begins anew"]


def test_a_run_that_is_at_its_end_already_says_so(command: Command) -> None:
    command.launch("--steps", "4", *NEW)
    complete(command.run, 4)
    assert command.launch(*RESUME).resume_step == 4
    said = "the run in run has done its 4 steps: --steps says to how many it goes on"
    assert command.warnings == [said]
    command.launch("--steps", "5", *RESUME)
    assert not command.warnings


def test_a_job_file_may_have_moved_or_changed(command: Command) -> None:
    command.launch(*NEW)
    complete(command.run, 3)
    moved = command.folder / "elsewhere" / "net.py"
    moved.parent.mkdir()
    command.job_file.rename(moved)
    words = (*RESUME[:-1], str(moved))
    assert command.launch(*words).job_file == str(moved)
    assert not command.warnings
    moved.write_text("job = 2\n")
    command.launch(*words)
    (warning,) = command.warnings
    assert warning.startswith(f"{moved} has changed since it last ran here: see job-2.py. What")
    assert (command.run.path / "job.py").read_text() == "job = 1\n"
    assert (command.run.path / "job-2.py").read_text() == "job = 2\n"


def test_other_numbers_are_refused_unless_they_are_allowed_by_name(command: Command) -> None:
    command.launch(*NEW, "--", "a")
    complete(command.run, 3)
    words = ("--seed", "1", "--microbatches", "4", *RESUME, "--", "b")
    assert command.refused(*words) == (
        "the run in run was begun with other options, and would go on with other numbers:\n"
        "  --seed: 0, now 1\n"
        "  --microbatches: 8, now 4\n"
        "  arguments: a, now b\n"
        "leave them out, or say that they may differ: "
        "--allow seed --allow microbatches --allow arguments\n"
    )
    some = ("--allow", "seed", "--allow", "microbatches")
    assert "  arguments: a, now b\nleave" in command.refused(*some, *words)
    found = command.launch(*some, "--allow", "arguments", *words)
    assert (found.seed, found.microbatches, found.arguments) == (1, 4, ("b",))
    assert command.launch(*RESUME) == found
    assert command.launch("--allow", "arguments", *RESUME).arguments == ()


def test_words_that_do_not_go_together(command: Command) -> None:
    command.launch(*NEW)
    complete(command.run, 3)
    for words, expected in (
        (("--resume", "job.py"), "--resume needs --run-dir: the directory of the run that goes on"),
        (("--allow", "seed", *NEW), "--allow is of --resume: a new run may have any options"),
        (("--allow", "sead", *RESUME), "--allow sead: must be one of seed, microbatches, "),
        (("--steps", "2", *RESUME), "--steps 2: the run in run is at step 3 already"),
        (("--seed", "-1", *RESUME), "--seed -1: must be 0 or more"),
        (("--balance", "1,1,1", *RESUME), "--balance 1,1,1 is for 3 stages, but there are 2"),
        (("--run-dir", "run", *NEW), "run directory run exists already: choose another"),
    ):
        assert command.refused(*words).startswith(expected)
    assert command.launch("--steps", "3", *RESUME).steps == 3


def test_a_directory_of_no_run(command: Command) -> None:
    (command.folder / "run").mkdir()
    for name in ("run", "nowhere"):
        said = command.refused("--resume", "--run-dir", name, "job.py")
        where = command.folder / name
        assert said == f"{where} is not the directory of a run: no run.json is there\n"
    assert not (command.folder / "nowhere").exists()


def test_a_directory_without_a_whole_checkpoint(command: Command) -> None:
    command.launch(*NEW)
    for step in (2, 4):
        (complete(command.run, step) / "manifest.json").write_text("")
    said = command.refused(*RESUME)
    assert said.startswith(
        f"no checkpoint in {command.run.checkpoints} is whole:\n  step-00000004: "
    )
    assert "\n  step-00000002: cannot read " in said


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"fly": 1}, "there is no option 'fly'"),
        ({"seed": "1"}, "an option is a str, not a int"),
        ({"stages": None}, "an option is a NoneType, not a int"),
        ({"own_loop": True}, "the run in run is of a pipeworker.Pipeline"),
        ({"seed": -1}, "--seed -1: must be 0 or more"),
    ],
)
def test_options_that_no_run_had(command: Command, changed: dict[str, Any], expected: str) -> None:
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


def test_what_the_system_refuses_is_said_with_its_path(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device", str(command.run.run))

    monkeypatch.setattr("os.fsync", full)
    result = command("--run-dir", "run", *NEW)
    assert (result.exit_code, result.output) == (
        1,
        f"error: cannot write {command.run.run}: No space left on device\n",
    )


# A rank of a torchrun job, and a script.


@pytest.fixture
def ranks(command: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Begun | None]:
    """The command as a rank; gives what rank 0 has begun."""
    begun: list[Begun] = []

    def run(place: Place, asked: Asked, view: View) -> int:
        if place.rank == 0:
            begun.append(asked.begin())
            begun[0].close()
        return 0

    def start(rank: int, world: int, *words: str) -> Begun | None:
        begun.clear()
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for name, value in {"RANK": str(rank), "WORLD_SIZE": str(world), **address}.items():
            monkeypatch.setenv(name, value)
        result = command(*words, command=cli.worker)
        assert result.exit_code == 0, result.output
        return begun[0] if begun else None

    monkeypatch.setattr("launcher.torchrun.run", run)
    return start


def test_a_rank_of_torchrun(command: Command, ranks: Callable[..., Begun | None]) -> None:
    command.launch("--balance", "1,2", *NEW)
    complete(command.run, 3)
    made = ranks(0, 4, *RESUME)
    assert made
    options = made.options
    assert (options.stages, options.microbatches, options.balance) == (4, 8, None)
    assert options.resume == str(command.run.checkpoint(3))
    before = command.content()
    assert ranks(1, 4, "--resume", "--run-dir", "on another host", "job.py") is None
    assert command.content() == before


def test_a_script(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Asked] = []

    def session(place: Place, job: object, request: Asked, **_: object) -> None:
        request.check()
        asked.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeworker.session.pipeline.Session", session)
    job: dict[str, Any] = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD}

    def train(**words: Any) -> Begun:
        with pytest.raises(KeyboardInterrupt):
            pipeworker.train([nn.ReLU()], **job, data=[], **words)
        begun = asked.pop().begin()
        begun.close()
        return begun

    first = train(run_dir="run", seed=3, microbatches=2, steps=5).options
    complete(command.run, 2)
    path = str(command.run.checkpoint(2))
    resumed = dataclasses.replace(first, steps=9, resume=path, resume_step=2)
    assert train(run_dir="run", resume=True, steps=9).options == resumed
    changed = dataclasses.replace(resumed, seed=4)
    assert train(run_dir=Path("run"), resume=True, seed=4, allow="seed").options == changed
    for wrong, expected in (
        ({"resume": True}, "--resume needs --run-dir"),
        ({"resume": True, "run_dir": "run", "allow": ["x"]}, "--allow x: must be one of"),
        ({"allow": ["seed"]}, "--allow is of --resume"),
    ):
        with pytest.raises(UsageError, match=expected):
            pipeworker.train([nn.ReLU()], **job, data=[], **wrong)
    with pytest.raises(UsageError, match="no option 'resume'"):
        pipeworker.Pipeline([nn.ReLU()], **job, resume=True)


# What the user sees.


def test_how_a_run_goes_on_is_shown(jobs: Jobs, scripts: Scripts) -> None:
    """By the command, and by a script."""
    job_file = jobs.write(JOB)
    said = {"steps": 1, "microbatches": 2}
    Asked(str(job_file), 1, said, jobs.folder / "run").begin().close()
    done = jobs.pipeworker("launch", "--resume", "--run-dir", "run", "job.py")
    assert (done.returncode, done.stderr) == (
        *(0, "warning: run has no complete checkpoint yet: it begins anew\n"),
    )
    train = """
        pipeworker.train(
            model, loss=loss, optimizer=optimizer, data=data, run_dir="run", resume=True
        )
    """
    loop = jobs.folder / "script-1" / "loop.py"
    loop.parent.mkdir()
    Asked(str(loop), 1, said, loop.parent / "run").begin().close()
    (run,) = scripts.start(script(JOB, train), 1, alone=True).succeed()
    changed = f"warning: {loop} has changed since it last ran here: see job-1.py. What an optimizer"
    assert run.stderr.startswith(done.stderr + changed)
    assert len(run.stderr.splitlines()) == len(done.stderr.splitlines()) + 1
    assert "done: 1 step in" in run.stdout


def test_from_where_it_goes_on_is_shown() -> None:
    out = StringIO()
    for step in (0, 4):
        options = Options("job.py", 2, 8, resume_step=step)
        Show(options, "/run", View(), out, out).hear(Planned("gpipe", 8, (1, 2), 0.5))
    plan = "2 stages (1,2 layers), 8 micro-batches, gpipe; run directory /run"
    new, _, old, _ = out.getvalue().splitlines()
    assert (new, old) == (plan, f"{plan}, from step 4")
