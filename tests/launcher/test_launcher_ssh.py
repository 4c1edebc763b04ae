"""Hosts that ssh reaches: rendered, and for real on this machine."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import ssh
from launcher.spec import Host, JobSpec, seats
from pipeworker.errors import PipeworkerError, UsageError
from support.compare import assert_same
from support.forked import Server
from support.hosts import Host as Namespace
from support.hosts import two_hosts
from support.jobs import Jobs, Process, Run, processes_of, until
from support.sources import DIES, DROPOUT_JOB
from support.sshd import Sshd, servers

SPEC = JobSpec(
    name="job",
    job_file="/project/job.py",
    workers=3,
    words=("--steps", "5"),
    folder="/home/me",
    run_dir="/runs/x",
    hosts=(Host("a", 2), Host("me@b", 1, "/opt/python")),
    environment={"OMP_NUM_THREADS": "2"},
)
WORDS = ("--stages", "3", "--microbatches", "4", "--steps", "8")
GOES_ON = DROPOUT_JOB.replace("for _ in range(5)", "while True")
CALM = GOES_ON.replace("x = torch", "__import__('time').sleep(0.2)\n            x = torch")


# Rendered.


def test_an_agent_is_a_command_of_ssh_without_a_secret() -> None:
    first, second = (carried.line for carried in ssh.render(SPEC).carried)
    *client, host, line = first
    assert client == ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    assert host == "a"
    assert line.startswith(f"cd /home/me && exec env OMP_NUM_THREADS=2 {sys.executable} -c '")
    end = " pipeworker.host.forkserver /project/job.py /runs/x/run.json SSH_CONNECTION"
    assert line.endswith(end)
    assert second[-2] == "me@b"
    assert "OMP_NUM_THREADS=2 /opt/python -c '" in second[-1]
    assert first[-1].replace(sys.executable, "/opt/python") == second[-1]


def test_what_is_asked_for_is_lines_for_a_shell() -> None:
    text = ssh.render(SPEC, sync=True).text()
    sends = [line for line in text.splitlines() if line.startswith("#")]
    assert len(text.splitlines()) == 4
    assert [line.split()[:4] for line in sends] == [["#", "/project", "|", "ssh"]] * 2
    assert all("mkdir -p /project /home/me && cd /project" in line for line in sends)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [("a", 1)]),
        ("a:2,b:3", [("a", 2), ("b", 3)]),
        ("me@a.b.c:1, b", [("me@a.b.c", 1), ("b", 1)]),
        ("[::1]:4,[fe80::1]", [("::1", 4), ("fe80::1", 1)]),
    ],
)
def test_hosts_are_read(text: str, hosts: list[tuple[str, int]]) -> None:
    assert ssh.hosts_of(text) == tuple(Host(*host) for host in hosts)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is no host"),
        ("a,", "'' is no host"),
        ("-oProxyCommand=x:1", "is no host"),
        ("a b:1", "is no host"),
        ("a:0", "'0' is no number of workers"),
        ("a:x", "'x' is no number of workers"),
        ("a:1,b:1,a:2", "host a is there twice"),
        ("fd00::5", "'fd00:' is no host: an address of IPv6 must be in brackets"),
        ("[::1:2", "'[::1' is no host: an address of IPv6 must be in brackets"),
        ("ssh://a:22", "'ssh://a' is no host"),
        ("a:2:1", "'a:2' is no host"),
    ],
)
def test_what_are_no_hosts_is_said(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        ssh.hosts_of(text)


def test_a_file_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("\ufeff# ours\na 2\n\nb\nc 3 /opt/python  # slow\n")
    assert ssh.hosts_in(path) == (Host("a", 2), Host("b", 1), Host("c", 3, "/opt/python"))
    for text, why in (
        ("a 2 p q", "line 1: must be a host"),
        ("# none", "there is no host in it"),
        ("a\nb two", "line 2: 'two' is no number"),
        ("a:2", "line 1: 'a:2' is no host: .* in a file behind a space"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=why):
            ssh.hosts_in(path)
    with pytest.raises(UsageError, match="No such file"):
        ssh.hosts_in(tmp_path / "none")


def sent(folder: Path, to: Path) -> None:
    """Send a folder, by a shell of this host in the place of ssh's."""
    spec = replace(SPEC, job_file=str(folder / "job.py"), folder=str(folder), hosts=(Host("a", 1),))
    ((*_, line),) = ssh.render(spec, sync=True).sends
    assert line.count(str(folder)) == 3
    carrier = ("sh", "-c", line.replace(str(folder), str(to)))
    ssh.send(ssh.Request((), (carrier,), str(folder)))


def test_a_host_that_shares_the_folder_does_not_unpack_over_what_is_read(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 8  # more than is under way at once
    (tmp_path / "data").write_bytes(data)
    before = (tmp_path / "data").stat()
    sent(tmp_path, tmp_path)
    assert (tmp_path / "data").read_bytes() == data
    assert (tmp_path / "data").stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_what_is_sent_is_files_and_links(tmp_path: Path) -> None:
    folder, to, far = tmp_path / "code", tmp_path / "there", tmp_path / "far"
    (folder / "deep").mkdir(parents=True)
    to.mkdir()
    (folder / "deep/model.py").write_text("layers")
    (folder / "data").symlink_to("/nowhere")
    (folder / "more").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    far.write_text("another's")
    (to / "deep").mkdir()
    (to / "deep/model.py").symlink_to(far)
    sent(folder, to)
    found = {str(path.relative_to(to)) for path in to.rglob("*")}
    assert found == {"deep", "deep/model.py", "data", "more"}
    assert (to / "deep/model.py").read_text() == "layers"
    assert far.read_text() == "another's"
    assert (to / "data").readlink() == Path("/nowhere")


def test_a_file_that_cannot_be_sent_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").touch()
    monkeypatch.setattr(tarfile.TarFile, "add", denied)
    with pytest.raises(PipeworkerError, match=r"--sync cannot send .*: Permission denied"):
        sent(tmp_path, tmp_path)


def denied(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_neighbours_are_on_one_host_while_there_is_room() -> None:
    assert seats([2, 3, 1], 5) == [0, 0, 1, 1, 1]
    assert seats([0, 2], 2) == [1, 1]
    with pytest.raises(UsageError, match="3 workers, and places for 2"):
        seats([1, 1], 3)


# For real.


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory, server: Server | None) -> Iterator[Sshd]:
    """Two names of this machine."""
    with servers(tmp_path_factory.mktemp("ssh")) as made:
        made.add("a", "b", forking=server)
        yield made


@pytest.fixture
def client(near: Sshd, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Sshd:
    for name, value in jobs.forking.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{near.path}:{os.environ['PATH']}")
    return near


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, server: Server | None) -> Run:
    """On this host alone."""
    return Jobs(tmp_path_factory.mktemp("quiet"), server).train(*WORDS, source=GOES_ON)


def carriers(process: Process, host: str) -> list[int]:
    """The clients that carry the pipes of a host's agent."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == process.pid and host.encode() in line:
                found.append(int(entry.name))
    return found


def steps(path: Path) -> int:
    metrics = path / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def test_a_host_that_is_lost_comes_back_and_the_numbers_are_those_of_one(
    jobs: Jobs, client: Sshd, quiet: Run
) -> None:
    """From what its neighbour kept: there is no checkpoint to go back to.

    No secret is in a command line; the lost host's processes end with its connection.
    """
    hosts = ("--hosts", "a:2,b:1", "--snapshot-every", "1")
    process, path = jobs.start(*WORDS[:-1], "60", *hosts, source=GOES_ON)
    until(lambda: steps(path) >= 20)
    lines = " ".join(processes_of(jobs.folder).values())
    assert lines.count("pipeworker.host.forkserver") >= 2
    assert not re.search(r"[0-9a-f]{40}", lines)
    before = set(processes_of(jobs.folder))
    (carrier,) = carriers(process, "b")
    os.kill(carrier, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    lost = r"host b is lost: it was ended by signal 9 \(stage 2\); went on after step (\d+)"
    found = re.search(lost, said)
    assert found, said
    assert int(found[1]) >= 1
    run = Run(0, "", said, path)
    assert run.summary["restarts"] == 1
    assert [row["step"] for row in run.metrics] == [*range(1, 61)]
    assert [row["loss"] for row in run.metrics[:8]] == [row["loss"] for row in quiet.metrics]
    assert not before & set(processes_of(jobs.folder))


@pytest.mark.parametrize("also", [(), ("--shard-optimizer", "--read-data", "once")])
def test_a_replica_that_is_lost_with_its_host_takes_the_state_of_a_living_one(
    jobs: Jobs, client: Sshd, also: tuple[str, ...]
) -> None:
    """There is no checkpoint to go back to. What one replica alone has, a neighbour keeps."""
    words = ("--stages", "2", "--replicas", "2", "--microbatches", "4", "--steps", "24", *also)
    alone = jobs.train(*words, source=STATEFUL)
    process, path = jobs.start(
        *words, "--snapshot-every", "1", "--hosts", "a:2,b:2", source=STATEFUL
    )
    until(lambda: steps(path) >= 8)
    (carrier,) = carriers(process, "a")  # of the replica whose state is written elsewhere
    os.kill(carrier, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    run = Run(0, "", said, path)
    assert_same(run, alone)
    (went,) = re.findall(r"went on after step (\d+)", said)
    assert int(went) >= 6
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
"""A weight of the last stage is in the middle one's part of a snapshot."""


def test_a_worker_that_is_lost_goes_on_from_the_memories_of_all_hosts(
    jobs: Jobs, client: Sshd
) -> None:
    """Each host has its own part of the last snapshot, and nothing is on disk yet."""
    words = ("--microbatches", "4", "--steps", "90", "--stages", "3")
    source = TIED.replace("done() == 3", "done() == 80")
    once = jobs.train(*words, source=source)
    run = jobs.train(*words, "--hosts", "a:2,b:1", "--", "kill", source=source)
    assert (jobs.folder / "died").exists()
    assert_same(run, once)
    (line,) = [line for line in run.stderr.splitlines() if "went on" in line]
    assert "went on after step 0" not in line


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--hosts", "nowhere:2"), 1, "host nowhere is lost: ssh: Could not resolve hostname"),
        (("--hosts", "a:1", "--stages", "2"), 2, "there are 2 workers, and places for 1"),
        (("--hosts", "a:1", "--on", "slurm"), 2, "--on slurm and --hosts: choose one"),
        (("--sync", "--stages", "2"), 2, "--sync is of --hosts"),
        (("--hosts", "", "--stages", "2"), 2, "'' is no host"),
        (("--nodes", "0", "--stages", "2"), 2, "--nodes is of --on: which cluster?"),
        (("--dry-run", "--stages", "2"), 2, "--dry-run is of --on and --hosts"),
    ],
)
def test_mistakes_are_one_line(
    jobs: Jobs, client: Sshd, words: tuple[str, ...], status: int, said: str
) -> None:
    run = jobs.run(*words, source=GOES_ON)
    assert run.status == status
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert said in line


def test_another_python_is_refused(jobs: Jobs, client: Sshd, tmp_path: Path) -> None:
    old = tmp_path / "python"
    change = "import platform; platform.python_version = lambda: '3.9.1'; "
    old.write_text(
        f'#!/bin/sh\nshift\nscript="$1"\nshift\nexec {sys.executable} -c "{change}$script" "$@"\n'
    )
    old.chmod(0o755)
    hosts = jobs.write(f"a 1 {old}\nb 1\n", "hosts")
    run = jobs.run("--hosts-file", str(hosts), source=GOES_ON)
    assert run.status == 1
    assert "error: host a has python 3.9.1, and this host 3." in run.stderr


# Two hosts on one machine.


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Namespace, Sshd]]:
    """A host behind a cable, whose folders are not all those of this one."""
    folder, private = tmp_path / "ssh", tmp_path / "code"
    folder.mkdir()
    private.mkdir()
    with two_hosts() as (here, there), servers(folder) as made:
        hidden = f'mount -t tmpfs none {private} && exec "$@"'
        view = ("unshare", "--mount", "sh", "-c", hidden, "sh")
        made.add("far", address=there.address, before=("ip", "netns", "exec", there.name, *view))
        monkeypatch.setenv("PATH", f"{made.path}:{os.environ['PATH']}")
        yield here, made


@pytest.mark.root
def test_a_folder_is_sent_and_two_hosts_give_the_numbers_of_one(
    jobs: Jobs, far: tuple[Namespace, Sshd], quiet: Run
) -> None:
    here, _ = far
    job_file = jobs.write(GOES_ON, "code/job.py")
    jobs.write("nothing", "code/__pycache__/left_out")

    def launch(*words: str, name: str) -> subprocess.CompletedProcess[str]:
        path = ("--run-dir", str(jobs.folder / name), "--hosts", "far:3", *words)
        options: dict[str, Any] = {"namespace": here.name, "cold": True}
        return jobs.pipeworker("launch", *WORDS, *path, str(job_file), **options)

    without = launch(name="without")
    assert without.returncode == 1
    assert f"error: host far has no {job_file}: share its folder, or send it with --sync" in (
        without.stderr
    )
    done = launch("--sync", name="run")
    assert done.returncode == 0, done.stderr
    assert_same(Run(0, "", "", jobs.folder / "run"), quiet)
    not_shared = launch("--sync", name="code/run")
    assert "error: host far does not see the run directory" in not_shared.stderr


@pytest.mark.root
def test_a_cable_that_is_out_for_longer_than_is_waited_costs_no_bit(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: Run
) -> None:
    """The host behind it is given up, and its workers are started there again."""
    job_file, run_dir = jobs.write(CALM), jobs.folder / "run"
    metrics, log = run_dir / "metrics.jsonl", run_dir / "logs/coordinator.log"
    (tmp_path / "ssh").mkdir()
    with two_hosts() as both, servers(tmp_path / "ssh") as made:
        for name, host in zip(("near", "far"), both, strict=True):
            made.add(name, address=host.address, before=("ip", "netns", "exec", host.name))
        monkeypatch.setenv("PATH", f"{made.path}:{os.environ['PATH']}")
        words = ("--hosts", "near:2,far:1", "--worker-timeout", "3", *WORDS)
        line = ("-m", "pipeworker", "launch", "--run-dir", str(run_dir), *words, str(job_file))
        process = jobs.python(*line, namespace=both[0].name, cold=True)
        until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
        both[0].cut()
        until(lambda: "has not answered for 3 s" in log.read_text())
        both[0].plug()
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    run = Run(0, stdout, stderr, run_dir)
    assert any("has not answered for 3 s" in cause for cause in run.summary["causes"])
    assert_same(run, quiet)


def test_a_host_that_takes_nothing_is_named(client: Sshd, tmp_path: Path) -> None:
    (tmp_path / "job.py").touch()
    request = ssh.Request((), (("ssh", "-T", "-o", "x", "-o", "y", "a", "exit 3"),), str(tmp_path))
    broken = ssh.Request((), ((*ssh._CLIENT, "a", "echo no room >&2; exit 3"),), str(tmp_path))
    with pytest.raises(PipeworkerError, match="host a does not take"):
        ssh.send(request)
    with pytest.raises(PipeworkerError, match=f"host a does not take {tmp_path}: no room"):
        ssh.send(broken)
