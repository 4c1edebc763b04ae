"""Tests of the command line of a job that runs on other hosts."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

import cli
from launcher import choose
from launcher.engines.slurm import Slurm
from launcher.options import JOB_PARAMETERS
from pipeworker.errors import UsageError
from pipeworker.runs.begin import RunRequest
from support.real_jobs.sources import JOB
from support.slow import slow


def options_of(*line: str, **defaults: object) -> tuple[str, ...]:
    """Return the options for the ranks; `defaults` are those of a file."""
    found = []

    @click.command(params=[click.Option(["--stages"], type=int), *JOB_PARAMETERS])
    def command(**chosen: object) -> None:
        found.append(choose.rank_options(click.get_current_context()))

    command.main([*line, "job.py"], standalone_mode=False, default_map=defaults)
    return found[0]


def test_typed_options_are_passed_on_as_typed() -> None:
    typed: tuple[str, ...] = (
        "--microbatches",
        "3",
        "--steps",
        "2",
        "--clip-grad-norm",
        "0.5",
        "--resume",
    )
    typed += (
        "--allow-change",
        "seed",
        "--allow-change",
        "threads",
        "--no-stop-on-nan",
        "--no-init-strict",
    )
    found = options_of(*typed, "--stages", "3", "--run-dir", "here")
    assert options_of(*found) == found
    pairs = {"--microbatches 3", "--steps 2", "--clip-grad-norm 0.5", "--allow-change seed"}
    assert all(pair in " ".join(found) for pair in pairs | {"--allow-change threads"})
    assert {"--resume", "--no-stop-on-nan", "--no-init-strict"} <= {*found}
    assert len(found) == len(typed)  # the others are for the launcher
    assert options_of() == ()


def test_a_typed_default_is_passed_on() -> None:
    assert options_of("--seed", "0") == ("--seed", "0")  # the default, but typed


def test_a_switch_that_a_file_turns_off_is_passed_on_if_it_can_be() -> None:
    assert options_of(no_profile=True, trace=False) == ("--no-trace", "--no-profile")
    assert options_of(no_profile=False) == ()


def test_settings_are_names_and_values() -> None:
    assert choose.parse_settings(["a=b=c", "d="]) == {"a": "b=c", "d": ""}
    assert choose.parse_settings(["patch=a", "patch=b"]) == {"patch": "a\nb"}
    for wrong in ("a", "=b", ""):
        with pytest.raises(
            UsageError, match=f"--set {wrong}: not a setting; write --set NAME=VALUE"
        ):
            choose.parse_settings([wrong])


ON = ("launch", "--on", "kubernetes", "--set", "image=image")


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "My Job.py"
    path.write_text(textwrap.dedent(JOB))
    return path


@slow
@pytest.mark.usefixtures("users_defaults", "users_device")
def test_a_dry_run_prints_the_input_of_kubectl(job_file: Path) -> None:
    line = [*ON, "--dry-run", "--stages", "4", "--nodes", "2", "--seed", "3", str(job_file)]
    ran = CliRunner().invoke(cli.main, [*line, "--", "--x"])
    assert ran.exit_code == 0, ran.output
    *_, job = yaml.safe_load_all(ran.stdout)
    assert job["metadata"]["name"] == "my-job"
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    run_dir = args[args.index("--run-dir") + 1]
    assert re.fullmatch(r"/runs/my-job-\d{8}-\d{6}", run_dir)
    assert args[args.index("--") + 1 :] == [
        *("--seed", "3", "--run-dir", run_dir, "--auto-resume", "/job/My Job.py", "--", "--x")
    ]


def test_paths_of_options_are_those_in_the_pods(job_file: Path) -> None:
    line = [*ON, "--dry-run", "--stages", "4", "--init-from", "/runs/w.safetensors"]
    line += ["--set", "memory=4Gi"]  # which is not planned then
    ran = CliRunner().invoke(cli.main, [*line, "--threads", "3", str(job_file)])
    assert ran.exit_code == 0, ran.output
    assert "- /runs/w.safetensors\n" in ran.stdout
    assert "cpu: '12'\n" in ran.stdout  # one for each thread
    slurm = ["launch", "--on", "slurm", "--dry-run", "--stages", "4", "--threads", "3"]
    ran = CliRunner().invoke(cli.main, [*slurm, str(job_file)])
    assert "#SBATCH --cpus-per-task=12\n" in ran.stdout


def test_a_job_of_slurm_is_found_by_the_run_directory_that_is_typed(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cancel` compares the comment of a job that waits in the queue."""
    monkeypatch.chdir(tmp_path)
    line = ["launch", "--on", "slurm", "--dry-run", "--stages", "4", "--run-dir", "runs/x"]
    ran = CliRunner().invoke(cli.main, [*line, str(job_file)])
    assert f"#SBATCH --comment={tmp_path}/runs/x\n" in ran.stdout


class Followed:
    """A job that the user interrupts while it is followed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def follow(self) -> int:
        self.calls.append("follow")
        if len(self.calls) == 1:
            raise KeyboardInterrupt
        return 0

    def cancel(self) -> str:
        self.calls.append("cancel")
        return ""


def test_an_interrupt_cancels_a_job_that_is_followed_and_waits_for_its_end(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Followed()
    monkeypatch.setattr(Slurm, "submit", lambda *_: job)
    ran = CliRunner().invoke(cli.main, ["launch", "--on", "slurm", "--stages", "2", str(job_file)])
    assert ran.exit_code == 130
    assert job.calls == ["follow", "cancel", "follow"]
    assert "the job saves a checkpoint and ends; interrupt again" in ran.output


def test_nothing_is_submitted_for_a_run_directory_that_exists(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slurm, "submit", pytest.fail)
    run = str(tmp_path / "run")
    RunRequest(str(job_file), 2, {}, run).prepare().close()
    line = ["launch", "--on", "slurm", "--stages", "2", "--run-dir", run, str(job_file)]
    ran = CliRunner().invoke(cli.main, line)
    assert ran.exit_code == 2
    assert f"run directory {run}: exists already" in ran.output


@pytest.mark.parametrize(("on", "words"), [("slurm", "--stages 2"), ("kubernetes", "--workers 2")])
def test_a_cluster_runs_the_workers_of_all_replicas(job_file: Path, on: str, words: str) -> None:
    """Two hosts have two workers each; their ranks or launcher get the replicas as an option."""
    line = ["launch", "--on", on, "--stages", "2", "--replicas", "2", "--nodes", "2", "--dry-run"]
    image = ["--set", "image=image", "--set", "memory=4Gi"] if on == "kubernetes" else []
    ran = CliRunner().invoke(cli.main, [*line, *image, str(job_file)])
    assert ran.exit_code == 0, ran.output
    text = " ".join(ran.stdout.replace("\n", " ").replace("- ", "").replace("'", "").split())
    assert words in text
    assert "--replicas 2" in text


def test_a_cluster_resumes_a_run_with_the_workers_that_it_has_recorded(
    job_file: Path, tmp_path: Path
) -> None:
    run = str(tmp_path / "run")
    options = {"replicas": 2, "microbatches": 8, "threads": 3}
    RunRequest(str(job_file), 4, options, run).prepare().close()
    line = ["launch", "--on", "slurm", "--dry-run"]
    ran = CliRunner().invoke(cli.main, [*line, "--resume", run])
    assert ran.exit_code == 0, ran.output
    assert "#SBATCH --cpus-per-task=24\n" in ran.stdout  # three for each of eight workers
    assert "--stages 4" in ran.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dry-run",), "--stages: missing; give the number of stages of the job"),
        (("--stages", "2", "--nodes", "3"), "--nodes 3: must be 1 to the 2 workers"),
        (("--stages", "2", "--nodes", "0"), "--nodes 0: must be 1 to the 2 workers"),
        (("--stages", "2", "--steps", "0"), "--steps 0: must be 1 or more"),
        (("--stages", "2", "--set", "kind"), "--set kind: not a setting; write --set NAME=VALUE"),
        (("--hosts", "a"), "--on kubernetes and --hosts: choose one"),
        (("--hosts", "a", "--hosts-file", "b"), "--hosts and --hosts-file: choose one"),
        (("--stages", "2", "--sync"), "--sync: no host is given to send the folder to"),
        (
            ("--stages", "2", "--set", "kind=job", "--set", "kind=jobset"),
            "--set kind: given twice; give it once",
        ),
    ],
)
def test_a_mistake_is_found_before_anything_is_sent(
    job_file: Path, words: tuple[str, ...], message: str
) -> None:
    ran = CliRunner().invoke(cli.main, [*ON, *words, str(job_file)])
    assert ran.exit_code == 2
    assert message in ran.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--launcher-address: no other host connects to this one; add --hosts"),
        (("--on", "kubernetes"), "--launcher-address: no other host connects to this one"),
        (("--hosts", "a"), "--launcher-address jump: must be an IP address"),
    ],
)
def test_the_address_of_the_launcher_is_checked(
    job_file: Path, words: tuple[str, ...], message: str
) -> None:
    line = ["launch", "--stages", "2", "--launcher-address", "jump", *words, str(job_file)]
    ran = CliRunner().invoke(cli.main, line)
    assert ran.exit_code == 2
    assert message in ran.output


def test_options_of_a_cluster_require_one(job_file: Path) -> None:
    for *words, expected in (
        (
            "--nodes",
            "2",
            "--nodes: no cluster is given; add --on kubernetes or --on ray or --on slurm",
        ),
        (
            "--set",
            "image=x",
            "--set: no cluster is given; add --on kubernetes or --on ray or --on slurm",
        ),
        ("--dry-run", "--dry-run: a local job submits nothing; add --on or --hosts"),
    ):
        ran = CliRunner().invoke(cli.main, ["launch", "--stages", "2", *words, str(job_file)])
        assert ran.exit_code == 2
        assert f"error: {expected}\n" in ran.output
