"""The watcher of sessions, which outlives the process that made it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.real_jobs.jobs import processes_of, until

AGENT = """
import os, subprocess, sys, time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pipeworker.host.session_watcher import SessionWatcher

watcher = SessionWatcher()
for name in ("watched", "removed"):
    leader = os.fork()
    if not leader:
        watcher.close()
        os.setsid()
        for detached in (False, True):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=detached)
            print(name, detached, child.pid, flush=True)
        os._exit(0)
    os.waitpid(leader, 0)
    watcher.add(leader)
    if name == "removed":
        watcher.remove(leader)
print("done", flush=True)
sys.stdin.read()
watcher.resume()
"""


@contextmanager
def agent_in(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int, dict[str, int]]]:
    """Yield an agent, its watcher and the processes in sessions, which are killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", AGENT],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as agent:
        assert agent.stdout is not None
        started = {}
        while (line := agent.stdout.readline()) != "done\n":
            name, _, number = line.rpartition(" ")
            started[name] = int(number)
        found = processes_of(folder).items()
        (watcher,) = [pid for pid, process in found if process.startswith("watcher\n")]
        try:
            yield agent, watcher, started
        finally:
            for pid in processes_of(folder):
                os.kill(pid, signal.SIGKILL)


def test_what_is_left_in_a_session_is_killed_when_the_agent_is(tmp_path: Path) -> None:
    with agent_in(tmp_path) as (agent, watcher, started):
        os.kill(watcher, signal.SIGTERM)  # as to a whole host
        agent.kill()
        agent.wait()
        until(lambda: watcher not in processes_of(tmp_path))
        left = {started["watched True"], started["removed False"], started["removed True"]}
        until(lambda: processes_of(tmp_path).keys() == left)


def test_a_stopped_watcher_ends_with_an_agent_that_ends_by_itself(tmp_path: Path) -> None:
    with agent_in(tmp_path) as (agent, watcher, _):
        os.kill(watcher, signal.SIGSTOP)
        assert agent.stdin is not None
        agent.stdin.close()
        assert agent.wait(20) == 0
        until(lambda: watcher not in processes_of(tmp_path))


SHARES = """
import os, signal, sys, tempfile
from multiprocessing import util
from pathlib import Path
from pipeworker.host.session_watcher import (
    SessionWatcher, choose_sockets_folder, share_sockets_folder
)

folder = choose_sockets_folder()
assert not Path(folder).exists()
watcher = SessionWatcher(folder)
share_sockets_folder(watcher.folder)
assert util.get_temp_dir() == folder and Path(folder).is_dir()
assert tempfile.tempdir == os.environ["TMPDIR"], "tempfile would try it with a file"
if sys.argv[1:]:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("words", [[], ["killed"]])
def test_a_folder_of_sockets_goes_with_the_process(tmp_path: Path, words: list[str]) -> None:
    """The watcher removes it if the process is killed; else both remove it."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    line = [sys.executable, "-c", SHARES, *words]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL if words else 0, "")
    if words:
        until(lambda: not [*tmp_path.iterdir()])
    assert not [*tmp_path.iterdir()]


REFUSED = """
import os, signal
from pipeworker.host.session_watcher import (
    SessionWatcher, choose_sockets_folder, share_sockets_folder
)

def fork():
    raise BlockingIOError

os.fork = fork
watcher = SessionWatcher(choose_sockets_folder())
share_sockets_folder(watcher.folder)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_folder_of_sockets_stays_where_there_is_no_process_for_a_watcher(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    line = [sys.executable, "-c", REFUSED]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    assert not [*tmp_path.iterdir()]
