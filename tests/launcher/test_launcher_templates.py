"""The example job files of `pipeworker init`: each is written, and its loss decreases."""

from __future__ import annotations

import importlib
import itertools
import os
import resource
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import cli
from launcher import templates
from pipeworker.job import file as job_file
from support.real_jobs.jobs import COMMAND, Jobs
from support.slow import slow

STEPS = {"mlp": 60, "cnn": 30, "transformer": 20, "unet": 20, "finetune": 20}
"""Steps after which the loss of an example is clearly lower."""


class Whole(nn.Module):
    """A module whose input is a dict of keyword arguments."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.module(**batch)


def network(made: Any) -> nn.Module:
    if isinstance(made, nn.Module) and not isinstance(made, nn.Sequential):
        return Whole(made)
    return nn.Sequential(*(one if isinstance(one, nn.Module) else one() for one in made))


def mean(loss: Any) -> torch.Tensor:
    """Return a loss as one number: it may be a sum and a count."""
    result: torch.Tensor = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    return result


def init(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["init", *words], prog_name="pipeworker")


@pytest.mark.parametrize(
    "example",
    [pytest.param(one, marks=() if one == "transformer" else slow) for one in templates.EXAMPLES],
)
def test_the_loss_of_an_example_decreases(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["model.py"])
    if example == "finetune":
        pytest.importorskip("transformers")
    module = importlib.import_module(f"launcher.templates.{example}")
    job = job_file.check(module, "it")
    torch.manual_seed(0)
    net = network(module.model())
    optimizer = job.optimizer(net.parameters())
    losses = []
    for x, y in itertools.islice(module.data(), STEPS[example]):
        optimizer.zero_grad()
        loss = mean(job.loss(net(x), y))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    with torch.no_grad():
        x, y = next(iter(module.evaluation()))
        assert mean(job.loss(net(x), y)) < losses[0]
        if job.metrics is not None:
            assert 0 <= job.metrics(net(x), y)["accuracy"] <= 1


@pytest.mark.parametrize("example", templates.EXAMPLES)
def test_an_example_explains_each_of_its_functions(example: str) -> None:
    lines = Path(cli.__file__, "..", "launcher", "templates", f"{example}.py").resolve().read_text()
    for name in ("model", "loss", "optimizer", "data", "evaluation"):
        before, _, _ = lines.partition(f"\ndef {name}(")
        assert before != lines
        assert before.rpartition("\n")[2].startswith("# "), name


def test_init_writes_an_example_with_the_command_that_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = init()
    assert done.exit_code == 0
    assert done.stdout == (
        "model.py: a small network for points in the plane\n"
        "train it:  pipeworker launch --stages 2 model.py\n"
    )
    written = Path("model.py").read_text()
    assert "    pipeworker launch --stages 2 model.py\n" in written
    second = init("--example", "cnn")
    assert (second.exit_code, second.output) == (
        2,
        "error: model.py: exists already; name another file\n",
    )
    assert Path("model.py").read_text() == written
    assert init("--example", "unet", "my net.py").stdout.endswith(" --stages 2 'my net.py'\n")
    assert "    pipeworker launch --stages 2 --evaluate-every 50 'my net.py'\n" in (
        Path("my net.py").read_text()
    )
    nowhere = init("nowhere/model.py")
    expected = "error: nowhere/model.py: No such file or directory; name another file\n"
    assert (nowhere.exit_code, nowhere.output) == (2, expected)


@pytest.mark.parametrize("name", ["x.txt", "a/", "a"])
def test_init_writes_no_file_that_launch_rejects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = init(name)
    expected = f"error: {Path(name)}: not a job file; its name must end in .py\n"
    assert (done.exit_code, done.output) == (2, expected)
    assert not list(tmp_path.iterdir())


def test_init_leaves_no_file_that_it_could_not_write(jobs: Jobs) -> None:
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (64, 64))
    done = subprocess.run(
        [*COMMAND, "init"],
        cwd=jobs.folder,
        capture_output=True,
        text=True,
        # Python would cut off the bytecode of modules that are new, and fail to load it later.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=limit,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "error: model.py: File too large; name another file\n",
    )
    assert not list(jobs.folder.iterdir())


@pytest.mark.parametrize("found", [None, "a spec"])
def test_init_names_a_package_that_the_example_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    monkeypatch.setattr(templates, "find_spec", lambda _: found)
    done = init("--example", "finetune", str(tmp_path / "model.py"))
    note = "note: the package transformers is missing; pip install transformers\n"
    assert (done.exit_code, done.stderr) == (0, "" if found else note)
    assert init(str(tmp_path / "mlp.py")).stderr == ""


def test_a_written_example_runs_unchanged(jobs: Jobs) -> None:
    done = jobs.pipeworker("init", "--example", "unet", "job.py")
    assert done.returncode == 0, done.stderr
    run = jobs.train("--stages", "2", "--steps", "1", source=(jobs.folder / "job.py").read_text())
    assert len(run.metrics) == 1
