"""One rank of a torchrun job: this process is the worker of a stage."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from launcher import errorfile
from pipeworker.coordinator.report import describe
from pipeworker.environment import TORCHRUN_JOB, timings
from pipeworker.errors import AGAIN, InUse, NotMet
from pipeworker.host.lifetime import die_with, kill_group
from pipeworker.record.run import Record
from pipeworker.record.rundir import RunDir
from pipeworker.session import meet as meeting
from pipeworker.session.begin import Asked, Begun
from pipeworker.session.head import Head, Hear
from pipeworker.session.place import Place
from pipeworker.session.show.screen import screen
from pipeworker.session.show.view import View
from pipeworker.wire.messages.failure import Abort, Cause, Failure

_JOB = "job"
"""What the job is called where ranks meet."""
_UNNAMED = "none"
"""What torchrun calls a job that was given no ``--rdzv-id``."""
_FAILED = (1, 2, AGAIN)
"""Exit statuses that somebody is to blame for."""
_RUN_DIR = "pipeworker/run_dir"
"""In torchrun's store, which outlives the ranks that it starts again."""


def run(place: Place, asked: Asked, view: View) -> int:
    """Be this rank's worker to the end of the job; returns the exit status.

    Args:
        view: what rank 0 shows.
    """
    die_with(os.getppid())
    _guard()

    from pipeworker.worker import service
    from pipeworker.worker.settings import Settings

    def listen(begun: Begun) -> Hear:
        # The worker's output goes to its log; what the user should see goes where it went before.
        shown = dataclasses.replace(view, origins=begun.origins)
        return screen(begun.options, str(begun.run_dir.path), shown).hear

    met = meeting.meet(place, _JOB, partial(_begin, place, asked), listen)
    settings = Settings(
        place.rank, met.endpoint, met.token, place.local_rank, job_file=asked.job_file
    )
    head = met.head
    status = service.run(settings, partial(_leave, head, os.dup(2)), _record)
    return head.finish(status) if head else status


def refuse(place: Place, mistake: str) -> None:
    """Have rank 0 say what is wrong on this rank, unless it has said it already."""
    meeting.refuse(place, _JOB, mistake)


def _begin(place: Place, asked: Asked, restart: int) -> Begun:
    """On rank 0: a new run, or where torchrun has started ranks again, the one there was.

    It may have started them in another number: a node is lost, or one more has come.

    Raises:
        NotMet: the ranks before these still have its directory.
    """
    store = place.store() if place.has_store else None
    before = store.get(_RUN_DIR).decode() if store and store.check([_RUN_DIR]) else ""
    where = str(asked.run_dir or before)
    again = restart > 0 or bool(before) or asked.go_on or _is_ours(where)
    if again and where:
        asked = dataclasses.replace(asked, run_dir=where, go_on=True)
    try:
        begun = asked.begin()
    except InUse as error:
        if again:
            raise NotMet(str(error)) from None
        raise
    if store:
        store.set(_RUN_DIR, str(begun.run_dir.path))
    return begun


def _is_ours(where: str) -> bool:
    """Whether a run was last begun in this job of torchrun's: a node that comes is no restart."""
    job = os.environ.get(TORCHRUN_JOB, _UNNAMED)
    if not where or job == _UNNAMED or not RunDir(Path(where)).run.exists():
        return False
    return Record.read(RunDir(Path(where))).last.get("torchrun") == job


def _record(failure: Failure) -> None:
    """For torchrun; that another rank is gone is not what went wrong."""
    if failure.cause is not Cause.PEER:
        errorfile.write(failure.message, describe(failure))


def _leave(head: Head | None, shown: int, abort: Abort) -> None:
    """Called by the control thread while the main thread is inside a step.

    Args:
        shown: what standard error was before it went to the log; rank 0 shows the verdict there.
    """
    from pipeworker.worker.control import say

    if head is None or not os.path.sameopenfile(2, shown):
        say(abort)
    status = head.finish(abort.exit_status) if head else abort.exit_status
    if abort.reason and abort.exit_status in _FAILED and errorfile.wanted():
        time.sleep(timings().yields)
        errorfile.write(abort.reason)
    os._exit(AGAIN if abort.exit_status == AGAIN else status)


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
