"""Options of `launch` for its display, and the commands that it shows to the user."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cli
from launcher.display_options import commands_for
from pipeworker.display.commands import Commands
from pipeworker.display.style import Style
from pipeworker.runs.begin import PreparedRun

RUN = ("--stages", "2", "--run-dir", "run", "job.py")


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[Any]]]:
    """Return a function that runs `launch` without the job.

    It returns the result, and a list of the run directory and the style.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("def model(): ...\n")
    seen: list[Any] = []

    def run(prepared: PreparedRun, view: Style, agents: object) -> int:
        with closing(prepared):
            seen.extend((prepared.run_dir, view))
        return 0

    monkeypatch.setattr("launcher.local.run", run)
    return lambda *words: (CliRunner().invoke(cli.main, ["launch", *words, *RUN]), seen)


def test_display_options_are_not_options_of_the_job(launch: Callable[..., Any]) -> None:
    result, (run_dir, view) = launch("-v", "--log-every", "5", "--output", "all")
    assert result.exit_code == 0, result.output
    assert (
        view.quiet,
        view.verbose,
        view.log_every,
        view.output,
    ) == (False, True, 5, "all")
    recorded = run_dir.run.read_text().partition('"options"')[2].partition("}")[0]
    assert '"stages": 2' in recorded
    assert not any(name in recorded for name in ("log_every", "verbose", "quiet", '"output'))


def test_a_project_may_set_display_options(launch: Callable[..., Any]) -> None:
    Path("pipeworker.toml").write_text('log-every = 7\noutput = "none"\n')
    result, (_, view) = launch()
    assert result.exit_code == 0, result.output
    assert (view.log_every, view.output) == (7, "none")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-q", "-v"), "--quiet and --verbose: they exclude each other; choose one"),
        (("--log-every", "0"), "--log-every 0: must be an integer of 1 or more"),
        (("--output", "some"), "'some' is not one of 'stage', 'all', 'none'"),
    ],
)
def test_an_error_is_reported_before_the_run_directory_is_made(
    launch: Callable[..., Any], words: tuple[str, ...], expected: str
) -> None:
    result, seen = launch(*words)
    assert result.exit_code == 2
    assert expected in result.output
    assert not seen
    assert not Path("run").exists()


def test_a_cluster_job_receives_the_display_options(launch: Callable[..., Any]) -> None:
    result, _ = launch("--on", "slurm", "--dry-run", "-q", "--log-every", "5", "--output", "all")
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if "--log-every" in line]
    assert "--quiet" in line
    assert "--log-every 5" in line
    assert "--output all" in line


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all programs be on the path, in the folder of this interpreter."""
    there = Path(sys.executable).parent
    monkeypatch.setattr("shutil.which", lambda name: str(there / name))


JOB = "/jobs/job.py"


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(
    "hosts",
    [
        (),
        ("--hosts", "a:2,b:2", "--sync", "--launcher-address", "10.0.0.1"),
        ("--hosts-file=there",),
        ("--on", "ray", "--nodes", "2", "--set", "gpus=1", "--set", "patience=9"),
    ],
)
def test_the_resume_command_is_the_typed_command(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...]
) -> None:
    words = ["launch", *hosts, "--steps", "9", JOB, "--", "--hosts", "x"]
    monkeypatch.setattr("sys.argv", ["/bin/pipeworker", *words])
    script, module = ("pipeworker",), (Path(sys.executable).name, "-m", "pipeworker")
    assert commands_for("pipeworker", JOB, {}) == Commands(
        script, ("pipeworker", "launch", *hosts), JOB
    )
    assert commands_for("python -m pipeworker", JOB, {}) == Commands(
        module, (*module, "launch", *hosts), JOB
    )


@pytest.mark.usefixtures("found")
def test_a_job_under_torchrun_is_resumed_with_torchrun() -> None:
    ranks = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    alone = commands_for("python -m pipeworker", JOB, ranks)
    assert alone.start == ("torchrun", "--nproc-per-node", "4", "-m", "pipeworker")
    two = commands_for("python -m pipeworker", JOB, {**ranks, "WORLD_SIZE": "8"})
    pod = commands_for(
        "python -m pipeworker", JOB, {**ranks, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    )
    batch = commands_for("pipeworker", JOB, {"SLURM_JOB_ID": "7"})
    for ways in (two, pod, batch):  # the typed command is unknown
        assert ways.start == ()
        assert ways.resume("runs/x") == "the same command, with --resume --run-dir runs/x"


def test_a_program_that_is_not_on_the_path_is_shown_with_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["/opt/venv/bin/pipeworker", "launch"])
    assert commands_for("pipeworker", JOB, {}).program == ("/opt/venv/bin/pipeworker",)
    ways = commands_for("python -m pipeworker", JOB, {})
    assert ways.program == (sys.executable, "-m", "pipeworker")
    ranks = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    ways = commands_for("python -m pipeworker", JOB, ranks)
    assert ways.start[:3] == (sys.executable, "-m", "torch.distributed.run")
