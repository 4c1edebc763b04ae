"""Forked processes of the tests behave as new interpreters, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes.forked import Server
from support.processes.nanobind import without_reports
from support.real_jobs.jobs import Jobs, processes_of, until
from support.slow import mostly_slow, slow

LEAKS = """\
starting 2 workers
nanobind: leaked 3 instances!
 - leaked instance 0x7f0 of type "triton.ir.context"
nanobind: leaked 2 types!
 - leaked type "triton.ir.module"
 - ... skipped remainder
nanobind: leaked 1 functions!
 - leaked function "parse"
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.htmlerror: cannot start the worker
nanobind: leaked 3 instances!nanobind: leaked 2 types!done: 5 steps
"""

PROBE = """
    import gc, json, logging, os, random, signal, sys, tempfile, threading
    import neighbour
    kept = [n for n in range(64) if os.path.exists(f"/proc/self/fd/{n}")]
    names = [name for name in sys.modules if name.partition(".")[0] == "support"]
    print(json.dumps({
        "arguments": sys.argv, "path": sys.path, "folder": os.getcwd(), "file": __file__,
        "environment": dict(os.environ), "descriptors": kept, "main": __name__, "ours": names,
        "main module": vars(sys.modules["__main__"])["PROBE"],
        "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
        "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "wakeup": signal.set_wakeup_fd(-1), "handlers": len(logging.root.handlers),
        "threads": threading.active_count(), "temporary": tempfile.gettempdir(),
        "collector": [gc.isenabled(), gc.get_threshold()], "input": sys.stdin.read(),
        "streams": [[f.encoding, f.errors, f.line_buffering] for f in (sys.stdout, sys.stderr)],
    }, indent=1)) if (PROBE := "is there") else None
"""

ENDS = [
    "pass",
    "sys.exit()",
    "sys.exit(3)",
    "sys.exit('in words')",
    "1 / 0",
    "raise KeyboardInterrupt",
    "os._exit(4)",
    "os.kill(os.getpid(), signal.SIGTERM)",
    "os.kill(os.getpid(), signal.SIGINT)",
    "import atexit; atexit.register(print, 'the end'); print('first')",
    "import atexit; atexit.register(lambda: print(repr(sys.last_value))); 1 / 0",
    "import threading; threading.Timer(0.1, print, ['later']).start(); print('first')",
    "os.close(1); print('nowhere')",
]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Restore signals that background jobs and nohup ignore: an interpreter inherits that."""
    ignored = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ignored}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run_script(jobs: Jobs, path: Path, cold: bool) -> tuple[int | None, str, str]:
    env = {**os.environ, "TMPDIR": str(jobs.folder), "WORD": "of the test"}
    process = jobs.python(path.name, "one", "-x", folder=path.parent, env=env, cold=cold)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


def test_a_forked_script_has_the_surroundings_of_a_fresh_one(jobs: Jobs) -> None:
    jobs.write("", "folder/neighbour.py")
    path = jobs.write(PROBE, "folder/probe.py")
    forked, fresh = (run_script(jobs, path, cold) for cold in (False, True))
    assert fresh[0] == 0, fresh[2]
    assert forked[1].splitlines() == fresh[1].splitlines()
    assert forked == fresh


@pytest.mark.parametrize("end", mostly_slow(ENDS, 2))
def test_a_forked_script_ends_as_a_fresh_one_does(jobs: Jobs, end: str) -> None:
    path = jobs.write(f"import os, signal, sys\n{end}\n", "folder/end.py")
    forked, fresh = (run_script(jobs, path, cold) for cold in (False, True))
    assert forked == fresh


def test_each_process_has_its_own_random_numbers(jobs: Jobs) -> None:
    path = jobs.write("import random, numpy; print(random.random(), numpy.random.rand())")
    (_, first, _), (_, second, _) = (run_script(jobs, path, cold=False) for _ in range(2))
    assert not set(first.split()) & set(second.split())


def test_nothing_outlives_the_server(tmp_path: Path) -> None:
    """Users of one name share a server, which ends with its last lease and kills its processes."""
    name = uuid.uuid4().hex
    first, second = Server(name, warm=False), Server(name)
    assert first.pid == second.pid
    first.close()
    line = [sys.executable, "-c", "import time; print('there', flush=True); time.sleep(1000)"]
    process = second.start(line, cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    assert list(processes_of(tmp_path)) == [process.pid]
    second.close()
    until(lambda: not processes_of(tmp_path))
    until(lambda: not Path(f"/proc/{first.pid}").exists() or state(first.pid) == "Z")
    with pytest.raises(ConnectionError):
        process.wait()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@slow
def test_a_process_ends_with_the_process_that_requested_it(jobs: Jobs) -> None:
    requests = """
        import subprocess, sys, time
        from support.processes.forked import Server
        server = Server(sys.argv[1], warm=False)
        line = [sys.executable, "-c", "import time; print('there', flush=True); time.sleep(1000)"]
        process = server.start(line, stdout=subprocess.PIPE)
        print(server.pid, process.pid, process.stdout.readline(), flush=True)
        time.sleep(1000)
    """
    path = jobs.write(requests)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    requester = jobs.python(str(path), uuid.uuid4().hex, env=env, cold=True)
    assert requester.stdout is not None
    server, child, _ = requester.stdout.readline().split()
    assert int(child) in processes_of(jobs.folder)
    requester.kill()
    assert requester.wait(60) == -signal.SIGKILL
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (server, child)))


@slow
def test_a_forked_process_computes_gradients_beside_an_accelerator(jobs: Jobs) -> None:
    """In a fork of a process that has computed one and sees an accelerator, torch refuses to."""
    forks = """
        import os, torch
        from torch.utils import backend_registration
        backend_registration._setup_privateuseone_for_python_backend("pretend")
        from support.processes.server import warm_up
        warm_up(["torch"])
        if not (pid := os.fork()):
            x = torch.ones(2, requires_grad=True)
            (x * 2).sum().backward()
            os._exit(3 if x.grad.tolist() == [2, 2] else 1)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = jobs.python(str(jobs.write(forks)), env=env, cold=True)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 3, stderr


def test_reports_of_nanobind_are_removed_from_within_lines() -> None:
    kept = ["starting 2 workers", "error: cannot start the worker", "done: 5 steps"]
    assert without_reports(LEAKS).splitlines() == kept
    assert without_reports("a job that leaked\n - leaked\n") == "a job that leaked\n - leaked\n"
