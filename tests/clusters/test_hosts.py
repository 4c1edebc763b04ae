"""Tests with two hosts on one machine: unplugged cables, interfaces, firewalls, differences."""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from pipeworker.errors import AGAIN
from support.clusters.hosts import CABLES, Host, ip
from support.processes.interpreter import PRELOAD
from support.processes.pretend import VARIABLE as PRETEND
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Process, Run, ended, processes_of, until
from support.real_jobs.sources import CALM, JOB
from support.real_jobs.torchrun import TOKEN, Torchrun
from support.slow import slow

pytestmark = pytest.mark.root
WORDS = ("--microbatches", "4", "--steps", "3")
PORT = "29500"

Start = Callable[..., list[Process]]


@pytest.fixture
def ranks(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that starts one rank on each host, as torchrun does without its agents."""
    monkeypatch.setenv(TOKEN, uuid.uuid4().hex)

    def start(
        hosts: Sequence[Host],
        *words: str,
        sources: Sequence[str] = (JOB, JOB),
        pretend: str = "",
    ) -> list[Process]:
        started = []
        for rank, host in enumerate(hosts):
            job_file = jobs.write(sources[rank], f"host-{rank}/job.py")
            place = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT, "WORLD_SIZE": "2"}
            own = {"RANK": f"{rank}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            env = {**os.environ, **place, **own, "TORCHELASTIC_RUN_ID": "none"}
            line = ["-m", "pipeworker", str(job_file), "--run-dir", str(jobs.folder / "run")]
            also = other(pretend) if rank and pretend else {}
            command = [*line, *WORDS, *words]
            started.append(jobs.python(*command, env={**env, **also}, namespace=host.name))
        return started

    return start


def other(how: str) -> Mapping[str, str]:
    """Return the environment of a host that pretends to differ.

    Args:
        how: see :mod:`support.processes.pretend`.
    """
    return {PRELOAD: "support.processes.pretend", PRETEND: how}


def expect_error(
    processes: Sequence[Process], jobs: Jobs, expected: str, rank: int = 0
) -> list[Run]:
    """Check that all processes fail soon, and that the one of `rank` shows the expected error."""
    began = time.monotonic()
    runs = [ended(process, jobs.folder / "run", None, seconds=90) for process in processes]
    for run in runs:
        assert run.status in (1, 2, AGAIN), run.stderr
    assert time.monotonic() - began < 60
    assert re.search(f"^error: {expected}", runs[rank].stderr, re.MULTILINE), runs[rank].stderr
    return runs


@slow
def test_an_unplugged_cable_different_clocks_and_a_named_interface_change_no_bit(
    jobs: Jobs, torchrun: Torchrun, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, uuid.uuid4().hex)
    words = ("--microbatches", "4", "--steps", "120", "--interface", "second")
    source = CALM + (
        "    import os\n    from pathlib import Path\n\n"
        "    Path(f'clock-{os.environ.get(\"RANK\")}').write_text(str(time.time()))\n"
    )
    envs: tuple[Mapping[str, str], ...] = ({}, other("clock=3600"))
    both = torchrun.nodes(*words, hosts=hosts, ranks=1, source=source, envs=envs)
    both[0].training()
    first, second = (float((jobs.folder / f"clock-{rank}").read_text()) for rank in (0, 1))
    assert 3500 < second - first < 3700
    hosts[0].cut("second")
    metrics = both[0].path / "metrics.jsonl"
    time.sleep(0.5)  # for messages that were on their way
    before = metrics.read_bytes()
    time.sleep(2)
    assert metrics.read_bytes() == before  # nothing passes
    hosts[0].plug("second")
    head, tail = (started.end(90) for started in both)
    assert head.status == tail.status == 0, head.stderr + tail.stderr
    assert f"bound to tcp://{CABLES['second'][0]}:" in head.log("coordinator")
    assert hosts[0].sent("second") > 10 * hosts[0].sent("cable")
    assert_same(head, jobs.train("--stages", "2", *words[:4], source=source))


READS = JOB.replace(
    "        for _ in range(6):",
    """        import time
        from pathlib import Path

        for step in range(6):
            if step == 2:
                Path("reads").touch()
                while not Path("go").exists():
                    time.sleep(0.01)""",
)
"""A job that reads its third mini-batch for long: meanwhile only the control plane sends."""


def prefer(jobs: Jobs) -> None:
    """Have the job's threads run before others: a gap of the line is too short to wait for a core.

    In Linux a priority is that of a thread, and threads that it starts inherit it.
    """
    for pid in processes_of(jobs.folder):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), -15)


@slow  # on a busy machine a gap may be too short for a handshake
@pytest.mark.skipif(shutil.which("tc") is None, reason="tc is not installed")
@pytest.mark.parametrize("side", [1])
def test_a_line_that_is_interrupted_again_and_again_changes_no_bit(
    jobs: Jobs,
    torchrun: Torchrun,
    hosts: tuple[Host, Host],
    monkeypatch: pytest.MonkeyPatch,
    side: int,
) -> None:
    """No outage, nor two with a gap, is as long as the timeout; TCP would be silent for longer."""
    monkeypatch.setenv(TOKEN, uuid.uuid4().hex)
    words = ("--microbatches", "4", "--steps", "5")
    both = torchrun.nodes(*words, "--worker-timeout", "7", hosts=hosts, ranks=1, source=READS)
    until((jobs.folder / "reads").exists)
    prefer(jobs)
    for _ in range(4):
        hosts[side].cut_outgoing()
        time.sleep(2)
        hosts[side].repair_outgoing()
        time.sleep(1.3)  # the kernel sends a SYN again after a second
    (jobs.folder / "go").touch()
    head, tail = (started.end() for started in both)
    assert head.status == tail.status == 0, head.stderr + tail.stderr
    assert_same(head, jobs.train("--stages", "2", *words, source=READS))


def test_an_interface_that_one_host_does_not_have_is_an_error(
    jobs: Jobs, ranks: Start, hosts: tuple[Host, Host]
) -> None:
    ip("-n", hosts[1].name, "link", "set", "second", "name", "third")
    ip("-n", hosts[1].name, "link", "set", "third", "up")
    started = ranks(hosts, "--interface", "second")
    there = r"lo \(127.0.0.1\), .*cable \(10.77.0.2\).*"
    expect_error(
        started,
        jobs,
        f"--interface second: the interface does not exist on {hosts[1].name}; "
        f"choose one of {there}",
    )


@slow
def test_an_interface_that_no_host_has_is_an_error(
    jobs: Jobs, ranks: Start, hosts: tuple[Host, Host]
) -> None:
    started = ranks(hosts, "--interface", "eth7")
    expect_error(
        started,
        jobs,
        f"--interface eth7: the interface does not exist on {hosts[0].name}; choose one of lo ",
    )


@slow
def test_an_interface_that_other_hosts_cannot_reach_is_an_error(
    jobs: Jobs, ranks: Start, hosts: tuple[Host, Host]
) -> None:
    started = ranks(hosts, "--interface", "lo")
    text = f"--interface lo: other hosts of this job cannot reach 127.0.0.1 of {hosts[0].name}; "
    expect_error(started, jobs, text)


def test_a_firewall_before_the_coordinator_is_reported(
    jobs: Jobs, ranks: Start, hosts: tuple[Host, Host]
) -> None:
    hosts[1].reject_outgoing(hosts[0], int(PORT))
    expected = f"rank 1 on {hosts[1].name} cannot reach the coordinator at tcp://10.77.0.1:"
    for rank, run in enumerate(expect_error(ranks(hosts), jobs, expected)):
        assert run.status == AGAIN
        assert rank or run.summary["error"].startswith(expected)


WAITS = """
    import time
    from pathlib import Path

    Path("loads").touch()
    while not Path("go").exists():
        time.sleep(0.01)
"""
"""The end of a job file that waits: its host has reached the coordinator, no stage is connected."""


@pytest.mark.parametrize(
    ("backend", "answers"), [("tls", True), pytest.param("gloo", False, marks=slow)]
)
def test_a_firewall_between_two_stages_is_reported(
    jobs: Jobs,
    ranks: Start,
    hosts: tuple[Host, Host],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    answers: bool,
) -> None:
    """It rejects or drops packets to all ports but those of the control plane."""
    monkeypatch.setenv("PIPEWORKER_TIMINGS", "0.15")
    started = ranks(hosts, "--backend", backend, sources=(JOB + WAITS, JOB + WAITS))
    until((jobs.folder / "loads").exists)
    log = (jobs.folder / "run/logs/coordinator.log").read_text()
    bound = re.search(r"bound to tcp://10.77.0.1:(\d+)", log)
    assert bound
    ports = (int(PORT), int(bound[1]))
    if answers:
        hosts[1].reject_outgoing(hosts[0], *ports)
    else:
        hosts[0].drop_incoming(*ports)
    (jobs.folder / "go").touch()
    first, second = (rf"{host.name} \({host.address}\)" for host in hosts)
    ends = f"({first}, from {second}|{second}, from {first})"
    edge = r"the channel .* could not be connected to the worker of stage \d \(rank \d\) on "
    expect_error(started, jobs, edge + ends + ".*let TCP pass between them, to any port")


@pytest.mark.parametrize(
    ("pretend", "odd"),
    [
        ("torch=2.12.1", r"torch 2\.12\.1"),
        pytest.param("python=3.9 pipeworker=0", "pipeworker 0, Python 3.9", marks=slow),
    ],
)
def test_another_version_is_an_error(
    jobs: Jobs, ranks: Start, hosts: tuple[Host, Host], pretend: str, odd: str
) -> None:
    started = ranks(hosts, pretend=pretend)
    expected = f"rank 1 on {hosts[1].name}: it runs {odd}, and others "
    runs = expect_error(started, jobs, expected)
    assert runs[0].status == 2


@slow
def test_another_protocol_is_an_error(jobs: Jobs, ranks: Start, hosts: tuple[Host, Host]) -> None:
    started = ranks(hosts, pretend="protocol=1")
    expected = f"rank 1 on {hosts[1].name}: it speaks version 1, this is version "
    expect_error(started, jobs, expected)


@slow
def test_another_job_file_is_an_error(jobs: Jobs, ranks: Start, hosts: tuple[Host, Host]) -> None:
    """Even one that has the same layers."""
    started = ranks(hosts, sources=(JOB, JOB.replace("lr=0.1", "lr=0.2")))
    difference = (
        f"rank 1 on {hosts[1].name} has another version of it than rank 0 on {hosts[0].name}"
    )
    expect_error(started, jobs, f"job.py: {difference}")
