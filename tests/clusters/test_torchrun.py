"""Tests of torchrun jobs: each rank is a stage, and the numbers are those of the local run."""

from __future__ import annotations

import os
import re
import signal
import uuid
from functools import partial
from pathlib import Path

import pytest

from support.clusters.hosts import ADDRESSES, Host
from support.processes.neighbours import IMPORTS, PRINTED, write_neighbours
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Record, Reference, pids_of, processes_of, until
from support.real_jobs.sources import CALM, DIES, DROPOUT_JOB, JOB, LOADER, SLEEPERS
from support.real_jobs.torchrun import TOKEN, Torchrun
from support.slow import slow

LOCAL = ("--microbatches", "4", "--steps", "4", "--clip-grad-norm", "0.5")
ENDLESS = ("--microbatches", "4", "--steps", "1000000")


@slow
def test_one_host_gives_the_numbers_of_the_local_run(
    jobs: Jobs, reference: Reference, torchrun: Torchrun
) -> None:
    run = torchrun(*LOCAL, "--log-every", "1", ranks=4, source=DROPOUT_JOB, options=()).end()
    assert run.status == 0, run.stderr
    assert "warning" not in run.stderr  # a token that goes through the store stays on the host
    assert len(re.findall(r"^step \d/4  loss", run.stdout, re.MULTILINE)) == 4
    assert run.stdout.count("run directory") == 2
    local = reference("--stages", "4", *LOCAL, source=DROPOUT_JOB)
    assert_same(run, local)
    assert run.summary.keys() == local.summary.keys()
    assert run.summary["status"] == "done"


@slow
def test_the_world_is_stages_times_replicas(reference: Reference, torchrun: Torchrun) -> None:
    run = torchrun(*LOCAL, "--replicas", "2", ranks=4, source=DROPOUT_JOB).end()
    assert run.status == 0, run.stderr
    assert [(s["replica"], s["stage"]) for s in run.plan["stages"]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    local = reference("--stages", "2", "--replicas", "2", *LOCAL, source=DROPOUT_JOB)
    assert_same(run, local)
    again = torchrun("--resume", "--steps", "5", ranks=2, source=DROPOUT_JOB).end()
    assert again.status == 0, again.stderr
    assert (again.summary["stages"], again.summary["steps"]) == (1, 5)


@slow
def test_mistakes_are_reported_once(jobs: Jobs, torchrun: Torchrun) -> None:
    (jobs.folder / "taken").mkdir()
    for words, expected, run_dir in (
        (("--microbatchess", "4"), "no such option", "run-torchrun"),
        (("--resume",), "taken: not the directory of a run; give one", "taken"),
    ):
        run = torchrun(*words, run_dir=run_dir).end()
        assert run.status == 1  # torchrun's own
        (error,) = re.findall("^[eE]rror: .*", run.stderr, re.MULTILINE)
        assert expected in error
        assert "exitcode  : 2" in run.stderr
    assert not (jobs.folder / "run-torchrun").exists()
    assert not list((jobs.folder / "taken").iterdir())


@pytest.mark.parametrize("stage", [pytest.param(0, marks=slow), 1])
def test_a_killed_worker_ends_the_job(jobs: Jobs, torchrun: Torchrun, stage: int) -> None:
    started = torchrun(*ENDLESS, ranks=3, source=SLEEPERS)
    pid = started.training()["stages"][stage]["pid"]
    assert list(jobs.folder.glob("child-*"))  # stage 1 has a process of its own
    os.kill(pid, signal.SIGKILL)
    run = started.end()
    assert run.status == 1
    assert f"exitcode  : -9 (pid: {pid})" in run.stderr
    until(lambda: not processes_of(jobs.folder))
    assert run.summary["status"] == "failed"
    assert f"the worker of stage {stage} (pid {pid} on " in run.summary["error"]
    if stage:  # rank 0 is alive, and shows the error
        assert f"error: the worker of stage {stage}" in run.stderr


@slow
def test_no_socket_stays(jobs: Jobs, torchrun: Torchrun, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = jobs.folder / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    started = torchrun(*ENDLESS, source=LOADER)
    pid = started.training()["stages"][0]["pid"]
    assert [*temporary.glob("pymp-*/listener-*")]
    os.kill(pid, signal.SIGKILL)
    assert started.end().status == 1
    until(lambda: not processes_of(jobs.folder))
    assert not [*temporary.glob("pymp-*")]


@slow
def test_a_killed_torchrun_ends_the_job(jobs: Jobs, torchrun: Torchrun) -> None:
    """Its rank is a separate interpreter here, beside files with the names of ours."""
    write_neighbours(jobs)
    started = torchrun(*ENDLESS, ranks=1, source=IMPORTS + SLEEPERS, cold=True)
    started.training()
    assert PRINTED in (started.path / "logs/worker-0.log").read_text()
    started.process.kill()
    assert started.end().status == -signal.SIGKILL
    until(lambda: not processes_of(jobs.folder))
    assert Record(started.path).summary["status"] == "failed"


@slow
def test_a_stopped_coordinator_is_detected_and_named(
    jobs: Jobs, torchrun: Torchrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPEWORKER_TIMINGS", "0.5")
    started = torchrun(*ENDLESS, "--worker-timeout", "3", ranks=2, source=CALM)
    started.training()
    (pid,) = pids_of(jobs.folder, "coordinator")
    os.kill(pid, signal.SIGSTOP)
    run = started.end()
    assert run.status == 1
    error = f"the coordinator (pid {pid}) has not answered"
    assert f"error: {error}" in run.stderr
    assert run.summary["error"] == error
    assert "has not answered for 3 s" in run.log("worker-1")
    until(lambda: not processes_of(jobs.folder))


def test_a_terminated_torchrun_interrupts_the_job(jobs: Jobs, torchrun: Torchrun) -> None:
    started = torchrun(*ENDLESS, ranks=2, source=CALM)
    started.training()
    started.process.send_signal(signal.SIGTERM)
    run = started.end()
    assert run.status != 0
    until(lambda: not processes_of(jobs.folder))
    assert run.summary["status"] == "interrupted"
    assert run.summary["error"] is None
    assert run.checkpoint.manifest.step == run.summary["steps"] > 2


@slow
def test_ranks_that_torchrun_restarts_resume_the_run(jobs: Jobs, torchrun: Torchrun) -> None:
    words = ("--microbatches", "4", "--steps", "7", "--checkpoint-every", "1")
    options = ("--standalone", "--max-restarts", "1")
    busy = ("--checkpoint-busy", "wait")
    run = torchrun(*words, *busy, "--", "kill", ranks=3, source=DIES, options=options).end()
    assert run.status == 0, run.stderr
    assert (jobs.folder / "died").exists()
    assert_same(run, jobs.train("--stages", "3", *words[:4], source=DIES))
    assert re.search("from step [23]\n", run.stdout)


@slow
def test_a_closed_output_does_not_end_the_job(jobs: Jobs, torchrun: Torchrun) -> None:
    """As in ``torchrun ... | head``, and as under ``pipeworker launch``."""
    started = torchrun(*LOCAL, "--log-every", "1", ranks=2)
    assert started.process.stdout is not None
    started.process.stdout.close()
    assert started.process.wait(60) == 0
    summary = Record(started.path).summary
    assert (summary["status"], summary["steps"]) == ("done", 4)


# Two hosts.


@slow
@pytest.mark.root
def test_an_unplugged_cable_ends_the_job_on_both_hosts(
    jobs: Jobs, torchrun: Torchrun, hosts: tuple[Host, Host]
) -> None:
    """No connection closes: both hosts detect the silence of the other."""
    both = torchrun.nodes(*ENDLESS, "--worker-timeout", "3", hosts=hosts, source=CALM)
    workers = {stage["pid"] for stage in both[0].training()["stages"]}
    assert len(workers & processes_of(jobs.folder).keys()) == 4
    hosts[0].cut()
    until(lambda: not workers & processes_of(jobs.folder).keys())
    head = both[0].end()
    assert head.status == 1
    assert head.stderr.count(f"warning: {TOKEN}: not set") == 1
    assert re.search(r"error: .*stage [23] .*(is gone|has not answered)", head.stderr)
    assert head.summary["status"] == "failed"
    lost = "the coordinator at tcp://10.77.0.1:"  # torchrun may end one of them before it logs this
    assert any(lost in head.log(f"worker-{rank}") for rank in (2, 3))
    both[1].process.kill()  # torchrun itself waits for its store, for minutes
    both[1].end()


@pytest.mark.root
def test_two_hosts_give_the_numbers_of_the_local_run(
    jobs: Jobs,
    reference: Reference,
    torchrun: Torchrun,
    hosts: tuple[Host, Host],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = uuid.uuid4().hex
    monkeypatch.setenv(TOKEN, secret)
    both = torchrun.nodes(*LOCAL, "--log-every", "1", hosts=hosts, source=DROPOUT_JOB)
    head, other = (started.end() for started in both)
    assert head.status == other.status == 0, head.stderr + other.stderr
    assert TOKEN not in head.stderr + other.stderr
    assert head.stdout.count("\nstep ") == 4
    assert "step" not in other.stdout  # rank 0's host alone shows the job
    local = reference("--stages", "4", *LOCAL, source=DROPOUT_JOB)
    assert_same(head, local)
    log = head.log("coordinator")
    assert f"bound to tcp://{ADDRESSES[0]}:" in log  # where the other host can reach it
    for written in head.path.rglob("*"):
        assert not written.is_file() or secret.encode() not in written.read_bytes()


MARKER = b"an activation that anybody may read, sixty-four bytes in a row: "
MARKED_JOB = (
    JOB.replace("nn.Linear(8, 16), nn.ReLU()", "nn.Linear(8, 16), Marked(), Unmarked(), nn.ReLU()")
    + f"""
    MARKER = torch.frombuffer(bytearray({MARKER!r}), dtype=torch.float32)

    class Marked(nn.Module):
        def forward(self, x):
            return torch.cat((x, MARKER.expand(len(x), -1)), 1)

    class Unmarked(nn.Module):
        def forward(self, x):
            return x[:, :-len(MARKER)]
"""
)
CAPTURE = """
    import socket, sys
    from pathlib import Path

    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    wire.bind(("cable", 0))
    with Path(sys.argv[1]).open("wb", buffering=0) as file:
        file.write(b"open")
        while True:
            file.write(wire.recv(1 << 17))
"""


def has_content(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


@slow
@pytest.mark.root
def test_tls_between_two_hosts_is_unreadable_and_gives_the_same_numbers(
    jobs: Jobs, torchrun: Torchrun, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, uuid.uuid4().hex)
    words = ("--microbatches", "4", "--steps", "3", "--balance", "2,5")
    local = jobs.train("--stages", "2", *words, source=MARKED_JOB)
    capture = jobs.write(CAPTURE, "capture.py")
    read = {}
    for backend in ("tls", "auto"):
        seen = jobs.folder / f"wire-{backend}"
        listener = jobs.python(str(capture), str(seen), namespace=hosts[1].name)
        until(partial(has_content, seen))
        both = torchrun.nodes(
            *(*words, "--backend", backend),
            hosts=hosts,
            ranks=1,
            source=MARKED_JOB,
            run_dir=f"run-{backend}",
        )
        head, other = (started.end() for started in both)
        listener.kill()
        listener.wait()
        assert head.status == other.status == 0, head.stderr + other.stderr
        assert_same(head, local)
        read[backend] = seen.read_bytes()
    assert MARKER in read["auto"]  # gloo between hosts is readable: the capture works
    assert MARKER not in read["tls"]
    assert len(read["tls"]) > 3 * 10 * len(MARKER)  # the capture has seen all samples
