"""Forks the ranks of a script from a process that has imported torch once.

Run as a program it answers JSON lines on standard input: ``fork`` with a script's path and its
environment, ``wait`` with a pid and how long. Each rank is a process like any other that a user
starts.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any


def _run(script: str, environment: dict[str, str]) -> None:
    """In a fork: be the interpreter of a script; never returns."""
    status = 1
    try:
        os.setsid()
        path = Path(script)
        os.chdir(path.parent)
        name = environment.get("RANK", "alone")
        for descriptor, stream in ((0, os.devnull), (1, f"{name}.out"), (2, f"{name}.err")):
            handle = os.open(stream, os.O_RDWR | os.O_CREAT)
            os.dup2(handle, descriptor)
            os.close(handle)
        os.environ.update(environment)
        sys.argv, sys.path[0] = [path.name], str(path.parent)
        try:
            runpy.run_path(path.name, run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _fork(script: str, environment: dict[str, str]) -> int:
    pid = os.fork()
    if not pid:
        _run(script, environment)
    return pid


def _wait(pid: int, seconds: float) -> int | None:
    """The exit status, negative for a signal; None when it has not ended in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def main() -> None:
    import torch._dynamo  # noqa: F401

    import pipeworker.session.pipeline  # noqa: F401

    for line in sys.stdin:
        ((what, given),) = json.loads(line).items()
        answer: Any = {"fork": _fork, "wait": _wait}[what](*given)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
