"""Tests of a pod's command on this host: its exit status tells a cluster whether to retry."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.engines.manifests import render
from launcher.engines.pod import RUNS
from launcher.node import status_of, torchrun_options
from launcher.spec import JobSpec
from pipeworker.errors import AGAIN
from support.processes.ports import reserve_port
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Process, Record, processes_of, steps_of, until
from support.real_jobs.sources import CALM, DIES, JOB
from support.slow import slow

WORDS = ("--microbatches", "4", "--checkpoint-every", "1", "--checkpoint-busy", "wait")


@dataclass
class Pods:
    """All pods of a job, started together.

    Attributes:
        port: where they meet.
    """

    processes: list[Process]
    path: Path
    port: int

    def end(self) -> list[int]:
        """Wait for the end of all pods; return their exit statuses."""
        for process in self.processes:
            process.communicate(timeout=90)
        return [process.returncode for process in self.processes if process.returncode is not None]

    @property
    def run(self) -> Record:
        return Record(self.path)


Start = Callable[..., Pods]


@pytest.fixture
def pods(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Yield a function that starts the containers of a rendered job on this host."""
    monkeypatch.setenv("PIPEWORKER_TOKEN", uuid.uuid4().hex)

    def start(
        *words: str,
        source: str = JOB,
        nodes: int = 2,
        workers: int = 2,
        arguments: tuple[str, ...] = (),
    ) -> Pods:
        job_file = jobs.write(source)
        spec = JobSpec(
            "train",
            str(job_file),
            workers=workers,
            options=words,
            arguments=arguments,
            nodes=nodes,
            settings={"image": "image", "job": f"{RUNS}/job.py"},
        )
        pod: Any = render(spec).objects[-1]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        python, *line = container["command"] + container["args"]
        assert python == "python"
        port = reserve_port(reserved)
        here = {"train-0.train": "127.0.0.1", "29500": str(port)}
        line = [here.get(word, word.replace(RUNS, str(jobs.folder))) for word in line]
        variables = {v["name"]: v["value"] for v in container["env"] if "value" in v}
        variables["HOME"] = str(jobs.folder)
        return Pods(
            [
                jobs.python(
                    *line, env={**os.environ, **variables, "JOB_COMPLETION_INDEX": str(index)}
                )
                for index in range(nodes)
            ],
            jobs.folder / "train",
            port,
        )

    with ExitStack() as reserved:
        yield start


@slow
def test_pods_give_the_numbers_of_the_local_run(jobs: Jobs, pods: Start) -> None:
    job = pods(*WORDS, "--steps", "3", workers=4)
    assert job.end() == [0, 0]
    assert_same(job.run, jobs.train("--stages", "4", "--microbatches", "4", "--steps", "3"))


@pytest.mark.parametrize(
    ("words", "source", "status"),
    [
        (("--stepss", "1"), JOB, 2),
        pytest.param((), JOB.replace("def loss", "def lost"), 2, marks=slow),
        ((), JOB.replace("Linear(16, 3)", "Linear(15, 3)"), 1),
    ],
)
def test_an_error_of_the_user_has_a_status_of_its_own(
    pods: Start, words: tuple[str, ...], source: str, status: int
) -> None:
    job = pods(*words, source=source, workers=4)
    job.processes[0].wait(timeout=60)
    if status == 2:  # the others wait for the first one to report it
        job.processes[1].send_signal(signal.SIGTERM)
    ends = [process.communicate(timeout=90)[1] for process in job.processes]
    terminated = (143, -signal.SIGTERM)  # the second before it could handle the signal
    expected = [status, status], *([status, ended] for ended in terminated)
    assert [process.returncode for process in job.processes] in expected, ends


@slow
def test_a_lost_worker_is_worth_a_retry_which_resumes_the_run(jobs: Jobs, pods: Start) -> None:
    words = (*WORDS, "--steps", "6")
    lost = pods(*words, source=DIES, arguments=("kill",), workers=4)
    assert lost.end() == [AGAIN, AGAIN]
    assert (jobs.folder / "died").exists()
    assert lost.run.summary["status"] == "failed"
    again = pods(*words, source=DIES, arguments=("kill",), workers=4)
    assert again.end() == [0, 0]
    assert_same(again.run, jobs.train("--stages", "4", *words, source=DIES))


def test_a_lost_host_is_worth_a_retry(jobs: Jobs, pods: Start) -> None:
    job = pods("--microbatches", "4", "--steps", "100000", source=CALM)
    until(lambda: steps_of(job.path) > 2)
    ranks = [stage["pid"] for stage in job.run.plan["stages"][1:]]
    job.processes[1].kill()
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):  # it may have ended with its agent
            os.kill(pid, signal.SIGKILL)
    assert job.end() == [AGAIN, -signal.SIGKILL]
    until(lambda: not processes_of(jobs.folder))


@pytest.mark.parametrize("terminated", [0, pytest.param(1, marks=slow)])
def test_a_terminated_pod_has_time_for_a_checkpoint(
    jobs: Jobs, pods: Start, terminated: int
) -> None:
    job = pods("--microbatches", "4", "--steps", "100000", source=CALM)
    until(lambda: steps_of(job.path) > 2)
    job.processes[terminated].send_signal(signal.SIGTERM)
    assert all(status in (130, 143) for status in job.end())
    assert job.run.summary["status"] == "interrupted"
    assert job.run.checkpoint.manifest.step == job.run.summary["steps"] > 2
    until(lambda: not processes_of(jobs.folder))


def test_a_pod_that_waits_for_others_can_be_terminated(jobs: Jobs, pods: Start) -> None:
    job = pods("--steps", "1")
    job.processes[1].kill()
    until(lambda: answers(job.port))
    job.processes[0].send_signal(signal.SIGTERM)
    assert job.end() == [143, -signal.SIGKILL]
    until(lambda: not processes_of(jobs.folder))


def answers(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5).close()
        return True
    return False


@slow
def test_one_pod_needs_no_other(jobs: Jobs, pods: Start) -> None:
    job = pods(*WORDS, "--steps", "2", nodes=1)
    assert job.end() == [0]
    assert len(job.run.metrics) == 2


def test_auto_resume_requires_a_run_directory(jobs: Jobs) -> None:
    path = jobs.write(JOB)
    ran = jobs.pipeworker("node", "--workers", "1", "--", "--auto-resume", str(path))
    assert ran.returncode == 2
    assert re.search("--auto-resume: no directory is given; add --run-dir", ran.stderr)


def test_the_status_of_a_host_is_one_that_a_rank_chose() -> None:
    for codes, expected in (
        ([2, -15], 2),
        ([1, 2], 2),
        ([-15, 1, AGAIN], 1),
        ([130, -15], 130),
        ([-9, AGAIN], AGAIN),
        ([-9], AGAIN),
        ([3], AGAIN),
        ([143], AGAIN),
    ):
        assert status_of(codes) == expected


def test_a_single_host_needs_no_rendezvous() -> None:
    assert torchrun_options(1, 0, 3, "a", 5) == ("--standalone", "--nproc-per-node", "3")
    assert "--node-rank" in torchrun_options(2, 1, 3, "a", 5)
