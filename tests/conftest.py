"""Fixtures that several test modules use."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Threads that wait for each other spin: with several processes of tests that costs most of the time
# of both. What a job is to have it is told.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from support.forked import Server
from support.hosts import Host, two_hosts
from support.interpreter import fork_line_processes
from support.jobs import Jobs, processes_of, until
from support.ranks import Scripts
from support.torchrun import Torchrun

settings.register_profile("pipeworker", deadline=None)  # a busy machine is no defect
settings.load_profile("pipeworker")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cold", action="store_true", help="start every process as an interpreter of its own"
    )


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Iterator[Server | None]:
    """What forks the processes of tests: one for all of pytest's own processes."""
    if sys.platform != "linux" or pytestconfig.getoption("--cold"):
        yield None
        return
    made = Server(os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid())))
    fork_line_processes(made.address)
    yield made
    made.close()


@pytest.fixture
def jobs(tmp_path: Path, server: Server | None) -> Iterator[Jobs]:
    """Real jobs; at the end no process of theirs may be left."""
    made = Jobs(tmp_path, server)
    try:
        yield made
        until(lambda: not processes_of(tmp_path))
    finally:
        made.close()
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def scripts(jobs: Jobs) -> Iterator[Scripts]:
    """Scripts with a loop of their own, on some ranks."""
    with Scripts(jobs) as made:
        yield made


@pytest.fixture
def torchrun(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Iterator[Torchrun]:
    """Jobs of torchrun."""
    with Torchrun(jobs, monkeypatch) as made:
        yield made


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, where network namespaces can be made."""
    with two_hosts() as made:
        yield made


@pytest.fixture
def as_a_worker(tmp_path: Path) -> Iterator[None]:
    """A job file changes the process it is loaded in; put that back."""
    modules, path, argv = dict(sys.modules), list(sys.path), list(sys.argv)
    yield
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None) or ""
        if name == "pipeworker_job" or Path(where).is_relative_to(tmp_path):
            del sys.modules[name]
    sys.modules.update(modules)
    sys.path[:], sys.argv[:] = path, argv
