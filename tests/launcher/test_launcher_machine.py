"""The output of `pipeworker env`."""

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


def write_control_file(root: Path, name: str, text: str) -> None:
    path = root / "sys/fs/cgroup" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_cgroups(root: Path, text: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def test_the_smallest_limit_of_nested_cgroups_applies(tmp_path: Path) -> None:
    write_cgroups(tmp_path, "0::/pod/container\n")
    assert (machine.quota(tmp_path), machine.memory_bound(tmp_path)) == (None, None)
    write_control_file(tmp_path, "pod/container/cpu.max", "max 100000\n")
    write_control_file(tmp_path, "pod/container/memory.max", "4096\n")
    write_control_file(tmp_path, "pod/cpu.max", "150000 100000\n")
    write_control_file(tmp_path, "pod/memory.max", "max\n")
    write_control_file(tmp_path, "memory.max", "8192\n")
    assert (machine.quota(tmp_path), machine.memory_bound(tmp_path)) == (1.5, 4096)


def test_limits_of_cgroups_version_1(tmp_path: Path) -> None:
    """A container may not see the folder that /proc/self/cgroup names."""
    write_cgroups(tmp_path, "4:memory:/docker/abc\n3:cpuset:/\n1:cpu,cpuacct:/docker/abc\n0::/\n")
    write_control_file(tmp_path, "cpu/cpu.cfs_quota_us", "200000\n")
    write_control_file(tmp_path, "cpu/cpu.cfs_period_us", "100000\n")
    write_control_file(tmp_path, "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert (machine.quota(tmp_path), machine.memory_bound(tmp_path)) == (2.0, None)
    write_control_file(tmp_path, "cpu/cpu.cfs_quota_us", "-1\n")
    write_control_file(tmp_path, "memory/docker/abc/memory.limit_in_bytes", "4096\n")
    assert (machine.quota(tmp_path), machine.memory_bound(tmp_path)) == (None, 4096)


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert (machine.quota(tmp_path), machine.memory_bound(tmp_path)) == (None, None)


def test_env_shows_versions_and_variables_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
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
