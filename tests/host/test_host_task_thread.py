"""A thread that performs tasks one after the other."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import os, sys, threading
from pipeworker.host.task_thread import TaskThread

os.nice(15)
if os.geteuid() == 0:
    os.setuid(65534)  # another user may not raise a priority
thread = TaskThread("low", niceness=10)
thread.submit(lambda: print(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
thread.close()
"""


def test_a_thread_of_a_job_under_nice_performs_its_tasks() -> None:
    """Without these threads no snapshot and no checkpoint is made."""
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    line = [sys.executable, "-c", CODE]
    done = subprocess.run(line, env=path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("19\n", "")
