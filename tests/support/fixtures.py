"""Fixtures that several test modules use."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import multiprocessing.util
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support.clusters.hosts import Host, two_hosts
from support.draws import FACTOR, draws
from support.processes.forked import Server
from support.processes.interpreter import fork_line_processes
from support.real_jobs.jobs import Jobs, Record, Reference, processes_of, until
from support.real_jobs.live import left_in
from support.real_jobs.ranks import Scripts
from support.real_jobs.sources import JOB
from support.real_jobs.torchrun import Torchrun

# No deadline: a busy machine is no defect. An ordinary run draws the same examples each time, so
# that it fails because of a change alone; with DRAWS, as every night, they are new ones.
settings.register_profile(
    "pipeworker", deadline=None, max_examples=draws(25), derandomize=FACTOR == 1
)
settings.load_profile("pipeworker")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the errors and logs of the processes of a test that fails."""
    report = yield
    jobs = vars(item).get("funcargs", {}).get("jobs")
    if report.when == "call" and report.failed and isinstance(jobs, Jobs):
        report.sections += [(name, text) for name, text in jobs.outputs() if text]
    return report


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what jobs of tests write apart from the user's: facts of layers, temporary files.

    At the end nothing of them may be left but the folders of logs that torchrun never removes.
    """
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    temporary = tmp_path_factory.mktemp("tmp")
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    # For the sockets of loaders in this process. Else each of their processes makes a folder of its
    # own, which stays when the process is killed.
    sockets = Path(multiprocessing.util.get_temp_dir())
    yield
    kept = [path for path in left_in(temporary) if path != sockets]
    left = [path for path in kept if not path.name.startswith("torchelastic_")]
    assert not left


@pytest.fixture
def users_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the options that users have: jobs are planned from their measured layers."""
    for name in ("PIPEWORKER_BALANCE", "PIPEWORKER_RECOMPUTE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def users_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the device that users have: this host's accelerators, if there are any."""
    monkeypatch.delenv("PIPEWORKER_DEVICE", raising=False)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The messages that this process logs, of level INFO and above."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    root, handler = logging.getLogger(), Handler()
    level = root.level
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    yield found
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Iterator[Server | None]:
    """The server that forks the processes of tests: one for all of pytest's own processes."""
    if pytestconfig.getoption("--cold"):
        yield None
        return
    made = Server(os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid())))
    fork_line_processes(made.address)
    yield made
    made.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, server: Server | None) -> Reference:
    """Return a function that trains without a disturbance, once for all of pytest's processes."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def train(*words: str, source: str = JOB) -> Record:
        key = hashlib.sha256(repr((words, source)).encode()).hexdigest()[:16]
        with (base / f"reference-{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = base / f"reference-{key}" / "run-1"
            if (path / "summary.json").exists():
                return Record(path)
            return Jobs(path.parent, server).train(*words, source=source)

    return train


@pytest.fixture
def jobs(tmp_path: Path, server: Server | None) -> Iterator[Jobs]:
    """Start real jobs; at the end none of their processes may be left."""
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
    below = f"{tmp_path}{os.sep}"  # a Path of each of thousands of modules takes 40 ms
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None) or ""
        if name == "pipeworker_job" or str(where).startswith(below):
            del sys.modules[name]
    sys.modules.update(modules)
    sys.path[:], sys.argv[:] = path, argv
