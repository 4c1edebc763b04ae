"""What is shown, as it is said on the command line; and the commands a user is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cli
from launcher import view
from launcher.view import ways_of
from pipeworker.session.begin import Begun
from pipeworker.session.show.view import View, Ways

RUN = ("--stages", "2", "--run-dir", "run", "job.py")


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[Any]]]:
    """Runs the command, but for the job; gives its result, and what it was begun with."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("def model(): ...\n")
    seen: list[Any] = []

    def run(begun: Begun, view: View) -> int:
        with closing(begun):
            seen.extend((begun.run_dir, view))
        return 0

    monkeypatch.setattr("launcher.local.run", run)
    return lambda *words: (CliRunner().invoke(cli.main, ["launch", *words, *RUN]), seen)


def test_what_is_shown_is_no_option_of_the_job(launch: Callable[..., Any]) -> None:
    result, (run_dir, view) = launch("-v", "--log-every", "5", "--output", "all")
    assert result.exit_code == 0, result.output
    assert (view.quiet, view.verbose, view.log_every, view.output) == (False, True, 5, "all")
    recorded = run_dir.run.read_text().partition('"options"')[2].partition("}")[0]
    assert '"stages": 2' in recorded
    assert not any(name in recorded for name in ("log_every", "verbose", "quiet", '"output'))


def test_a_project_may_say_how_often(launch: Callable[..., Any]) -> None:
    Path("pipeworker.toml").write_text('log-every = 7\noutput = "none"\n')
    result, (_, view) = launch()
    assert result.exit_code == 0, result.output
    assert (view.log_every, view.output) == (7, "none")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-q", "-v"), "--quiet and --verbose: choose one"),
        (("--log-every", "0"), "--log-every 0: must be 1 or more"),
        (("--output", "some"), "'some' is not one of 'stage', 'all', 'none'"),
    ],
)
def test_a_mistake_is_found_before_anything_is_made(
    launch: Callable[..., Any], words: tuple[str, ...], said: str
) -> None:
    result, seen = launch(*words)
    assert result.exit_code == 2
    assert said in result.output
    assert not seen
    assert not Path("run").exists()


def test_a_cluster_is_told_what_to_show(launch: Callable[..., Any]) -> None:
    result, _ = launch("--on", "slurm", "--dry-run", "-q", "--log-every", "5", "--output", "all")
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if "--log-every" in line]
    assert "--quiet" in line
    assert "--log-every 5" in line
    assert "--output all" in line


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs are on the path, in the folder of this interpreter."""
    there = Path(sys.executable).parent
    monkeypatch.setattr("shutil.which", lambda name: str(there / name))


SAID = {"job_file": "/jobs/job.py", "hosts": None, "hosts_file": None}


@pytest.mark.usefixtures("found")
def test_how_to_go_on_is_the_command_that_was_typed() -> None:
    python = Path(sys.executable).name
    ours, module = ("pipeworker",), (python, "-m", "pipeworker")
    job = ("/jobs/job.py",)
    assert ways_of("pipeworker", SAID, {}) == Ways(ours, ("pipeworker", "launch"), job)
    assert ways_of("python -m pipeworker", SAID, {}) == Ways(module, (*module, "launch"), job)
    hosts = ways_of("pipeworker", {**SAID, "hosts": "a:2,b:2"}, {})
    assert hosts.begin == ("pipeworker", "launch", "--hosts", "a:2,b:2")
    hosts = ways_of("pipeworker", {**SAID, "hosts_file": "there"}, {})
    assert hosts.begin == ("pipeworker", "launch", "--hosts-file", "there")


@pytest.mark.usefixtures("found")
def test_a_job_of_torchruns_goes_on_with_torchrun() -> None:
    ranks = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    alone = ways_of("python -m pipeworker", SAID, ranks)
    assert alone.begin == ("torchrun", "--nproc-per-node", "4", "-m", "pipeworker")
    two = ways_of("python -m pipeworker", SAID, {**ranks, "WORLD_SIZE": "8"})
    pod = ways_of("python -m pipeworker", SAID, {**ranks, "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    batch = ways_of("pipeworker", SAID, {"SLURM_JOB_ID": "7"})
    for ways in (two, pod, batch):  # nobody here knows what was typed
        assert ways.begin == ()
        assert ways.resume("runs/x") == "the same command, with --resume --run-dir runs/x"


def test_a_program_that_is_not_on_the_path_is_named_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["/opt/venv/bin/pipeworker", "launch"])
    assert ways_of("pipeworker", SAID, {}).program == ("/opt/venv/bin/pipeworker",)
    ways = ways_of("python -m pipeworker", SAID, {})
    assert ways.program == (sys.executable, "-m", "pipeworker")
    assert view._torchrun() == (sys.executable, "-m", "torch.distributed.run")
