"""Mistakes that are found before a process starts."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import subprocess
import sys
import textwrap
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner, Result

import cli
from launcher import local
from launcher.local import default_stages
from pipeworker.errors import PipeworkerError
from pipeworker.runs.begin import RunRequest
from pipeworker.wire.lines import Verdict
from support.real_jobs.sources import JOB


def launch(folder: Path, *words: str) -> Result:
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
        (("--schedule", "fastest"), "fastest: no such schedule or file"),
        (("--recompute", "maybe"), "'maybe' is not one of 'auto', 'always', 'except_first'"),
        (("--device", "tpu"), "'tpu' is not one of 'auto', 'cpu'"),
        (("--backend", "mpi"), "'mpi' is not one of 'auto', 'gloo', "),
        (("--balance", "3,x"), "--balance '3,x': not a list of layer counts"),
        (("--balance", "5,0"), "--balance '5,0': not a list of layer counts"),
        (("--stagess", "2"), "error: --stagess: no such option; did you mean --stages or "),
        (("--quiet=3",), "error: --quiet: does not take a value; write --quiet"),
        (("--", "--lr", "2"), "error: JOB_FILE: missing before --; write: job.py -- --lr"),
        (("--threads", "two"), "error: --threads: 'two' is not a valid integer; see `pipeworker "),
        (
            ("--batch-size", "32"),
            "error: --batch-size: no such option; the batch is what data() yields: change it there "
            "(--microbatches only divides it)",
        ),
        (("--lr", "2"), "--lr: no such option; is it for the job file? Write: job.py -- --lr"),
    ],
)
def test_wrong_options(tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    run_dir = tmp_path / "run"
    result = launch(
        tmp_path, "--run-dir", str(run_dir), "--stages", "2", *words, str(tmp_path / "job.py")
    )
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())
    assert not run_dir.exists()


def test_a_wrong_argument_gets_one_line(tmp_path: Path) -> None:
    assert launch(tmp_path).output == (
        "error: JOB_FILE: missing; write `pipeworker launch [OPTIONS] JOB_FILE [ARGUMENTS]...`\n"
    )
    expected = "error: --steps: requires an argument; write --steps VALUE\n"
    assert launch(tmp_path, "--steps").output == expected
    result = CliRunner().invoke(cli.main, ["show", "a", "b"], prog_name="pipeworker")
    assert result.output == "error: b: unexpected; write `pipeworker show [OPTIONS] RUN`\n"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("launch", "--stages", "2", ""), "JOB_FILE"),
        (("launch", "--stages", "2", "--run-dir", "", "job.py"), "--run-dir"),
        (("launch", "--stages", "2", "--init-from", "", "job.py"), "--init-from"),
        (("launch", "--resume", ""), "--run-dir"),
        (("export", "run", ""), "OUT"),
        (("show", ""), "RUN"),
        (("cancel", ""), "RUN"),
        (("list", ""), "[DIR]"),
        (("trace", "run", "-o", ""), "-o / --output"),
    ],
)
def test_an_empty_path(words: tuple[str, ...], name: str) -> None:
    """An unset variable of the shell gives one, which would be the current folder; and "-"."""
    result = CliRunner().invoke(cli.main, words, prog_name="pipeworker")
    assert result.output == f"error: {name}: is empty; see `pipeworker {words[0]} --help`\n"
    assert result.exit_code == 2
    dash = ["-" if word == "" else word for word in words]
    result = CliRunner().invoke(cli.main, dash, prog_name="pipeworker")
    assert ": is '-', which names no file; see `pipeworker" in result.output


@pytest.mark.parametrize(
    "words",
    [
        ("launch", "--stages", "2", "--schedule", "{}", "job.py"),
        ("launch", "--stages", "2", "--config", "{}", "job.py"),
        ("plan", "--stages", "2", "--svg", "{}"),
        ("cancel", "{}"),
    ],
)
def test_a_path_that_is_too_long(words: tuple[str, ...]) -> None:
    words = tuple(word.format("x" * 5000) for word in words)
    result = CliRunner().invoke(cli.main, words, prog_name="pipeworker")
    assert result.output.endswith(": File name too long; give another path\n")
    assert result.exit_code == 2


def test_an_accelerator_that_the_host_lacks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other hosts may have it, so a worker reports it."""
    words = ("--stages", "2", "--device", "xpu")
    assert launch(tmp_path, *words, str(tmp_path / "job.py")).exit_code == 2
    assert "--device xpu: torch sees no XPU device on this host" in capfd.readouterr().err


def test_a_backend_that_the_devices_lack(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Other hosts may have it, so a worker reports it."""
    words = ("--stages", "2", "--device", "cpu", "--backend", "nccl")
    assert launch(tmp_path, *words, str(tmp_path / "job.py")).exit_code == 2
    errors = capfd.readouterr().err.splitlines()
    assert errors == [
        "error: --backend nccl: requires CUDA devices, but stages compute on cpu; "
        "use --backend auto"
    ]


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


def test_a_pipe_that_a_shell_makes_is_no_job_file(tmp_path: Path) -> None:
    """As `launch <(…)`: the name that its descriptor resolves to is no path."""
    reads, writes = os.pipe()
    try:
        path = f"/dev/fd/{reads}"
        result = launch(tmp_path, "--run-dir", str(tmp_path / "run"), "--stages", "2", path)
    finally:
        os.close(reads)
        os.close(writes)
    expected = f"error: job file {path}: it is a pipe; give the path of a Python file\n"
    assert (result.exit_code, result.output) == (2, expected)


def test_an_existing_run_directory_is_not_changed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("precious")
    words = ("--stages", "2", str(tmp_path / "job.py"))
    result = launch(tmp_path, "--run-dir", str(run_dir), *words)
    assert result.exit_code == 2
    text = "exists already and is no run; choose another --run-dir"
    assert f"run directory {run_dir}: {text}" in result.output
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]
    file = run_dir / "metrics.jsonl"
    result = launch(tmp_path, "--run-dir", str(file), *words)
    assert f"run directory {file}: is no folder; choose another --run-dir" in result.output
    result = launch(tmp_path, "--run-dir", str(file / "deeper"), *words)
    assert result.exit_code == 2
    assert "cannot be made" in result.output


MISTAKE = Verdict("failed", 2, 0, 0.1, (), 0.0, "what is wrong")


@pytest.mark.parametrize(
    ("verdict", "stays"),
    [
        (MISTAKE, False),
        (dataclasses.replace(MISTAKE, exit_status=0, job_exited=True), False),
        (dataclasses.replace(MISTAKE, exit_status=1), True),
        (dataclasses.replace(MISTAKE, steps=1), True),
        (None, True),
    ],
)
def test_a_mistake_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict | None, stays: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    prepared = RunRequest(str(tmp_path / "job.py"), 1, {}).prepare()
    prepared.run_dir.metrics.touch()
    prepared.close(verdict)
    assert (tmp_path / "runs").exists() == stays


def test_records_of_a_scripts_own_loop_are_kept(tmp_path: Path) -> None:
    prepared = RunRequest(str(tmp_path / "job.py"), 1, {}, tmp_path / "run").prepare()
    prepared.run_dir.evaluation.write_text("{}\n")
    prepared.close(MISTAKE)
    assert prepared.run_dir.run.exists()


def runs_here(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as a separate interpreter would, without importing torch again."""
    assert command[:2] == [sys.executable, "-c"]
    with redirect_stdout(io.StringIO()) as output:
        exec(command[2], {})
    return subprocess.CompletedProcess(command, 0, output.getvalue(), "")


def test_stages_are_required_without_accelerators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(subprocess, "run", runs_here)
    result = launch(tmp_path, str(tmp_path / "job.py"))
    assert result.exit_code == 2
    assert "--stages: this host has no accelerator; specify the number of stages" in result.output


def test_a_missing_job_file_is_noticed_before_accelerators_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(*_: object) -> NoReturn:
        raise AssertionError("torch is imported for nothing")

    monkeypatch.setattr(local, "default_stages", count)
    result = CliRunner().invoke(cli.main, ["launch", str(tmp_path / "none.py")])
    assert "none.py: No such file or directory" in result.output


def test_accelerators_are_not_counted_by_a_module_beside_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, count in (("job", 1234), ("installed", 8)):
        (tmp_path / folder).mkdir()
        text = f"class accelerator: device_count = lambda: {count}\n"
        (tmp_path / folder / "torch.py").write_text(text)
    monkeypatch.chdir(tmp_path / "job")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    assert default_stages(1) == 8


@pytest.mark.parametrize(
    ("status", "errors", "reason"),
    [
        (1, "Traceback\n  x\nImportError: libcudart.so: cannot open\n", "ImportError: libcudart"),
        (-9, "", "was killed by SIGKILL; "),
    ],
)
def test_a_torch_that_cannot_count_accelerators_is_reported(
    monkeypatch: pytest.MonkeyPatch, status: int, errors: str, reason: str
) -> None:
    answer = subprocess.CompletedProcess[str]([], status, "", errors)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(PipeworkerError, match=f"torch cannot be imported .*: {reason}"):
        default_stages(1)


def test_what_else_an_interpreter_prints_is_no_count_of_accelerators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = subprocess.CompletedProcess[str]([], 0, "using plugin 2\n8\nbye\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert default_stages(1) == 8


def test_accelerators_are_counted_behind_a_line_without_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = SimpleNamespace(device_count=lambda: print("a plugin", end="") or 8)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=accelerator))
    monkeypatch.setattr(subprocess, "run", runs_here)
    assert default_stages(1) == 8


@pytest.mark.parametrize(("replicas", "stages"), [(1, 8), (2, 4), (3, 2), (16, 1)])
def test_the_default_is_a_stage_for_each_accelerator_of_a_replica(
    monkeypatch: pytest.MonkeyPatch, replicas: int, stages: int
) -> None:
    answer = subprocess.CompletedProcess[str]([], 0, "8\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert default_stages(replicas) == stages
