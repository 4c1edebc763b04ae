"""Limits of cgroups, and what is free under them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeworker.host import cgroups
from pipeworker.host.cgroups import available_memory, available_tasks, core_quota, memory_limit

MB = 1 << 20


class Tree:
    """The files of a system that describe one process's cgroups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mounts = 0
        self.write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    1048576 kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def mount(self, point: str, kind: str, options: str = "rw", mounted: str = "/") -> None:
        self._mounts += 1
        path = self.root / "proc/self/mountinfo"
        before = path.read_text() if path.exists() else "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        number = 30 + self._mounts
        line = f"{number} 22 0:{number} {mounted} {point} rw shared:9 - {kind} {kind} {options}\n"
        self.write("proc/self/mountinfo", before + line)

    def memory(self, folder: str, limit: str, used: int, inactive_file: int = 0) -> None:
        """Write the files of a memory cgroup of version 2."""
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {inactive_file}\nfile 7\n")

    def old_memory(self, folder: str, limit: int, used: int, inactive_file: int = 0) -> None:
        """Write the files of a memory cgroup of version 1."""
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        own = f"rss 5\ninactive_file {inactive_file // 2}\n"
        self.write(f"{folder}/memory.stat", f"{own}total_inactive_file {inactive_file}\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_the_least_of_nested_limits_applies(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/slurm/job/step\n")
    tree.mount("/sys/fs/cgroup", "cgroup2")
    assert (core_quota(tree.root), memory_limit(tree.root)) == (None, None)
    assert available_memory(tree.root) == 1 << 30
    tree.memory("sys/fs/cgroup/slurm/job/step", "max", 90 * MB)
    tree.memory("sys/fs/cgroup/slurm/job", f"{100 * MB}", 95 * MB, 25 * MB)
    tree.memory("sys/fs/cgroup/slurm", f"{200 * MB}", 180 * MB)
    tree.write("sys/fs/cgroup/slurm/job/step/cpu.max", "max 100000\n")
    tree.write("sys/fs/cgroup/slurm/cpu.max", "150000 100000\n")
    assert (core_quota(tree.root), memory_limit(tree.root)) == (1.5, 100 * MB)
    assert available_memory(tree.root) == 20 * MB  # under the outermost limit, the least is free
    tree.memory("sys/fs/cgroup/slurm", f"{200 * MB}", 100 * MB)
    assert available_memory(tree.root) == 30 * MB


def test_above_a_high_memory_boundary_processes_would_be_slowed_down(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/unit.scope\n")
    tree.mount("/sys/fs/cgroup", "cgroup2")
    tree.memory("sys/fs/cgroup/unit.scope", "max", 10 * MB)
    tree.write("sys/fs/cgroup/unit.scope/memory.high", f"{64 * MB}\n")
    assert (memory_limit(tree.root), available_memory(tree.root)) == (64 * MB, 54 * MB)


def test_more_than_the_limit_may_be_in_use(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/\n")
    tree.mount("/sys/fs/cgroup", "cgroup2")
    tree.memory("sys/fs/cgroup", f"{MB}", 2 * MB)
    assert available_memory(tree.root) == 0


def test_limits_of_version_1(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n")
    tree.mount("/sys/fs/cgroup/memory", "cgroup", "rw,memory")
    tree.mount("/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
    tree.old_memory("sys/fs/cgroup/memory", 9223372036854771712, 800 * MB)
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert (core_quota(tree.root), memory_limit(tree.root)) == (None, None)
    assert available_memory(tree.root) == 1 << 30
    tree.old_memory("sys/fs/cgroup/memory/docker/abc", 64 * MB, 60 * MB, 10 * MB)
    tree.old_memory("sys/fs/cgroup/memory/docker", 128 * MB, 60 * MB)
    tree.write("sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "200000\n")
    tree.write("sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us", "100000\n")
    assert (core_quota(tree.root), memory_limit(tree.root)) == (2.0, 64 * MB)
    assert available_memory(tree.root) == 14 * MB


@pytest.mark.parametrize(("own", "inside"), [("/docker/abc", ""), ("/docker/abc/job", "/job")])
def test_a_container_sees_its_own_part_of_the_tree(tree: Tree, own: str, inside: str) -> None:
    """/proc/self/cgroup names the path on the host, and only the container's part is mounted."""
    tree.write("proc/self/cgroup", f"4:memory:{own}\n0::/\n")
    tree.mount("/sys/fs/cgroup/memory", "cgroup", "rw,memory", mounted="/docker/abc")
    tree.old_memory(f"sys/fs/cgroup/memory{inside}", 64 * MB, 60 * MB)
    assert (memory_limit(tree.root), available_memory(tree.root)) == (64 * MB, 4 * MB)


def test_a_path_outside_of_the_mounted_part_leaves_the_limit_of_that_part(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "4:memory:/elsewhere\n")
    tree.mount("/sys/fs/cgroup/memory", "cgroup", "rw,memory", mounted="/docker/abc")
    tree.old_memory("sys/fs/cgroup/memory", 64 * MB, 60 * MB)
    assert (memory_limit(tree.root), available_memory(tree.root)) == (64 * MB, 4 * MB)


def test_limits_of_both_versions_apply_on_a_hybrid_system(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "4:memory:/job\n1:name=systemd:/session\n0::/user.slice\n")
    tree.mount("/sys/fs/cgroup/unified", "cgroup2")
    tree.mount("/sys/fs/cgroup/systemd", "cgroup", "rw,xattr,name=systemd")
    tree.mount("/sys/fs/cgroup/memory", "cgroup", "rw,memory")
    tree.old_memory("sys/fs/cgroup/memory/job", 64 * MB, 32 * MB)
    tree.write("sys/fs/cgroup/unified/user.slice/cpu.max", "50000 100000\n")
    assert (core_quota(tree.root), memory_limit(tree.root)) == (0.5, 64 * MB)
    assert available_memory(tree.root) == 32 * MB


def test_the_fewest_free_processes_of_nested_cgroups_count(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "7:pids:/a/b\n")
    tree.mount("/sys/fs/cgroup/pids", "cgroup", "rw,pids")
    tree.write("sys/fs/cgroup/pids/a/b/pids.max", "max\n")
    tree.write("sys/fs/cgroup/pids/a/b/pids.current", "7\n")
    assert available_tasks(tree.root) is None
    tree.write("sys/fs/cgroup/pids/a/pids.max", "100\n")
    tree.write("sys/fs/cgroup/pids/a/pids.current", "70\n")
    assert available_tasks(tree.root) == 30
    tree.write("sys/fs/cgroup/pids/a/b/pids.max", "5\n")  # set below the present number
    assert available_tasks(tree.root) == 0


def test_without_cgroups_the_hosts_memory_is_available(tree: Tree) -> None:
    assert (core_quota(tree.root), memory_limit(tree.root)) == (None, None)
    assert available_memory(tree.root) == 1 << 30


def test_memory_that_is_not_known_is_not_available(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == 0


def test_processes_that_the_kernel_kills_for_memory_are_counted(tree: Tree) -> None:
    assert cgroups.memory_kills(tree.root) == 0
    tree.write("proc/vmstat", "pgfault 7\noom_kill 3\noom_kill_other 9\n")
    assert cgroups.memory_kills(tree.root) == 3


def test_this_process_has_memory() -> None:
    assert cgroups.available_memory() > 0


def test_a_system_without_a_page_cache_of_cgroups_has_what_they_do_not_use(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/job\n")
    tree.mount("/sys/fs/cgroup", "cgroup2")
    tree.write("sys/fs/cgroup/job/memory.max", f"{90 * MB}\n")
    assert available_memory(tree.root) == 90 * MB


def test_a_mount_of_a_version_in_which_the_process_has_no_cgroup_has_no_limit(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "4:memory:/job\n")
    tree.mount("/sys/fs/cgroup/unified", "cgroup2")
    assert memory_limit(tree.root) is None


@pytest.mark.parametrize(
    ("point", "source"),
    [
        ("/mnt/data", ""),
        (os.fsdecode(b"/mnt/donn\xe9es"), "/dev/sdb"),
        ("/mnt/a\x0bb\u2028c", "x y"),
    ],
    ids=["an empty source", "a path of other bytes", "a path with line separators"],
)
def test_other_mounts_of_the_host_may_be_odd(tree: Tree, point: str, source: str) -> None:
    source = source.replace(" ", "\\040")  # as the kernel writes it
    mounts = [
        f"40 22 0:40 / {point} rw - tmpfs {source} rw,size=4k",
        "41 22 0:41 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
    ]
    tree.write("proc/self/cgroup", "0::/job\n")
    (tree.root / "proc/self/mountinfo").write_bytes(os.fsencode("\n".join(mounts) + "\n"))
    tree.memory("sys/fs/cgroup/job", f"{64 * MB}", 60 * MB)
    assert (memory_limit(tree.root), available_memory(tree.root)) == (64 * MB, 4 * MB)
