"""Tests of jobs on hosts that ssh reaches, with real servers on this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.engines import ssh
from pipeworker.errors import PipeworkerError
from support.clusters.hosts import Host as Namespace
from support.clusters.hosts import two_hosts
from support.clusters.sshd import Sshd, servers
from support.processes.forked import Server
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import (
    Jobs,
    Process,
    Record,
    Reference,
    ended,
    processes_of,
    steps_of,
    until,
)
from support.real_jobs.sources import DIES, DROPOUT_JOB, gated
from support.slow import slow

WORDS = ("--stages", "3", "--microbatches", "4", "--steps", "8")
GOES_ON = DROPOUT_JOB.replace("for _ in range(5)", "while True")
CALM = GOES_ON.replace("x = torch", "__import__('time').sleep(0.2)\n            x = torch")


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory, server: Server | None) -> Iterator[Sshd]:
    """Return servers for two names of this machine."""
    with servers(tmp_path_factory.mktemp("ssh")) as made:
        made.add("a", "b", forking=server)
        yield made


@pytest.fixture
def client(near: Sshd, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Sshd:
    for name, value in jobs.forking.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{near.path}:{os.environ['PATH']}")
    return near


@pytest.fixture
def quiet(reference: Reference) -> Record:
    """Return a run on this host alone."""
    return reference(*WORDS, source=GOES_ON)


def carriers(process: Process, host: str) -> list[int]:
    """Return the pids of the ssh clients that carry the lines of a host's agent."""
    children = psutil.Process(process.pid).children()
    return [child.pid for child in children if host in child.cmdline()]


@slow
def test_a_run_on_several_hosts_continues_in_its_directory_when_that_is_moved(
    jobs: Jobs, client: Sshd, reference: Reference
) -> None:
    """The agent of a lost host is started again with the path that the directory had."""
    words = ("--checkpoint-every", "4", "--snapshot-every", "1", "--hosts", "a:2,b:1")
    source = gated(DROPOUT_JOB, "x = torch.randn(11", "_ == 4")
    process, path = jobs.start(*WORDS, *words, source=source)
    until(lambda: steps_of(path) == 3)
    moved = path.with_name("moved")
    path.rename(moved)
    (carrier,) = carriers(process, "b")
    os.kill(carrier, signal.SIGKILL)
    (jobs.folder / "go").touch()
    run = ended(process, moved, seconds=90)
    assert not path.exists()
    assert_same(run, reference(*WORDS, source=DROPOUT_JOB))
    assert run.summary["restarts"] == 1
    assert f"warning: run directory: was moved to {moved}; the job continues there" in run.stderr
    assert f"weights: {moved}/checkpoints/step-00000008" in run.stdout


@slow  # test_engines_conformance.py loses a host too
def test_a_lost_host_is_restarted_and_gives_the_numbers_of_an_undisturbed_run(
    jobs: Jobs, client: Sshd, quiet: Record
) -> None:
    """Its state comes from the copies of its neighbour, as there is no checkpoint.

    No command line holds a secret; the lost host's processes end with its connection.
    """
    hosts = ("--hosts", "a:2,b:1", "--snapshot-every", "1")
    process, path = jobs.start(*WORDS[:-1], "30", *hosts, source=GOES_ON)
    until(lambda: steps_of(path) >= 10)
    lines = " ".join(processes_of(jobs.folder).values())
    assert lines.count("pipeworker.host.agent") >= 2
    assert not re.search(r"[0-9a-f]{40}", lines)
    before = set(processes_of(jobs.folder))
    (carrier,) = carriers(process, "b")
    os.kill(carrier, signal.SIGKILL)
    run = ended(process, path)
    lost = r"host b is lost: it was killed by SIGKILL \(stage 2\); resumed after step (\d+)"
    found = re.search(lost, run.stderr)
    assert found, run.stderr
    assert int(found[1]) >= 1
    assert run.summary["restarts"] == 1
    assert [row["step"] for row in run.metrics] == [*range(1, 31)]
    assert [row["loss"] for row in run.metrics[:8]] == [row["loss"] for row in quiet.metrics]
    assert not before & set(processes_of(jobs.folder))


@slow
def test_a_host_that_is_lost_for_good_leaves_the_state_that_its_neighbour_holds(
    jobs: Jobs, client: Sshd, quiet: Record
) -> None:
    """There is no room for its worker elsewhere, and no checkpoint yet."""
    hosts = ("--hosts", "a:2,b:1", "--snapshot-every", "1", "--worker-timeout", "5")
    process, path = jobs.start(*WORDS[:-1], "400", *hosts, source=CALM)
    until(lambda: steps_of(path) >= 5)
    config = client.folder / "config"
    before = config.read_text()
    try:
        config.write_text(f"Host b\n  ProxyCommand false\n{before}")
        (carrier,) = carriers(process, "b")
        os.kill(carrier, signal.SIGKILL)
        stderr = ended(process, path, 1, seconds=90).stderr
    finally:
        config.write_text(before)
    saved = re.search(
        "the job failed; step ([0-9]+) is saved before it ends, with the 2 workers for which there "
        "is room",
        stderr,
    )
    assert saved, stderr
    assert int(saved[1]) >= steps_of(path) - 1
    assert "error: host b is lost: " in stderr or "error: host b cannot be used: " in stderr
    resumed = jobs.pipeworker("launch", "--resume", str(path), "--steps", str(int(saved[1]) + 3))
    assert resumed.returncode == 0, resumed.stderr
    losses = [row["loss"] for row in Record(path).metrics]
    assert losses[:6] == [row["loss"] for row in quiet.metrics][:6]


@slow
def test_workers_connect_to_the_address_that_the_user_gives(jobs: Jobs, client: Sshd) -> None:
    """sshd sees another one, as behind a jump host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        own = probe.getsockname()[0]
    run = jobs.train(*WORDS, "--hosts", "a:2,b:1", "--launcher-address", own, source=GOES_ON)
    assert re.search(rf"bound to tcp://{re.escape(own)}:", run.log("coordinator"))
    assert f"--launcher-address {own}" in run.stdout


@slow
def test_a_replica_that_is_lost_with_its_host_gets_the_state_of_another_one(
    jobs: Jobs, client: Sshd
) -> None:
    """There is no checkpoint. A neighbouring host keeps what one replica alone has."""
    words = (
        *("--stages", "2", "--replicas", "2", "--microbatches", "4", "--steps", "24"),
        *("--shard-optimizer", "--data-reader", "first"),
    )
    alone = jobs.train(*words, source=STATEFUL)
    process, path = jobs.start(
        *words, "--snapshot-every", "1", "--hosts", "a:2,b:2", source=STATEFUL
    )
    until(lambda: steps_of(path) >= 8)
    (carrier,) = carriers(process, "a")  # its replica writes the checkpoints
    os.kill(carrier, signal.SIGKILL)
    run = ended(process, path)
    assert_same(run, alone)
    (step,) = re.findall(r"resumed after step (\d+)", run.stderr)
    assert int(step) >= 1  # a busy host mirrors late
    assert run.summary["restarts"] == 1


STATEFUL = """
    import time
    import torch
    from torch import nn

    tied = [("0.weight", "3.weight")]

    def model():
        return [lambda: nn.Linear(8, 8), lambda: nn.BatchNorm1d(8), lambda: nn.Dropout(0.1),
                lambda: nn.Linear(8, 8), lambda: nn.Linear(8, 3)]

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.AdamW(params, lr=0.01)

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)

    def data():
        for _ in range(7):
            time.sleep(0.05)
            x = torch.randn(12, 8)
            yield x, (x[:, 0] > 0).long()
"""


TIED = DIES.replace(
    "return nn.Sequential(",
    "first, second = nn.Linear(32, 32), nn.Linear(32, 32)\n"
    "        second.weight = first.weight\n"
    "        return nn.Sequential(",
).replace("nn.Linear(32, 32), nn.Tanh(),", "first, nn.Tanh(), second,")
TIED = TIED.replace("import random\n", "import random\n    import time\n").replace(
    "range(4):\n", "range(4):\n            time.sleep(0.1)\n"
)
"""A job in which the middle stage's part of a snapshot holds a weight of the last stage.

Its steps leave a busy host the time to mirror a snapshot.
"""


@slow
def test_a_lost_worker_is_restored_from_the_memories_of_all_hosts(jobs: Jobs, client: Sshd) -> None:
    """Each host holds a part of the last snapshot, and there is no checkpoint yet."""
    words = ("--microbatches", "4", "--steps", "15", "--stages", "3")
    source = TIED.replace("done() == 3", "done() == 12")
    once = jobs.train(*words, source=source)
    hosts = ("--hosts", "a:2,b:1", "--snapshot-every", "1")
    run = jobs.train(*words, *hosts, "--", "kill", source=source)
    assert (jobs.folder / "died").exists()
    assert_same(run, once)
    (line,) = [line for line in run.stderr.splitlines() if "resumed after" in line]
    assert "resumed after step 0" not in line


@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        (
            ("--hosts", "nowhere:2"),
            1,
            "host nowhere cannot be used: ssh: Could not resolve hostname",
        ),
        (("--hosts", "a:1", "--stages", "2"), 2, "the hosts have places for 1"),
        (("--hosts", "a:1", "--on", "slurm"), 2, "--on slurm and --hosts: choose one"),
        (
            ("--sync", "--stages", "2"),
            2,
            "--sync: no host is given to send the folder to; add --hosts",
        ),
        (("--hosts", "", "--stages", "2"), 2, "'' is not a host"),
        (("--nodes", "0", "--stages", "2"), 2, "--nodes: no cluster is given; add --on kubernetes"),
        (("--dry-run", "--stages", "2"), 2, "--dry-run: a local job submits nothing; add --on"),
    ],
)
def test_a_mistake_is_one_line(
    jobs: Jobs, client: Sshd, words: tuple[str, ...], status: int, error: str
) -> None:
    run = jobs.run(*words, source=GOES_ON)
    assert run.status == status
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert error in line


def test_a_host_with_another_python_is_rejected(jobs: Jobs, client: Sshd, tmp_path: Path) -> None:
    old = tmp_path / "python"
    change = "import platform; platform.python_version = lambda: '3.9.1'; "
    old.write_text(
        f'#!/bin/sh\nshift\nscript="$1"\nshift\nexec {sys.executable} -c "{change}$script" "$@"\n'
    )
    old.chmod(0o755)
    hosts = jobs.write(f"a 1 {old}\nb 1\n", "hosts")
    run = jobs.run("--hosts-file", str(hosts), source=GOES_ON)
    assert run.status == 1
    assert "error: host a: it has python 3.9.1, this host has 3." in run.stderr


@slow
def test_a_host_whose_shell_prints_without_end_is_named(
    jobs: Jobs, client: Sshd, tmp_path: Path
) -> None:
    endless = tmp_path / "python"
    endless.write_text(f"#!/bin/sh\nexec yes {'word ' * 200}\n")
    endless.chmod(0o755)
    hosts = jobs.write(f"a 1 {endless}\nb 1\n", "hosts")
    run = jobs.run("--hosts-file", str(hosts), source=GOES_ON)
    assert run.status == 1
    assert "error: host a: its agent sent an invalid message: a line of " in run.stderr


# Two hosts on one machine.


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Namespace, Sshd]]:
    """Return this host and one behind a cable that does not share the folder of the job."""
    folder, private = tmp_path / "ssh", tmp_path / "code"
    folder.mkdir()
    private.mkdir()
    with two_hosts() as (here, there), servers(folder) as made:
        hidden = f'mount -t tmpfs none {private} && exec "$@"'
        view = ("unshare", "--mount", "sh", "-c", hidden, "sh")
        made.add("far", address=there.address, before=view, namespace=there.name)
        monkeypatch.setenv("PATH", f"{made.path}:{os.environ['PATH']}")
        yield here, made


@slow
@pytest.mark.root
def test_a_folder_is_sent_and_two_hosts_give_the_numbers_of_one(
    jobs: Jobs, far: tuple[Namespace, Sshd], quiet: Record
) -> None:
    here, _ = far
    job_file = jobs.write(GOES_ON, "code/job.py")
    jobs.write("nothing", "code/__pycache__/left_out")

    def launch(*words: str, name: str) -> subprocess.CompletedProcess[str]:
        path = ("--run-dir", str(jobs.folder / name), "--hosts", "far:3", *words)
        words = ("launch", *WORDS, *path, str(job_file))
        return jobs.pipeworker(*words, namespace=here.name)

    without = launch(name="without")
    assert without.returncode == 1
    assert f"error: host far: it has no {job_file}; share its folder, or send it with --sync" in (
        without.stderr
    )
    done = launch("--sync", name="run")
    assert done.returncode == 0, done.stderr
    assert_same(Record(jobs.folder / "run"), quiet)
    not_shared = launch("--sync", name="code/run")
    assert "error: host far: it does not see the run directory" in not_shared.stderr


@slow
@pytest.mark.root
def test_a_cable_that_is_unplugged_beyond_the_timeout_changes_no_bit(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: Record
) -> None:
    """The host behind it is given up and then restarted."""
    job_file, run_dir = jobs.write(CALM), jobs.folder / "run"
    log = run_dir / "logs/coordinator.log"
    (tmp_path / "ssh").mkdir()
    with two_hosts() as both, servers(tmp_path / "ssh") as made:
        for name, host in zip(("near", "far"), both, strict=True):
            made.add(name, address=host.address, forking=jobs.server, namespace=host.name)
        for variable, value in jobs.forking.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("PATH", f"{made.path}:{os.environ['PATH']}")
        words = ("--hosts", "near:2,far:1", "--worker-timeout", "6", *WORDS)
        line = ("-m", "pipeworker", "launch", "--run-dir", str(run_dir), *words, str(job_file))
        process = jobs.python(*line, namespace=both[0].name)
        until(lambda: steps_of(run_dir) >= 2)
        both[0].cut()
        until(lambda: "has not answered for 6 s" in log.read_text())
        both[0].plug()
        run = ended(process, run_dir)
    assert any("has not answered for 6 s" in cause for cause in run.summary["causes"])
    assert_same(run, quiet)


def test_a_host_that_does_not_accept_the_folder_is_named(client: Sshd, tmp_path: Path) -> None:
    (tmp_path / "job.py").touch()
    silent = (*ssh.CLIENT, "a", "exit 3")
    full = (*ssh.CLIENT, "a", "echo no room >&2; exit 3")
    with pytest.raises(PipeworkerError, match="host a: it does not accept"):
        ssh.send(tmp_path, [silent])
    with pytest.raises(PipeworkerError, match=f"host a: it does not accept {tmp_path}: no room"):
        ssh.send(tmp_path, [full])


def test_what_the_user_configures_for_logins_does_not_affect_agents(client: Sshd) -> None:
    """A shell that is kept, and a port that another login has forwarded already."""
    client.add("login")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (client.folder / "config").open("a") as config:
            config.write("  RemoteCommand tmux new-session\n  ExitOnForwardFailure yes\n")
            config.write(f"  LocalForward 127.0.0.1:{port} 127.0.0.1:{port}\n")
        ran = subprocess.run([*ssh.CLIENT, "login", "echo here"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "here\n"), ran.stderr
