"""A child process that speaks lines, here another program."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys

import pytest

from pipeworker.host.line_process import LineProcess
from pipeworker.wire.lines import FromHooks, ToHooks, Warned, encode

DEBUGGER = """
import ctypes, sys
print(ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), None, None), flush=True)
sys.stdin.read()
"""
"""Attaches to a process (PTRACE_SEIZE), and does nothing more."""


def test_a_killed_process_that_a_debugger_holds_is_not_waited_for() -> None:
    held: LineProcess[ToHooks, FromHooks] = LineProcess("held", ["sleep", "1000"], FromHooks)
    words = [sys.executable, "-c", DEBUGGER, str(held.pid)]
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True) as debugger:
        assert debugger.stdout
        if debugger.stdout.readline() != "0\n":
            held.kill()
            pytest.skip("this user may trace no other processes")
        assert held.wait(0.0) == -signal.SIGKILL
        os.kill(held.pid, 0)
    assert os.waitpid(held.pid, 0)[0] == held.pid


def test_what_a_process_prints_before_its_first_line_is_skipped() -> None:
    """A ``sitecustomize`` may print into the standard output of each of our processes."""
    warned = Warned("hooks: late")
    script = f"echo hello; printf %s {shlex.quote(encode(warned).decode())}"
    process: LineProcess[ToHooks, FromHooks] = LineProcess("hooks", ["sh", "-c", script], FromHooks)
    received: list[FromHooks] = []
    more = True
    while more and not received:
        received, more = process.receive()
    assert received == [warned]
    assert process.skipped() == ["hello"]
    assert process.skipped() == []
    process.wait(5.0)


def test_nothing_is_received_from_a_process_that_was_waited_for() -> None:
    """A thread that forwards lines may have been held up meanwhile, as by a stopped terminal."""
    process: LineProcess[ToHooks, FromHooks] = LineProcess("hooks", ["true"], FromHooks)
    assert process.wait(5.0) == 0
    assert process.receive() == ([], False)
