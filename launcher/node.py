"""A host of a job, as a cluster starts it: torchrun's agent and its ranks.

Torchrun exits with 1, whatever the exit statuses of its ranks. A cluster must know which failures
are worth a retry, so this process returns the status of the ranks.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Sequence

from pipeworker.errors import AGAIN
from pipeworker.host.lifetime import die_with_parent

_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DELIBERATE = (2, 1, 130)
"""Exit statuses that ranks choose: a mistake precedes a failure, and both precede an interrupt."""


def torchrun_options(nodes: int, rank: int, workers: int, at: str, port: int) -> tuple[str, ...]:
    """Return the options of ``torchrun`` for host `rank` of a job, which has so many `workers`.

    The hosts meet at `port` of the first one, `at`.
    """
    each = ("--nproc-per-node", str(workers))
    if nodes == 1:
        return ("--standalone", *each)
    meet = ("--master-addr", at, "--master-port", str(port))
    return ("--nnodes", str(nodes), "--node-rank", str(rank), *meet, *each)


def run(words: Sequence[str]) -> int:
    """Run the ranks of this host, as ``torchrun WORDS``; return the exit status.

    This process may be the first one of a container: it forwards signals to torchrun's agent, its
    child, and reaps the processes that the kernel gives it.
    """
    waited = {*_ENDS, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    me, agent = os.getpid(), os.fork()
    if not agent:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _run_agent(me, words)
    try:
        while True:
            number = signal.sigwait(waited)
            if number != signal.SIGCHLD:
                os.kill(agent, number)
            elif (status := _reap(agent)) is not None:
                return status if status >= 0 else 128 - status
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def status_of(codes: Collection[int]) -> int:
    """Return the exit status of a host, from the exit codes of its ranks."""
    return next((status for status in _DELIBERATE if status in codes), AGAIN)


def _reap(agent: int) -> int | None:
    """Reap all processes that have ended; return the exit code of the agent if it has."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == agent:
            found = os.waitstatus_to_exitcode(status)
        if not pid:
            return found


def _run_agent(parent: int, words: Sequence[str]) -> None:
    """Run torchrun in this forked process, and end it."""
    status = AGAIN
    try:
        die_with_parent(parent)
        status = _run_torchrun(words)
    except BaseException as error:  # another host did not join, or was lost
        print(f"error: torchrun: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_torchrun(words: Sequence[str]) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun.run(torchrun.parse_args(words))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return status_of([failure.exitcode for failure in error.failures.values()])
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
