"""The watcher of sessions, which outlives the process that made it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support.jobs import processes_of, until

AGENT = """
import os, subprocess, sys, time
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
"""


def test_what_is_left_in_a_session_is_killed_when_the_agent_is(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", AGENT],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as agent:
        assert agent.stdout is not None
        started = {}
        while (line := agent.stdout.readline()) != "done\n":
            name, detached, number = line.split()
            started[name, detached] = int(number)
        found = processes_of(tmp_path).items()
        (watcher,) = [pid for pid, process in found if process.startswith("watcher\n")]
        os.kill(watcher, signal.SIGTERM)  # as to a whole host
        agent.kill()
    try:
        until(lambda: watcher not in processes_of(tmp_path))
        left = {started["watched", "True"], started["removed", "False"], started["removed", "True"]}
        until(lambda: processes_of(tmp_path).keys() == left)
    finally:
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)


def test_a_stopped_watcher_ends_with_an_agent_that_ends_by_itself(tmp_path: Path) -> None:
    source = AGENT + "watcher.resume()\n"
    with subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as agent:
        assert agent.stdin is not None
        stdout = agent.stdout
        assert stdout is not None
        until(lambda: stdout.readline() == "done\n")
        found = processes_of(tmp_path).items()
        (watcher,) = [pid for pid, process in found if process.startswith("watcher\n")]
        os.kill(watcher, signal.SIGSTOP)
        agent.stdin.close()
        assert agent.wait(20) == 0
    try:
        until(lambda: watcher not in processes_of(tmp_path))
    finally:
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)
