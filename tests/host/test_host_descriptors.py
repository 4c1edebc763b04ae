"""The reserve of file descriptors, the limit, and the check that there are enough."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
import threading

import pytest

from pipeworker.host.descriptors import check_available
from support.processes.limits import cgroup

OPENS = """
import os, resource
from pipeworker.host import descriptors

resource.setrlimit(resource.RLIMIT_NOFILE, (50, 90))
descriptors.ATTEMPTS = 5
reserve = descriptors.DescriptorReserve()
made = []

def use_up():
    before = len(made)
    while True:
        try:
            made.append(os.dup(0))
        except OSError:
            return len(made) - before

def write():
    open("/dev/null").close()
    tries.append(use_up())

def write_when_one_is_closed():
    tries.append(0)
    if len(tries) == 3:
        os.close(made.pop())
    open("/dev/null").close()

tries = []
print(use_up() > 35, use_up())
reserve.run(write)
print(tries[0] > 20, use_up())
tries = []
reserve.run(write_when_one_is_closed)
print(len(tries), use_up())
reserve.run(write)
try:
    reserve.run(write)
except OSError as error:
    print(error.strerror)
"""


def test_files_have_descriptors_that_connections_cannot_take() -> None:
    """The soft limit is raised as far as granted, less the reserve."""
    ran = subprocess.run([sys.executable, "-c", OPENS], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["True 0", "True 0", "3 0", "Too many open files"]


def test_what_is_available_is_given_back() -> None:
    threads = threading.active_count()
    for _ in range(3):
        check_available(8, 2)
    assert threading.active_count() == threads


def test_too_few_descriptors_are_reported_without_a_file_name() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with pytest.raises(OSError, match="Too many open files") as caught:
            check_available(256, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.errno == errno.EMFILE
    assert caught.value.filename is None


CHECKS = """
import sys
sys.stdin.readline()
from pipeworker.host.descriptors import check_tasks
for needed in (4, 5):
    try:
        check_tasks(needed)
    except OSError as error:
        print(needed, error.strerror)
"""


@pytest.mark.root
def test_too_few_processes_of_a_cgroup_are_reported_with_their_number() -> None:
    with cgroup("pids") as limited:
        limited.limit(5)
        with subprocess.Popen(
            [sys.executable, "-c", CHECKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            limited.add([child.pid])
            output, _ = child.communicate("\n", timeout=60)
    (line,) = output.splitlines()
    assert line.startswith("5 Resource temporarily unavailable: the workers of this host need ")
    assert "at least 5 processes and threads, and 4 are free; raise the limit" in line
