"""Tests of the commands that reach hosts by ssh; tests/clusters/test_ssh.py has real servers."""

from __future__ import annotations

import errno
import os
import re
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.engines import ssh
from launcher.spec import Host, JobSpec
from pipeworker.errors import PipeworkerError, UsageError
from support.real_jobs.jobs import Jobs

SPEC = JobSpec(
    name="job",
    job_file="/project/job.py",
    workers=3,
    options=("--steps", "5"),
    folder="/home/me",
    run_dir="/runs/x",
    hosts=(Host("a", 2), Host("me@b", 1, "/opt/python")),
    environment={"OMP_NUM_THREADS": "2"},
)


def test_an_agent_is_a_command_of_ssh_without_a_secret() -> None:
    first, second = (agent.command for agent in ssh.Ssh().agents(SPEC))
    *client, host, line = first
    assert client == [*ssh.CLIENT]
    assert host == "a"
    assert line.startswith(f"cd /home/me && exec env OMP_NUM_THREADS=2 {sys.executable} -c '")
    end = " pipeworker.host.agent /project/job.py /runs/x/run.json SSH_CONNECTION"
    assert line.endswith(end)
    assert second[-2] == "me@b"
    assert "OMP_NUM_THREADS=2 /opt/python -c '" in second[-1]
    assert first[-1].replace(sys.executable, "/opt/python") == second[-1]


def test_hosts_behind_a_jump_host_get_the_address_of_the_launcher() -> None:
    (first, *_) = (agent.command for agent in ssh.Ssh().agents(SPEC))
    assert "SSH_CONNECTION=" not in first[-1]
    spec = replace(SPEC, launcher_address="10.0.0.1")
    for agent in ssh.Ssh().agents(spec):
        assert " env " in agent.command[-1]
        assert " SSH_CONNECTION=10.0.0.1 " in agent.command[-1]
        assert agent.command[-1].endswith(" SSH_CONNECTION")


def test_a_job_that_cannot_start_its_client_leaves_no_run(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the run is left as lost, and the same command rejects its directory."""
    monkeypatch.setenv("PATH", str(jobs.folder))
    run = jobs.run("--hosts", "a:1,b:1")
    error = "error: cannot start the process ssh: No such file or directory"
    assert (run.status, run.stderr.splitlines()[-1]) == (1, error)
    assert not run.path.exists()


def test_a_request_is_shown_as_lines_for_a_shell() -> None:
    text = ssh.Ssh().render(replace(SPEC, sync=True))
    sends = [line for line in text.splitlines() if line.startswith("#")]
    assert len(text.splitlines()) == 4
    assert [line.split()[:4] for line in sends] == [["#", "/project", "|", "ssh"]] * 2
    assert all("mkdir -p /project /home/me && cd /project" in line for line in sends)
    assert ["/opt/python -c" in line for line in sends] == [False, True]


def test_no_folder_is_sent_unless_the_user_asks_for_it() -> None:
    assert ssh.receivers(SPEC) == []


def test_hosts_with_too_few_places_are_rejected() -> None:
    with pytest.raises(UsageError, match="4 workers, and the hosts have places for 3"):
        ssh.Ssh().agents(replace(SPEC, workers=4))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [("a", 1)]),
        ("a:2,b:3", [("a", 2), ("b", 3)]),
        ("me@a.b.c:1, b", [("me@a.b.c", 1), ("b", 1)]),
        ("[::1]:4,[fe80::1]", [("::1", 4), ("fe80::1", 1)]),
    ],
)
def test_hosts_are_parsed(text: str, hosts: list[tuple[str, int]]) -> None:
    assert ssh.parse_hosts(text) == tuple(Host(*host) for host in hosts)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "'' is not a host"),
        ("a,", "'' is not a host"),
        ("-oProxyCommand=x:1", "is not a host"),
        ("a b:1", "is not a host"),
        ("a:0", "'0' is not a number of workers"),
        ("a:x", "'x' is not a number of workers"),
        ("a:\u00b2", "'\u00b2' is not a number of workers"),  # a digit to Python
        ("a:65536", "'65536' is not a number of workers"),
        ("a:1,b:1,a:2", "host a: named twice"),
        ("fd00::5", "'fd00:' is not a host; put an IPv6 address in brackets"),
        ("[::1:2", "'[::1' is not a host; put an IPv6 address in brackets"),
        ("ssh://a:22", "'ssh://a' is not a host"),
        ("a:2:1", "'a:2' is not a host"),
    ],
)
def test_invalid_hosts_are_an_error(text: str, error: str) -> None:
    with pytest.raises(UsageError, match=re.escape(error)):
        ssh.parse_hosts(text)


def test_a_file_of_hosts_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("\ufeff# ours\na 2\n\nb\nc 3 /opt/python  # slow\n")
    assert ssh.read_hosts(path) == (Host("a", 2), Host("b", 1), Host("c", 3, "/opt/python"))
    for text, error in (
        ("a 2 p q", "line 1: 'q' is unexpected; write a host"),
        (f"a {'9' * 5000}", "9' is not a number of workers; specify 1 to 65535"),
        ("# none", "the file names no host"),
        ("a\nb two", "line 2: 'two' is not a number"),
        ("a:2", "line 1: 'a:2' is not a host; .* in a file after a space"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=error):
            ssh.read_hosts(path)
    path.write_bytes(b"\xff")
    places = ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory"))
    for place, error in (*places, (path, "it is not a text file")):
        with pytest.raises(UsageError, match=f"{error}.*; give a text file with a host a line"):
            ssh.read_hosts(place)


def send(folder: Path, to: Path) -> None:
    """Send a folder through a shell of this host instead of ssh."""
    spec = replace(SPEC, job_file=str(folder / "job.py"), folder=str(folder), sync=True)
    ((*_, line),) = ssh.receivers(replace(spec, hosts=(Host("a", 1),)))
    assert line.count(str(folder)) == 3
    script = line.replace(str(folder), str(to))
    unused = [""] * (len(ssh.CLIENT) - 3)
    carrier = ("sh", "-c", script, *unused, "a")  # the host is where ssh's command has it
    ssh.send(folder, [carrier])


def test_a_host_that_shares_the_folder_unpacks_nothing(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 8  # more than a pipe holds
    (tmp_path / "data").write_bytes(data)
    before = (tmp_path / "data").stat()
    send(tmp_path, tmp_path)
    assert (tmp_path / "data").read_bytes() == data
    assert (tmp_path / "data").stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_files_and_links_are_sent(tmp_path: Path) -> None:
    folder, to, far = tmp_path / "code", tmp_path / "there", tmp_path / "far"
    (folder / "deep").mkdir(parents=True)
    to.mkdir()
    (folder / "deep/model.py").write_text("layers")
    (folder / "data").symlink_to("/nowhere")
    (folder / "more").symlink_to(tmp_path)
    for name in (".git", ".venv", "__pycache__", "deep/runs"):
        (folder / name).mkdir()
        (folder / name / "file").touch()
    (folder / ".pipeworker-x").touch()  # which another launcher removes soon
    os.mkfifo(folder / "pipe")
    far.write_text("of another user")
    (to / "deep").mkdir()
    (to / "deep/model.py").symlink_to(far)
    send(folder, to)
    found = {str(path.relative_to(to)) for path in to.rglob("*")}
    assert found == {"deep", "deep/model.py", "data", "more"}
    assert (to / "deep/model.py").read_text() == "layers"
    assert far.read_text() == "of another user"
    assert (to / "data").readlink() == Path("/nowhere")


@pytest.mark.parametrize("filters", [True, False])
def test_a_file_that_a_link_of_the_host_leads_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: bool
) -> None:
    if not filters:  # as in Python before 3.10.12 and 3.11.4
        (tmp_path / "sitecustomize.py").write_text(
            "import tarfile\nvars(tarfile).pop('tar_filter', None)\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder, to, far = tmp_path / "code", tmp_path / "there", tmp_path / "far"
    for path in (folder / "deep", to, far):
        path.mkdir(parents=True)
    (folder / "deep/model.py").write_text("layers")
    (to / "deep").symlink_to(far)
    reason = f"deep/model.py would be written to {far}; remove the link on that host"
    with pytest.raises(PipeworkerError, match=f"host a: it does not accept {folder}: {reason}"):
        send(folder, to)
    assert not [*far.iterdir()]


def test_a_file_that_cannot_be_sent_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").touch()
    monkeypatch.setattr(tarfile.TarFile, "add", denied)
    with pytest.raises(PipeworkerError, match=r"--sync: cannot send .*: Permission denied"):
        send(tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]


@pytest.mark.parametrize(
    ("script", "reason"), [("echo no room >&2; exit 3", "no room"), ("exit 3", "exit status 3")]
)
def test_a_host_that_ends_before_it_has_read_all_gives_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], script: str, reason: str
) -> None:
    (tmp_path / "data").write_bytes(bytes(1 << 20))  # more than a pipe holds
    carrier = ("sh", "-c", f"echo welcome; {script}", *[""] * (len(ssh.CLIENT) - 3), "a")
    with pytest.raises(PipeworkerError, match=f"host a: it does not accept {tmp_path}: {reason}"):
        ssh.send(tmp_path, [carrier])
    assert capfd.readouterr().out == ""


def test_a_client_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    client = f"{tmp_path}/no-ssh"  # a folder of PATH may be one that the user cannot search
    with pytest.raises(PipeworkerError, match=f"cannot start {client}: No such file or directory"):
        ssh.send(tmp_path, [(client,)])


def test_a_folder_that_takes_no_marker_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.mkstemp", denied)
    with pytest.raises(PipeworkerError, match=f"--sync: cannot make a file in {tmp_path}"):
        ssh.send(tmp_path, [("true",)])


def denied(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
