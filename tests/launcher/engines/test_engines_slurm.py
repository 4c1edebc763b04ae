"""Tests of Slurm's script, job and allocation; test_engines_conformance.py runs a real Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.engines import slurm
from launcher.engines.slurm import Slurm, SlurmAllocation, SlurmJob, State
from launcher.spec import Host, JobSpec
from pipeworker.errors import PipeworkerError, UsageError

COPIED = Path(__file__).parents[3] / "deploy" / "slurm" / "job.sh"
SPEC = JobSpec(
    name="train",
    job_file="/project/train.py",
    workers=8,
    options=("--steps", "10000", "--checkpoint-every", "30m"),
    arguments=("--width", "4096"),
    folder="/project",
    run_dir="/project/runs/train",
    nodes=2,
    settings={"partition": "gpu", "gpus-per-node": "4", "time": "24:00:00"},
)


def test_the_file_in_deploy_is_the_rendered_script() -> None:
    assert Slurm().render(SPEC) == COPIED.read_text()


def test_settings_of_the_user_override_ours() -> None:
    spec = replace(
        SPEC, settings={"cpus-per-task": "16K", "requeue": "", "exclusive": "", "qos": "a b"}
    )
    lines = Slurm().render(replace(spec, python="/opt/python")).splitlines()
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert directives.count("--cpus-per-task=16K") == 1  # sbatch knows what it takes
    assert "--exclusive" in directives
    assert "--qos='a b'" in directives
    assert len({line.partition("=")[0] for line in directives}) == len(directives)
    first = '/opt/python -m pipeworker launch "$@" --stages 8 '
    assert any(line.startswith(first) for line in lines)


@pytest.mark.parametrize(
    ("spec", "count", "words"),
    [
        (SPEC, "", []),
        (SPEC, "0", []),
        (SPEC, "2", ["--auto-resume"]),
        (replace(SPEC, auto_resume=True), "0", ["--auto-resume"]),
        (replace(SPEC, options=("--resume",)), "2", ["--resume"]),
    ],
)
def test_a_job_resumes_by_itself_only_after_slurm_has_put_it_back(
    commands: Path, spec: JobSpec, count: str, words: list[str]
) -> None:
    stand_in(commands, "python", f"echo $* > {commands}/words")
    stand_in(commands, "squeue", "echo RUNNING")
    environment = {"PATH": f"{commands}:/bin:/usr/bin", "SLURM_RESTART_COUNT": count}
    script = Slurm().render(replace(spec, python="python"))
    subprocess.run(["bash", "-c", script], env=environment, check=True)
    found = (commands / "words").read_text().split()
    assert [word for word in found if "resume" in word] == words
    assert found[:3] == ["-m", "pipeworker", "launch"]


def test_a_job_that_is_submitted_from_a_job_step_is_none(commands: Path) -> None:
    """sbatch exports the step's variables: the launcher would use the first node alone."""
    stand_in(commands, "python", f"env > {commands}/environment")
    stand_in(commands, "squeue", "echo RUNNING")
    outer = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    environment = {"PATH": f"{commands}:/bin:/usr/bin", **outer}
    script = Slurm().render(replace(SPEC, python="python"))
    subprocess.run(["bash", "-c", script], env=environment, check=True)
    lines = (commands / "environment").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if line.startswith("SLURM_"))
    assert SlurmAllocation().is_inside(found)
    slurm.check_job_step(found)


def test_an_array_of_jobs_is_rejected() -> None:
    with pytest.raises(UsageError, match="--set array: its jobs would share a run directory"):
        Slurm().render(replace(SPEC, settings={"array": "0-3"}))


def test_gpus_that_a_task_on_each_node_would_not_get_are_rejected(commands: Path) -> None:
    """Slurm would start no job step, or give all workers of a node the GPUs of one task."""
    with pytest.raises(UsageError, match="--set gpus: each node has one job step of one task"):
        Slurm().render(replace(SPEC, settings={"gpus": "8"}))
    assert "--gpus=8" in Slurm().render(replace(SPEC, nodes=1, settings={"gpus": "8"}))
    stand_in(commands, "scontrol", "printf 'n1\\nn2\\n'")
    given = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    several = {**given, "SLURM_TASKS_PER_NODE": "4(x2)"}
    with pytest.raises(UsageError, match="SLURM_GPUS=8: each node"):
        slurm.allocated_nodes({**given, "SLURM_GPUS": "8"})
    with pytest.raises(UsageError, match="SLURM_GPUS_PER_TASK=1: each node"):
        slurm.allocated_nodes({**several, "SLURM_GPUS_PER_TASK": "1"})
    for alone in ({**given, "SLURM_GPUS_PER_TASK": "4"}, {**several, "SLURM_GPUS_PER_NODE": "4"}):
        assert len(slurm.allocated_nodes(alone)) == 2


@pytest.mark.parametrize("name", ["", "-p", "Partition", "a b", "a\n"])
def test_a_setting_that_is_not_an_option_of_sbatch_is_rejected(name: str) -> None:
    with pytest.raises(UsageError, match="must be a long option of sbatch"):
        Slurm().render(replace(SPEC, settings={name: "x"}))


def test_a_setting_is_one_line() -> None:
    with pytest.raises(UsageError, match="must be a long option of sbatch"):
        Slurm().render(replace(SPEC, settings={"comment": "a\nscancel --me"}))


@pytest.mark.parametrize(
    ("text", "counts"), [("4", (4,)), ("4(x2),3", (4, 4, 3)), ("1,2(x3)", (1, 2, 2, 2))]
)
def test_abbreviated_counts_are_parsed(text: str, counts: tuple[int, ...]) -> None:
    assert slurm.parse_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "4(x)", "4(2)", "4,"])
def test_invalid_counts_are_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="is not a list of numbers"):
        slurm.parse_counts(text)


def test_nodes_share_the_workers_and_srun_carries_their_agents() -> None:
    found = slurm.agents(replace(SPEC, workers=5), (("n1", 8), ("n2", 4)))
    assert [one.host for one in found] == [Host("n1", 3), Host("n2", 2)]
    line = found[1].command
    assert line[:5] == ("srun", "--nodes=1", "--ntasks=1", "--nodelist=n2", "--overlap")
    assert "--cpus-per-task=4" in line
    assert "--export=ALL" in line  # sbatch --export=NONE would leave the workers no PATH
    assert line[line.index(sys.executable) :][-4:] == (
        "pipeworker.host.agent",
        "/project/train.py",
        "/project/runs/train/run.json",
        "SLURM_LAUNCH_NODE_IPADDR",
    )
    assert "env" not in line
    (agent,) = slurm.agents(replace(SPEC, launcher_address="10.0.0.1"), (("n1", 8),))
    at = agent.command.index("env")
    assert agent.command[at + 1] == "SLURM_LAUNCH_NODE_IPADDR=10.0.0.1"
    with pytest.raises(UsageError, match="the allocation has 2 nodes, and the job 1 worker;"):
        slurm.agents(replace(SPEC, workers=1, nodes=1), (("a", 1), ("b", 1)))


@pytest.mark.parametrize(
    ("environment", "inside"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "1"}, True),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "4294967290"}, True),  # a shell of salloc
    ],
)
def test_an_allocation_is_used_outside_of_job_steps(
    environment: dict[str, str], inside: bool
) -> None:
    assert SlurmAllocation().is_inside(environment) is inside


# Programs of the test stand in for Slurm's commands.


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("answer", "condition"),
    [
        ("JobState=PENDING Reason=Resources ExitCode=0:0", State("PENDING", "Resources")),
        ("JobState=RUNNING Reason=None ExitCode=0:0", State("RUNNING")),
        ("JobState=COMPLETED Reason=None ExitCode=0:0", State("COMPLETED")),
        (
            "JobState=FAILED Reason=NonZeroExitCode ExitCode=2:0",
            State("FAILED", "NonZeroExitCode", 2),
        ),
        ("JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15", State("TIMEOUT", "TimeLimit")),
    ],
)
def test_the_state_of_a_job(commands: Path, answer: str, condition: State) -> None:
    stand_in(commands, "scontrol", f"echo JobId=7 JobName=x {answer} RunTime=0")
    assert SlurmJob("7", commands / "log").state() == condition


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        ("echo JobState=FAILED Reason=NonZeroExitCode ExitCode=2:0", 2, ""),
        ("echo JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15", 1, "TimeLimit"),
        ("echo JobState=CANCELLED Reason=None ExitCode=0:15", 1, "CANCELLED"),
        ("echo Invalid job id specified >&2; exit 1", 1, "Slurm does not know it"),
    ],
)
def test_a_job_that_does_not_complete_has_a_status_or_a_reason(
    commands: Path, capsys: pytest.CaptureFixture[str], script: str, status: int, error: str
) -> None:
    """With a status, the job has shown the reason itself."""
    stand_in(commands, "scontrol", script)
    assert SlurmJob("7", None).follow() == status
    assert capsys.readouterr().err == (f"error: job 7: {error}\n" if error else "")


def test_the_output_is_shown_while_the_job_runs_and_once_it_has_ended(
    commands: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = commands / "log"
    seen: list[str] = []
    monkeypatch.setattr("time.sleep", lambda _: seen.append(capsys.readouterr().out))
    log.write_bytes(b"one\xff ")
    answer = "JobState=$state Reason=None ExitCode=0:0"
    ends = f"if [ -e {commands}/call ]; then state=COMPLETED; echo two >> {log}; fi"
    script = f"state=RUNNING; {ends}; touch {commands}/call; echo {answer}"
    stand_in(commands, "scontrol", script)
    assert SlurmJob("7", log).follow() == 0
    assert ("".join(seen), capsys.readouterr().out) == ("one\ufffd ", "two\n")


@pytest.mark.parametrize(
    ("state", "words"), [("PENDING", "7"), ("RUNNING", "--batch --signal=INT 7")]
)
def test_a_job_that_runs_is_cancelled_by_a_signal_to_its_script(
    commands: Path, state: str, words: str
) -> None:
    """scancel alone would kill it, without a checkpoint."""
    stand_in(commands, "scontrol", f"echo JobState={state} Reason=None ExitCode=0:0")
    stand_in(commands, "scancel", f"echo $* > {commands}/words")
    assert SlurmJob("7", None).cancel() == "job 7 of Slurm is cancelled"
    assert (commands / "words").read_text() == f"{words}\n"


def test_a_job_is_found_by_its_run_directory(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(commands)
    stand_in(commands, "squeue", f"echo '6 (null)'; echo '7 {commands}/a run '")
    assert slurm.find("a run") == SlurmJob("7", None)
    assert slurm.find("a") is None


def test_the_reason_why_a_job_waits_is_shown_once(
    commands: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0)
    answer = "JobId=7 JobState=$1 Reason=$2 ExitCode=0:0"
    states = ("PENDING None", "PENDING Resources", "PENDING Resources", "COMPLETED None")
    lines = "".join(f"{number}) set {state};; " for number, state in enumerate(states, 1))
    count = f"echo >> {commands}/calls; n=$(wc -l < {commands}/calls)"
    stand_in(commands, "scontrol", f"{count}; case $n in {lines} esac; echo {answer}")
    assert SlurmJob("7", commands / "log").follow() == 0
    assert capsys.readouterr().err == "job 7 waits: Resources\n"


def test_a_controller_that_does_not_answer_ends_no_job(
    commands: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.01)
    count = f"echo >> {commands}/calls; n=$(wc -l < {commands}/calls)"
    fails = "echo 'Unable to contact slurm controller' >&2; exit 1"
    answer = "echo JobId=7 JobState=$1 Reason=None ExitCode=0:0"
    states = f"1|4) set RUNNING;; 2|3|5) {fails};; 6) set COMPLETED;;"
    stand_in(commands, "scontrol", f"{count}; case $n in {states} esac; {answer}")
    (commands / "log").write_text("of another jobof this one")
    assert SlurmJob("7", commands / "log", start=len("of another job")).follow() == 0
    shown = capsys.readouterr()
    lost = "job 7 goes on, but scontrol: Unable to contact slurm controller; asking again\n"
    assert shown.err == 2 * f"{lost}job 7: Slurm answers again\n"
    assert shown.out == "of this one"


def test_the_file_of_the_output_is_the_one_that_sbatch_writes(
    commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(commands, "sbatch", "cat > /dev/null; echo 12")
    here = replace(SPEC, folder=str(commands), run_dir=str(commands / "run"))

    def submitted(**settings: str) -> SlurmJob:
        return Slurm().submit(replace(here, settings=settings))

    (commands / "run.log").write_text("of another job")
    assert submitted() == SlurmJob("12", commands / "run.log", start=14)
    assert capsys.readouterr().err.endswith(f"output goes to {commands}/run.log\n")
    assert submitted(output="all/logs/%x-%j").log == commands / "all/logs/train-12"
    assert (commands / "all/logs").is_dir()
    submitted(output="%x/%j", time="2:01")
    assert not (commands / "%x").exists()  # Slurm knows its name
    submitted(time="2", signal="B:USR1@30")
    assert submitted(output="/tmp/%A", **{"job-name": "x"}).log == Path("/tmp/12")
    assert "warning" not in capsys.readouterr().err
    assert submitted(output="%N.log").log is None
    here = replace(here, run_dir=str(commands / "50%j" / "run"))
    assert "/50%%j/run.log" in Slurm().render(here)
    assert submitted().log == commands / "50%j" / "run.log"
    assert (commands / "50%j").is_dir()
    assert "goes to %N.log, which cannot be followed" in capsys.readouterr().err
    submitted(time="2")
    assert "warning: the time limit is 120 s, and the job is notified" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 120),
        ("2:30", 150),
        ("24:00:00", 86400),
        ("1:2:3", 3723),
        ("1-12", 129600),
        ("1-1:30", 91800),
        ("0-0:2:1", 121),
        ("0", None),
        ("0-0", None),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(text: str, seconds: int | None) -> None:
    assert slurm.time_limit(text) == seconds


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "srun starts this command 4 times"),
        ({"SLURM_HET_SIZE": "2"}, "a heterogeneous job of Slurm has several allocations"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ""),
        ({"SLURM_JOB_ID": "7"}, ""),
    ],
)
def test_a_launcher_in_each_task_of_a_step_is_rejected(
    environment: dict[str, str], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem) if problem else nullcontext():
        slurm.check_job_step(environment)


def test_a_job_that_slurm_has_forgotten_has_no_state(commands: Path) -> None:
    stand_in(
        commands, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )
    assert SlurmJob("7", commands / "log").state() == State()
    stand_in(commands, "scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(PipeworkerError, match="scontrol: Unable to contact slurm controller"):
        SlurmJob("7", commands / "log").state()


def test_a_rejected_job_and_a_missing_slurm_are_usage_errors(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, run_dir=str(commands / "run"))
    stand_in(
        commands, "sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1"
    )
    with pytest.raises(UsageError, match="invalid partition specified: gpu"):
        Slurm().submit(spec)
    stand_in(commands, "sbatch", f"cat > {commands}/script; echo '12;cluster'")
    assert Slurm().submit(spec).job == "12"
    assert (commands / "script").read_text() == Slurm().render(spec)
    monkeypatch.setenv("PATH", str(commands / "none"))
    with pytest.raises(UsageError, match="Slurm's command sbatch: No such file"):
        Slurm().submit(spec)


def test_paths_and_messages_have_any_bytes(commands: Path) -> None:
    spec = replace(SPEC, run_dir=os.fsdecode(os.fsencode(commands) + b"/donn\xe9es"))
    stand_in(commands, "sbatch", f"cat > {commands}/script; printf '12;r\\351seau\\n'")
    assert Slurm().submit(spec).job == "12"
    assert (commands / "script").read_bytes() == os.fsencode(Slurm().render(spec))
    stand_in(commands, "sbatch", "printf 'sbatch: error: refus\\351\\n' >&2; exit 1")
    with pytest.raises(UsageError, match="refus\udce9"):
        Slurm().submit(spec)


def test_the_allocation_comes_from_the_environment(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(commands, "scontrol", "echo n1; echo n2")
    environment = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    assert slurm.allocated_nodes(environment) == (("n1", 4), ("n2", 4))
    for name in environment:
        with pytest.raises(UsageError, match=f"{name}' is not set; unset SLURM_JOB_ID to run"):
            slurm.allocated_nodes({k: v for k, v in environment.items() if k != name})
    with pytest.raises(UsageError, match="2 nodes, but 1 counts"):
        slurm.allocated_nodes({**environment, "SLURM_JOB_CPUS_PER_NODE": "4"})
    monkeypatch.setenv("PATH", str(commands / "none"))  # as in a container
    with pytest.raises(PipeworkerError, match=r"scontrol: No such file .*; unset SLURM_JOB_ID to"):
        slurm.allocated_nodes(environment)
