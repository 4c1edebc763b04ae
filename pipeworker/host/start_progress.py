"""The progress of an agent that imports torch, which takes long on a busy host or a slow disk.

Another process reports it: a thread could not, because an import may hold the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Iterator

from pipeworker.environment import timings
from pipeworker.host.lifetime import die_with_parent

_DUMP = signal.SIGUSR2


@contextlib.contextmanager
def reported_progress(report: Callable[[float], None]) -> Iterator[None]:
    """Call `report` with the CPU seconds of this process: at once, then regularly in another one.

    The first report comes before the imports, because its receiver waits longer for a process that
    has not reported.
    If the process stands still for long, its stack is written to standard error once.
    """
    faulthandler.register(_DUMP, chain=False)
    pid, watcher = os.getpid(), -1
    with contextlib.suppress(OSError):  # without another process nothing is reported
        watcher = os.fork()
    if watcher == 0:
        try:
            _watch(pid, report)
        finally:
            os._exit(0)
    if watcher > 0:
        report(sum(os.times()[:2]))  # in ticks, as the later ones
    try:
        yield
    finally:
        if watcher > 0:
            os.kill(watcher, signal.SIGKILL)
            os.waitpid(watcher, 0)
        faulthandler.unregister(_DUMP)


def _watch(pid: int, report: Callable[[float], None]) -> None:
    """Report the CPU time of a process until it ends."""
    import psutil  # here: only this process needs it

    die_with_parent(pid)
    process, limits = psutil.Process(pid), timings()
    used, since = 0.0, time.monotonic()
    while os.getppid() == pid:
        time.sleep(limits.ping)
        before, used = used, sum(process.cpu_times()[:2])
        now = time.monotonic()
        if used > before:
            since = now
        elif now - since > limits.reach:
            since = float("inf")
            os.kill(pid, _DUMP)
        report(used)
