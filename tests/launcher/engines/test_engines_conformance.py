"""Tests of what all engines do: jobs start, finish, fail, are cancelled, resume, lose a host.

Jobs on one host do the same in `test_resume.py`, `test_errors.py` and `test_recovery.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.clusters.slurm import Slurm, slurm
from support.clusters.sshd import servers
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import COMMAND, Jobs, Process, Record, Reference, ended, steps_of, until
from support.real_jobs.sources import DROPOUT_JOB
from support.slow import slow

STEPS = 12
WORDS = ("--microbatches", "4", "--checkpoint-every", "3", "--checkpoint-busy", "wait")
SOURCE = DROPOUT_JOB.replace("for _ in range(5)", "while True")
SLOW = """
    import time
    from pathlib import Path

    WAITS = not Path("lost").exists()
    READ = []

    def pace():
        READ.append(1)
        if WAITS and len(READ) > 5:
            time.sleep(0.3)
""" + SOURCE.replace("x = torch.randn(", "pace()\n            x = torch.randn(")
"""A job that is slow from its fifth step on, except in processes that start after ``lost``."""
CALM = SOURCE.replace(
    "x = torch.randn(", "__import__('time').sleep(0.1)\n            x = torch.randn("
)
"""A job that mostly sleeps."""
FAILS = SOURCE.replace("return x * (1", "raise ZeroDivisionError('on purpose') or x * (1")


@dataclass
class Kind(ABC):
    """A way to start jobs of two stages, as a user does."""

    jobs: Jobs

    def start(self, path: Path, *words: str, source: str = SOURCE) -> Process:
        job_file = self.jobs.write(source)
        line = ("--run-dir", str(path), *WORDS, *words, str(job_file))
        return self.jobs.python(*self.before(), *line)

    @abstractmethod
    def before(self) -> tuple[str, ...]: ...

    def cancel(self, process: Process, path: Path) -> None:
        """Cancel a job, as its user does."""
        process.send_signal(signal.SIGINT)

    def notice(self, process: Process, path: Path) -> None:
        """Notify a job, as a cluster does before it takes a host."""
        process.send_signal(signal.SIGUSR1)

    @abstractmethod
    def lose(self, process: Process, path: Path) -> None:
        """Kill a host, or a process on which the workers depend."""

    def close(self) -> None:
        return


class Torchrun(Kind):
    def before(self) -> tuple[str, ...]:
        run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        return (*run, "--max-restarts", "1", "-m", "pipeworker")

    def cancel(self, process: Process, path: Path) -> None:
        process.send_signal(signal.SIGTERM)

    def notice(self, process: Process, path: Path) -> None:
        self.jobs.pipeworker("checkpoint", str(path))

    def lose(self, process: Process, path: Path) -> None:
        plan = Record(path).plan
        os.kill(plan["stages"][1]["pid"], signal.SIGKILL)


class Ssh(Kind):
    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs)
        folder = jobs.folder / "ssh"
        folder.mkdir()
        self._closing = ExitStack()
        made = self._closing.enter_context(servers(folder))
        made.add("a", "b", forking=jobs.server)
        os.environ["PATH"] = f"{made.path}:{os.environ['PATH']}"

    def before(self) -> tuple[str, ...]:
        return (*COMMAND[1:], "launch", "--hosts", "a:1,b:1")

    def lose(self, process: Process, path: Path) -> None:
        words = ["pgrep", "--parent", str(process.pid), "--full", "ConnectTimeout=10 b "]
        os.kill(int(subprocess.check_output(words)), signal.SIGKILL)

    def close(self) -> None:
        self._closing.close()


class OnSlurm(Kind):
    """A cluster where preemption takes both nodes, which return."""

    slurm: Slurm

    def before(self) -> tuple[str, ...]:
        return (*COMMAND[1:], "launch", "--on", "slurm", "--nodes", "2", "--stages", "2")

    def job(self, path: Path) -> str:
        (job,) = self.slurm.run("squeue", "--noheader", "--format", "%i", "--me").split()
        return job

    def notice(self, process: Process, path: Path) -> None:
        self.slurm.run("scancel", "--signal=USR1", self.job(path))

    def lose(self, process: Process, path: Path) -> None:
        words = ("--exclusive", "--partition=high", "--nodes=2", "--output=/dev/null")
        self.slurm.run("sbatch", *words, "--wrap", "true")


MAKERS: dict[str, Callable[[Jobs], Kind]] = {
    "torchrun": Torchrun,
    "ssh": Ssh,
    "slurm": OnSlurm,
}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(params=[pytest.param("torchrun", marks=slow), "ssh", "slurm"])
def kind(
    request: pytest.FixtureRequest, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kind]:
    monkeypatch.setenv("PATH", os.environ["PATH"])  # restored after the test
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PIPEWORKER_TOKEN", raising=False)
    for name, value in jobs.forking.items():
        monkeypatch.setenv(name, value)
    made = MAKERS[request.param](jobs)
    if isinstance(made, OnSlurm):
        made.slurm = request.getfixturevalue("nodes")
        for name, value in made.slurm.environment.items():
            monkeypatch.setenv(name, value)
    yield made
    made.close()


@pytest.fixture
def quiet(reference: Reference) -> Record:
    """Return an undisturbed run on this host."""
    return reference("--stages", "2", *WORDS, "--steps", str(STEPS), source=SOURCE)


def saved(path: Path) -> int:
    """Return the step of the newest checkpoint, or -1."""
    return max((int(p.name[5:]) for p in path.glob("checkpoints/step-*")), default=-1)


@slow
def test_a_job_that_is_notified_and_loses_a_host_ends_as_undisturbed(
    kind: Kind, quiet: Record
) -> None:
    path = kind.jobs.folder / "run"
    process = kind.start(path, "--steps", str(STEPS), source=SLOW)
    until(lambda: steps_of(path) >= 4)
    kind.notice(process, path)
    until(lambda: saved(path) >= 3)
    (kind.jobs.folder / "lost").touch()
    kind.lose(process, path)
    run = ended(process, path, seconds=90)
    assert_same(run, quiet)
    assert [row["step"] for row in run.metrics] == [*range(1, STEPS + 1)]
    resumed = json.loads((path / "run.json").read_text())["resumed"]
    assert run.summary["restarts"] or resumed, "nothing was lost"


@slow
@pytest.mark.parametrize("kind", ["slurm"], indirect=True)
def test_a_job_is_followed_while_the_controller_is_away(kind: OnSlurm, quiet: Record) -> None:
    path = kind.jobs.folder / "run"
    process = kind.start(path, "--steps", str(STEPS), source=SLOW)
    until(lambda: steps_of(path) >= 2)
    assert process.stderr is not None
    with kind.slurm.without_controller():
        assert any("asking again" in line for line in process.stderr)  # Slurm's command tries long
    run = ended(process, path, seconds=90)
    assert "Slurm answers again" in run.stderr
    assert_same(run, quiet)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(name, marks=slow) for name in ("torchrun", "slurm", "ssh")],
    indirect=True,
)
def test_a_cancelled_job_saves_a_checkpoint_and_can_be_resumed(kind: Kind, quiet: Record) -> None:
    path = kind.jobs.folder / "run"
    process = kind.start(path, "--steps", "1000000", source=CALM)
    until(lambda: steps_of(path) >= 2)
    kind.cancel(process, path)
    _, stderr = process.communicate(timeout=90)
    assert process.returncode, stderr
    until(lambda: (path / "summary.json").exists())
    assert Record(path).summary["status"] == "interrupted"
    assert saved(path) == steps_of(path) >= 2
    steps = max(steps_of(path) + 1, STEPS)
    more = kind.start(path, "--resume", "--steps", str(steps), source=CALM)
    run = ended(more, path, seconds=90)
    assert [row["loss"] for row in run.metrics[:STEPS]] == [row["loss"] for row in quiet.metrics]


@slow
@pytest.mark.parametrize("kind", ["slurm", "ssh"], indirect=True)
def test_a_job_is_cancelled_by_its_run_directory(kind: Kind) -> None:
    """Slurm does not start it again."""
    path = kind.jobs.folder / "run"
    process = kind.start(path, "--steps", "1000000", source=CALM)
    until(lambda: steps_of(path) >= 2)
    cancel = kind.jobs.pipeworker("cancel", str(path))
    assert "the job has ended; its last checkpoint is " in cancel.stdout, cancel.stderr
    run = ended(process, path, 130, seconds=90)
    assert run.summary["status"] == "interrupted"
    assert saved(path) == steps_of(path) >= 2
    if isinstance(kind, OnSlurm):
        assert not kind.slurm.run("squeue", "--noheader", "--me").strip()


@slow
@pytest.mark.parametrize("kind", ["slurm"], indirect=True)
def test_a_job_in_the_queue_is_cancelled_by_its_run_directory(kind: OnSlurm) -> None:
    path = kind.jobs.folder / "run"
    process = kind.start(path, "--set", "begin=now+1hour")
    until(lambda: kind.slurm.run("squeue", "--noheader", "--me").strip())
    number = kind.job(path)
    cancel = kind.jobs.pipeworker("cancel", str(path))
    assert cancel.stdout == f"job {number} of Slurm is cancelled\n", cancel.stderr
    process.communicate(timeout=60)
    assert process.returncode
    assert not path.exists()


def test_a_failed_job_names_the_place(kind: Kind) -> None:
    path = kind.jobs.folder / "run"
    process = kind.start(path, "--steps", "3", source=FAILS)
    run = ended(process, path, 1, seconds=90)
    error = r"layer 4 \(Noise\) raised ZeroDivisionError: on purpose"
    assert re.search(error, run.stdout + run.stderr)
    assert run.summary["status"] == "failed"
    assert sys.executable not in run.summary["error"]
