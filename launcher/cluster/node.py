"""One host's share of a job over several, as a cluster starts it: torchrun's agent, and its ranks.

Torchrun ends with 1, whatever its ranks said. A cluster must tell what is worth another try from
what is not: here their exit statuses are kept.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection
from dataclasses import dataclass

from pipeworker.errors import AGAIN
from pipeworker.host.lifetime import die_with

_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MEANT = (2, 1, 130)
"""What ranks say on purpose: what is wrong comes before what failed, and both before an end."""


@dataclass(frozen=True, slots=True)
class Node:
    """A host among those of a job.

    Attributes:
        rank: its number; the first one, 0, is where the others meet.
        nodes: how many there are.
        workers: of this host, as of each.
        address, port: of the first one.
    """

    rank: int
    nodes: int
    workers: int
    address: str
    port: int

    def torchrun(self) -> tuple[str, ...]:
        """The options of ``torchrun`` that make it so."""
        each = ("--nproc-per-node", str(self.workers))
        if self.nodes == 1:
            return ("--standalone", *each)
        meet = ("--master-addr", self.address, "--master-port", str(self.port))
        return ("--nnodes", str(self.nodes), "--node-rank", str(self.rank), *meet, *each)


def run(node: Node, words: Collection[str]) -> int:
    """Start the ranks of this host and wait for their end; returns the exit status.

    This process is a container's first one, perhaps: it passes signals on to torchrun's agent, its
    child, and takes leave of whatever processes come to it.

    Args:
        words: of ``python -m pipeworker``.
    """
    waited = {*_ENDS, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    me, agent = os.getpid(), os.fork()
    if not agent:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _be_agent(me, node, words)
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
    """The exit status of a host, by those of its ranks; what a signal ended is negative."""
    return next((status for status in _MEANT if status in codes), AGAIN)


def _reap(agent: int) -> int | None:
    """Take leave of all that have ended; the exit code of the agent if it has."""
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


def _be_agent(parent: int, node: Node, words: Collection[str]) -> None:
    """In a process of its own: torchrun, in so many words. It does not return."""
    status = AGAIN
    try:
        die_with(parent)
        status = _agent(node, words)
    except BaseException as error:  # a host that others are waiting for did not come, or is gone
        print(f"error: torchrun: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _agent(node: Node, words: Collection[str]) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    line = [*node.torchrun(), "-m", "pipeworker", *words]
    try:
        torchrun.run(torchrun.parse_args(line))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return status_of([failure.exitcode for failure in error.failures.values()])
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
