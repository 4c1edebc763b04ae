"""What `pipeworker env` shows."""

from __future__ import annotations

import json
import platform
import uuid
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import cli
import pipeworker
from launcher import machine


def control(root: Path, name: str, text: str) -> None:
    path = root / "sys/fs/cgroup" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def cgroups(root: Path, text: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def test_the_narrowest_cgroup_counts(tmp_path: Path) -> None:
    cgroups(tmp_path, "0::/pod/container\n")
    assert (machine.quota(tmp_path), machine.memory_bound(tmp_path)) == (None, None)
    control(tmp_path, "pod/container/cpu.max", "max 100000\n")
    control(tmp_path, "pod/container/memory.max", "4096\n")
    control(tmp_path, "pod/cpu.max", "150000 100000\n")
    control(tmp_path, "pod/memory.max", "max\n")
    control(tmp_path, "memory.max", "8192\n")
    assert (machine.quota(tmp_path), machine.memory_bound(tmp_path)) == (1.5, 4096)


def test_cgroups_of_the_first_version(tmp_path: Path) -> None:
    """A container may not see the folder that its group is said to be in."""
    cgroups(tmp_path, "4:memory:/docker/abc\n3:cpuset:/\n1:cpu,cpuacct:/docker/abc\n0::/\n")
    control(tmp_path, "cpu/cpu.cfs_quota_us", "200000\n")
    control(tmp_path, "cpu/cpu.cfs_period_us", "100000\n")
    control(tmp_path, "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert (machine.quota(tmp_path), machine.memory_bound(tmp_path)) == (2.0, None)
    control(tmp_path, "cpu/cpu.cfs_quota_us", "-1\n")
    control(tmp_path, "memory/docker/abc/memory.limit_in_bytes", "4096\n")
    assert (machine.quota(tmp_path), machine.memory_bound(tmp_path)) == (None, 4096)


def test_without_cgroups_nothing_is_bound(tmp_path: Path) -> None:
    assert (machine.quota(tmp_path), machine.memory_bound(tmp_path)) == (None, None)


def test_it_shows_what_is_asked_for_first_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = uuid.uuid4().hex
    monkeypatch.setenv("PIPEWORKER_TOKEN", secret)
    monkeypatch.setenv("PIPEWORKER_STEPS", "12")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    ran = CliRunner().invoke(cli.main, ["env", "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["pipeworker"] == pipeworker.__version__
    assert found["torch"] == str(torch.__version__)
    assert found["python"] == platform.python_version()
    assert (found["PIPEWORKER_TOKEN"], found["PIPEWORKER_STEPS"]) == ("is set", "12")
    assert found["OMP_NUM_THREADS"] == "3"
    assert {"pyzmq", "msgpack", "platform", "kernel", "devices", "cores", "memory"} <= found.keys()
    assert {"/dev/shm", "RLIMIT_NOFILE"} <= found.keys()
    text = CliRunner().invoke(cli.main, ["env"]).stdout
    assert secret not in ran.stdout + text
    assert [line.split()[0] for line in text.splitlines()] == [*found]
