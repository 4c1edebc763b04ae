"""Mistakes seen before a process starts, and names of a job file that are wrong, one by one."""

from __future__ import annotations

import dataclasses
import io
import re
import subprocess
import sys
import textwrap
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.job import file as job_file
from pipeworker.session.begin import Asked
from pipeworker.wire.lines import Verdict
from pipeworker.worker.step.data import Reader
from support.sources import JOB


def launch(folder: Path, *words: str) -> Result:
    import cli

    path = folder / "job.py"
    if not path.exists():
        path.write_text(textwrap.dedent(JOB))
    return CliRunner().invoke(cli.main, ["launch", *words], prog_name="pipeworker")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--stages", "0"), "--stages 0: must be 1 or more"),
        (("--stages", "two"), "'two' is not a valid integer"),
        (("--microbatches", "0"), "--microbatches 0: must be 1 or more"),
        (("--steps", "0"), "--steps 0: must be 1 or more"),
        (("--threads", "0"), "--threads 0: must be 1 or more"),
        (("--seed", "-1"), "--seed -1: must be 0 or more"),
        (("--clip-grad-norm", "0"), "--clip-grad-norm 0.0: must be greater than 0"),
        (("--clip-grad-norm", "nan"), "--clip-grad-norm nan: must be greater than 0"),
        (("--worker-timeout", "0"), "--worker-timeout 0.0: must be greater than 0"),
        (("--schedule", "fastest"), "'fastest' is not "),
        (("--recompute", "maybe"), "'maybe' is not one of 'auto', 'always', 'except_first'"),
        (("--device", "tpu"), "'tpu' is not one of 'auto', 'cpu'"),
        (("--backend", "mpi"), "'mpi' is not one of 'auto', 'gloo', "),
        (("--balance", "3,x"), "--balance '3,x' is not a list of layer counts"),
        (("--balance", "5,0"), "--balance '5,0' is not a list of layer counts"),
        (("--stagess", "2"), "No such option"),
        (("--lr", "2"), "No such option '--lr'. Is it the job file's own? job.py -- --lr"),
    ],
)
def test_options_that_are_wrong(tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    run_dir = tmp_path / "run"
    result = launch(
        tmp_path, "--run-dir", str(run_dir), "--stages", "2", *words, str(tmp_path / "job.py")
    )
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())
    assert not run_dir.exists()


def test_a_backend_that_devices_do_not_have(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It may be that of other hosts, so a worker says so."""
    words = ("--stages", "2", "--device", "cpu", "--backend", "nccl")
    assert launch(tmp_path, *words, str(tmp_path / "job.py")).exit_code == 2
    said = capfd.readouterr().err.splitlines()
    assert said == ["error: --backend nccl needs CUDA devices, and stages compute on cpu"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory"),
        ("def model(:\n", "job.py, line 1: invalid syntax"),
        ("if True:\npass\n", "job.py, line 2: expected an indented block"),
        ("x = '\0'", "null bytes"),
    ],
)
def test_a_job_file_that_cannot_be_read(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "job.py"
    run_dir = tmp_path / "run"
    words = ("--run-dir", str(run_dir), "--stages", "2", str(path))
    path.write_text(content or "")
    if content is None:
        words = (*words[:-1], str(tmp_path / "other.py"))
    result = launch(tmp_path, *words)
    assert result.exit_code == 2
    assert re.match(f"error: job file .*{re.escape(expected)}", result.output), result.output
    assert not run_dir.exists()


def test_a_run_directory_that_exists_is_left_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("precious")
    words = ("--stages", "2", str(tmp_path / "job.py"))
    result = launch(tmp_path, "--run-dir", str(run_dir), *words)
    assert result.exit_code == 2
    assert f"run directory {run_dir} exists already: choose another --run-dir" in result.output
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]
    result = launch(tmp_path, "--run-dir", str(run_dir / "metrics.jsonl" / "deeper"), *words)
    assert result.exit_code == 2
    assert "cannot make run directory" in result.output


MISTAKE = Verdict("failed", 2, 0, 0.1, (), 0.0, "what is wrong")


@pytest.mark.parametrize(
    ("verdict", "stays"),
    [
        (MISTAKE, False),
        (dataclasses.replace(MISTAKE, exit_status=0, own=True), False),
        (dataclasses.replace(MISTAKE, exit_status=1), True),
        (dataclasses.replace(MISTAKE, steps=1), True),
        (None, True),
    ],
)
def test_a_mistake_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict | None, stays: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = Asked(str(tmp_path / "job.py"), 1, {}).begin()
    begun.run_dir.metrics.touch()
    begun.close(verdict)
    assert (tmp_path / "runs").exists() == stays


def test_what_a_loop_of_ones_own_has_recorded_stays(tmp_path: Path) -> None:
    begun = Asked(str(tmp_path / "job.py"), 1, {}, tmp_path / "run").begin()
    begun.run_dir.evaluation.write_text("{}\n")
    begun.close(MISTAKE)
    assert begun.run_dir.run.exists()


def runs_here(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """As an interpreter of its own would, without importing torch again."""
    assert command[:2] == [sys.executable, "-c"]
    with redirect_stdout(io.StringIO()) as output:
        exec(command[2], {})
    return subprocess.CompletedProcess(command, 0, output.getvalue(), "")


def test_stages_must_be_said_without_accelerators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(subprocess, "run", runs_here)
    result = launch(tmp_path, str(tmp_path / "job.py"))
    assert result.exit_code == 2
    assert "no accelerator: say how many stages with --stages" in result.output


# The names of a job file, one by one.


def job(**names: Any) -> ModuleType:
    module = ModuleType("job")
    good = {
        "model": lambda: [nn.Linear(2, 2)],
        "loss": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD,
        "data": list,
    }
    vars(module).update(good, **names)
    return module


@pytest.mark.parametrize("name", ["model", "loss", "optimizer", "data"])
def test_a_name_that_is_missing(name: str) -> None:
    module = job()
    delattr(module, name)
    with pytest.raises(UsageError, match=rf"job file j\.py lacks the name {name}: it must define"):
        job_file.check(module, "job file j.py")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model", 3, "model in job file j.py is a int: it must be an nn.Sequential, a list"),
        ("model", nn.Linear(2, 2), "model in job file j.py is a Linear: it must be"),
        ("loss", None, "loss in job file j.py is a NoneType: it must be a function"),
        ("optimizer", "adam", "optimizer in job file j.py is a str: it must be a function"),
        ("scheduler", 0.5, "scheduler in job file j.py is a float: it must be a function"),
        ("data", 7, "data in job file j.py is a int: it must be an iterable of (input, target)"),
    ],
)
def test_a_name_of_the_wrong_kind(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        job_file.check(job(**{name: value}), "job file j.py")


class _OwnForward(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: None, "model() returned a NoneType: it must return an nn.Sequential or a list"),
        (lambda: nn.Linear(2, 2), "model() returned a Linear: it must return an nn.Sequential"),
        (list, "model() returned no layers"),
        ([nn.ReLU(), 3], "layer 1 of model() is a int: each must be an nn.Module or a function"),
        (_OwnForward(nn.ReLU()), "a forward of its own, which a pipeline cannot cut"),
    ],
)
def test_a_model_that_is_no_sequence_of_layers(model: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        job_file.entries(job_file.check(job(model=model), "job file j.py"))


def test_a_layer_that_builds_something_else() -> None:
    with pytest.raises(UsageError, match=r"layer 4 of model\(\) was built as a dict: it must be"):
        job_file.build(dict, 4)  # type: ignore[arg-type]


X, Y = torch.zeros(4, 2), torch.zeros(4)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([], "data() is empty"),
        (lambda: None, "data() gave a NoneType: it must be an iterable of (input, target)"),
        ([X], "data() gave a Tensor: it must be a pair (input, target)"),
        ([(X, Y, Y)], "data() gave a tuple of 3: it must be a pair (input, target)"),
        ([(X, Y[:3])], "disagree in dim 0, the batch: (4, 2), (3,)"),
        ([({"a": X, "b": X[:1]}, Y)], "disagree in dim 0, the batch: (4, 2), (1, 2), (4,)"),
        ([(X, torch.tensor(1.0))], "a tensor without dims: dim 0 of every tensor is the batch"),
        ([(X[:0], Y[:0])], "a mini-batch without samples"),
        ([("text", Y)], "an input without a tensor"),
    ],
)
def test_data_that_is_wrong(data: Any, expected: str) -> None:
    reader = Reader(data, microbatches=2, seed=0, epochs=1)
    with pytest.raises(UsageError, match=re.escape(expected)):
        reader.read()


def test_data_that_gives_nothing_when_started_again() -> None:
    reader = Reader(iter([(X, Y)]), microbatches=2, seed=0, epochs=None)
    assert reader.read() is not None
    with pytest.raises(UsageError, match="make data a function, so that each epoch gets a fresh"):
        reader.read()
    kept = iter([(X, Y)])
    reader = Reader(lambda: kept, microbatches=2, seed=0, epochs=None)
    assert reader.read() is not None
    with pytest.raises(UsageError, match="have it make a fresh iterator each time it is called"):
        reader.read()
