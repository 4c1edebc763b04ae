"""What Slurm is asked for, and what an allocation becomes. For real: the suite of all launchers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cluster import sbatch, slurm
from launcher.cluster.slurm import Allocation
from launcher.spec import Condition, Host, JobSpec
from pipeworker.errors import PipeworkerError, UsageError

COPIED = Path(__file__).parents[2] / "deploy" / "slurm" / "job.sh"
SPEC = JobSpec(
    name="train",
    job_file="/project/train.py",
    workers=8,
    words=("--steps", "10000", "--checkpoint-every", "30m"),
    arguments=("--width", "4096"),
    folder="/project",
    run_dir="/project/runs/train",
    nodes=2,
    settings={"partition": "gpu", "gpus-per-node": "4", "time": "24:00:00"},
)


def test_the_script_to_copy_is_what_is_rendered() -> None:
    assert slurm.render(SPEC, "python").text() == COPIED.read_text()


def test_what_the_user_sets_goes_before_what_we_do() -> None:
    spec = replace(
        SPEC, settings={"cpus-per-task": "16K", "requeue": "", "exclusive": "", "qos": "a b"}
    )
    lines = slurm.render(spec, "/opt/python").text().splitlines()
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert directives.count("--cpus-per-task=16K") == 1  # sbatch knows what it takes
    assert "--exclusive" in directives
    assert "--qos='a b'" in directives
    assert len({line.partition("=")[0] for line in directives}) == len(directives)
    assert any(line.startswith("/opt/python -m pipeworker launch --stages 8 ") for line in lines)


@pytest.mark.parametrize("name", ["", "-p", "Partition", "a b", "a\n"])
def test_what_is_no_option_of_sbatch_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="must be a long option of sbatch"):
        slurm.render(replace(SPEC, settings={name: "x"}), "python")


@pytest.mark.parametrize(
    ("text", "counts"), [("4", (4,)), ("4(x2),3", (4, 4, 3)), ("1,2(x3)", (1, 2, 2, 2))]
)
def test_counts_as_slurm_shortens_them(text: str, counts: tuple[int, ...]) -> None:
    assert slurm.of_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "4(x)", "4(2)", "4,"])
def test_what_are_no_counts_is_said(text: str) -> None:
    with pytest.raises(UsageError, match="is no list of numbers"):
        slurm.of_counts(text)


def test_nodes_share_the_workers_and_srun_carries_their_agents() -> None:
    found = slurm.carried(replace(SPEC, workers=5), Allocation(("n1", "n2"), (8, 4)))
    assert [one.host for one in found] == [Host("n1", 3), Host("n2", 2)]
    line = found[1].line
    assert line[:5] == ("srun", "--nodes=1", "--ntasks=1", "--nodelist=n2", "--overlap")
    assert "--cpus-per-task=4" in line
    assert line[line.index(sys.executable) :][-4:] == (
        "pipeworker.host.forkserver",
        "/project/train.py",
        "/project/runs/train/run.json",
        "SLURM_LAUNCH_NODE_IPADDR",
    )
    with pytest.raises(UsageError, match="the allocation has 2 nodes, and the job 1 workers"):
        slurm.carried(replace(SPEC, workers=1, nodes=1), Allocation(("a", "b"), (1, 1)))


@pytest.mark.parametrize(
    ("environment", "inside"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "1"}, True),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}, False),
    ],
)
def test_an_allocation_is_used_but_not_by_what_srun_has_started(
    environment: dict[str, str], inside: bool
) -> None:
    assert slurm.is_inside(environment) is inside


# A stand-in for Slurm's commands.


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path


def stands_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("said", "condition"),
    [
        ("JobState=PENDING Reason=Resources ExitCode=0:0", Condition("waiting", "Resources")),
        ("JobState=RUNNING Reason=None ExitCode=0:0", Condition("running", "RUNNING")),
        ("JobState=COMPLETED Reason=None ExitCode=0:0", Condition("done", "COMPLETED")),
        (
            "JobState=FAILED Reason=NonZeroExitCode ExitCode=2:0",
            Condition("failed", "NonZeroExitCode", 2),
        ),
        ("JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15", Condition("failed", "TimeLimit")),
    ],
)
def test_how_a_job_is(commands: Path, said: str, condition: Condition) -> None:
    stands_in(commands, "scontrol", f"echo JobId=7 JobName=x {said} RunTime=0")
    assert sbatch.Sbatch("7", commands / "log").status() == condition


def test_why_a_job_waits_is_said_once(
    commands: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sbatch, "_LOOK_SECONDS", 0)
    said = "JobId=7 JobState=$1 Reason=$2 ExitCode=0:0"
    states = ("PENDING None", "PENDING Resources", "PENDING Resources", "COMPLETED None")
    lines = "".join(f"{number}) set {state};; " for number, state in enumerate(states, 1))
    count = f"echo >> {commands}/calls; n=$(wc -l < {commands}/calls)"
    stands_in(commands, "scontrol", f"{count}; case $n in {lines} esac; echo {said}")
    assert sbatch.Sbatch("7", commands / "log").follow() == 0
    assert capsys.readouterr().err == "job 7 waits: Resources\n"


def test_a_job_that_slurm_has_forgotten_is_absent(commands: Path) -> None:
    stands_in(
        commands, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )
    assert sbatch.Sbatch("7", commands / "log").status() == Condition("absent")
    stands_in(commands, "scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(PipeworkerError, match="scontrol: Unable to contact slurm controller"):
        sbatch.Sbatch("7", commands / "log").status()


def test_a_job_that_is_refused_or_has_no_slurm_is_a_mistake(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = slurm.render(replace(SPEC, run_dir=str(commands / "run")), "python")
    stands_in(
        commands, "sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1"
    )
    with pytest.raises(UsageError, match="invalid partition specified: gpu"):
        sbatch.Sbatch.submit(script)
    stands_in(commands, "sbatch", f"cat > {commands}/script; echo '12;cluster'")
    assert sbatch.Sbatch.submit(script).job == "12"
    assert (commands / "script").read_text() == script.text()
    monkeypatch.setenv("PATH", str(commands / "none"))
    with pytest.raises(UsageError, match="Slurm's command sbatch: No such file"):
        sbatch.Sbatch.submit(script)


def test_an_allocation_is_read(commands: Path) -> None:
    stands_in(commands, "scontrol", "echo n1; echo n2")
    environment = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    assert sbatch.allocation(environment) == Allocation(("n1", "n2"), (4, 4))
    for name in environment:
        with pytest.raises(UsageError, match=f"{name}' is not set"):
            sbatch.allocation({k: v for k, v in environment.items() if k != name})
    with pytest.raises(UsageError, match="2 nodes, 1 counts"):
        sbatch.allocation({**environment, "SLURM_JOB_CPUS_PER_NODE": "4"})
