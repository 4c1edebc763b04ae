"""Processes that end together with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipeworker.host import lifetime
from support.real_jobs.jobs import until

CHILD = """
import os, sys
from pipeworker.host.lifetime import die_with_parent

parent = os.getppid()
die_with_parent(parent)
if sys.argv[1] == "within":
    print(os.getpid(), flush=True)
    sys.stdin.read()
die_with_parent(parent, 0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize("where", ["within", "behind"])
def test_a_process_dies_with_its_parent_while_bound_to_it(where: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    line = [sys.executable, "-c", PARENT, CHILD, where]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(line, env=env, **pipes) as parent:  # type: ignore[call-overload]
        child = Path("/proc", parent.stdout.readline().decode().strip())
        parent.kill()
        parent.wait()
        if where == "behind":
            assert child.exists()
            parent.stdin.close()
        until(lambda: not child.exists())


@pytest.mark.parametrize("safe", ["", "1"], ids=["as usual", "PYTHONSAFEPATH"])
def test_a_process_starts_beside_files_named_like_modules_of_python(
    tmp_path: Path, safe: str
) -> None:
    """The coordinator ends at once, because it gets no configuration."""
    for name in ("signal", "sys", "importlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    done = subprocess.run(
        lifetime.command("pipeworker.coordinator.service"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": safe},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_a_process_that_starts_outlives_the_request_for_a_checkpoint(tmp_path: Path) -> None:
    """A cluster sends it to all processes of a job, also to those that still import torch."""
    raises = "import signal\nsignal.raise_signal(signal.SIGUSR1)\ndef main(): return 7"
    (tmp_path / "starting.py").write_text(raises)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run(lifetime.command("starting"), env=env).returncode == 7


LEADER = """
import os, sys, time
from multiprocessing import shared_memory

made = shared_memory.SharedMemory(create=True, size=1)
if not os.fork():
    time.sleep(1000)
print(made.name, flush=True)
sys.stdin.readline()
os._exit(0)
"""


def is_tracker(pid: int) -> bool:
    return "multiprocessing.resource_tracker" in " ".join(psutil.Process(pid).cmdline())


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "alive"])
@pytest.mark.parametrize("stopped", [False, True], ids=["", "stopped"])
def test_shared_memory_goes_with_the_group_that_made_it(
    ends: bool, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resource tracker removes it when the others of its group have ended, unless it hangs."""
    monkeypatch.setattr(lifetime, "TRACKER_SECONDS", 0.1 if stopped else 60.0)
    line = [sys.executable, "-c", LEADER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(line, start_new_session=True, **pipes) as leader:  # type: ignore[call-overload]
        memory = Path("/dev/shm", leader.stdout.readline().decode().strip())
        group = lifetime.processes_with(os.getpgid, {leader.pid})
        assert len(group) == 3
        until(lambda: any(map(is_tracker, group)))  # one is not yet when it is forked
        (tracker,) = filter(is_tracker, group)
        if stopped:
            os.kill(tracker, signal.SIGSTOP)
        if ends:
            leader.stdin.close()
            leader.wait()
        assert memory.exists()
        lifetime.kill_group(leader.pid)
        leader.wait()
        until(lambda: not lifetime.processes_with(os.getpgid, {leader.pid}))
        assert memory.exists() is stopped
        if stopped:
            memory.unlink()


def test_a_process_whose_name_is_cut_off_in_a_character_can_be_stopped() -> None:
    code = "open('/proc/self/comm', 'wb').write(b'\\xd1'); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:  # type: ignore[call-overload]
        try:
            process.stdout.readline()
            assert not lifetime.is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            until(lambda: lifetime.is_stopped(process.pid))
        finally:
            process.kill()
