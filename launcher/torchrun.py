"""One rank of a torchrun job: this process is the worker of a stage."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TextIO

from pipeworker.host.lifetime import die_with, kill_group
from pipeworker.job.options import Options
from pipeworker.record.rundir import RunDir
from pipeworker.session.head import Head, Hear, meet
from pipeworker.session.place import Place
from pipeworker.session.show import Show
from pipeworker.wire.messages import Abort


def run(place: Place, options: Options, make_run_dir: Callable[[], RunDir]) -> int:
    """Be this rank's worker to the end of the job; returns the exit status.

    Args:
        make_run_dir: called on rank 0 alone.
    """
    die_with(os.getppid())
    _guard()

    from pipeworker.worker import service
    from pipeworker.worker.worker import Settings

    def listen(run_dir: RunDir) -> Hear:
        # The worker's output goes to its log; what the user should see goes where it went before.
        return Show(options, str(run_dir.path), _again(1), _again(2)).hear

    meeting = meet(place, "job", options, make_run_dir, listen)
    settings = Settings(place.rank, meeting.endpoint, meeting.token, place.local_rank)
    if meeting.head is None:
        return service.run(settings)
    return meeting.head.finish(service.run(settings, partial(_leave, meeting.head)))


def _leave(head: Head, abort: Abort) -> None:
    """Called by the control thread while the main thread is inside a step."""
    from pipeworker.worker.control import say

    say(abort)
    os._exit(head.finish(abort.exit_status))


def _again(descriptor: int) -> TextIO:
    """A second file on what a descriptor is open on."""
    return os.fdopen(os.dup(descriptor), "w", encoding="utf-8")


def _guard() -> None:
    """Fork a process that, when this one ends, kills what it started: its process group.

    Torchrun makes each rank the leader of a group, but forgets the group of one that died.
    """
    me = os.getpid()
    if sys.platform != "linux" or os.getpgrp() != me or os.fork():
        return
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.setsid()
        die_with(me, signal.SIGTERM)
        while os.getppid() == me:
            signal.sigwait({signal.SIGTERM})
        kill_group(me)
    finally:
        os._exit(0)
