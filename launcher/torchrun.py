"""One rank of a torchrun job: this process is the worker of a stage."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from functools import partial
from typing import TextIO

from pipeworker.errors import AGAIN, InUse, NotMet
from pipeworker.host.lifetime import die_with, kill_group
from pipeworker.session.begin import Asked, Begun
from pipeworker.session.head import Head, Hear, meet
from pipeworker.session.place import Place
from pipeworker.session.show import Show
from pipeworker.wire.messages import Abort

_RUN_DIR = "pipeworker/run_dir"
"""In torchrun's store, which outlives the ranks that it starts again."""


def run(place: Place, asked: Asked) -> int:
    """Be this rank's worker to the end of the job; returns the exit status."""
    die_with(os.getppid())
    _guard()

    from pipeworker.worker import service
    from pipeworker.worker.worker import Settings

    def listen(begun: Begun) -> Hear:
        # The worker's output goes to its log; what the user should see goes where it went before.
        return Show(begun.options, str(begun.run_dir.path), _again(1), _again(2)).hear

    meeting = meet(place, "job", lambda: _begin(place, asked), listen)
    settings = Settings(place.rank, meeting.endpoint, meeting.token, place.local_rank)
    if meeting.head is None:
        return service.run(settings)
    return meeting.head.finish(service.run(settings, partial(_leave, meeting.head)))


def _begin(place: Place, asked: Asked) -> Begun:
    """On rank 0: a new run, or where torchrun has started the ranks again, the one there was.

    Raises:
        NotMet: the ranks before these still have its directory.
    """
    store = place.store() if place.world > 1 else None
    where = str(asked.run_dir) if asked.run_dir else ""
    if store and not where and place.restart and store.check([_RUN_DIR]):
        where = store.get(_RUN_DIR).decode()
    again = place.restart > 0 or asked.go_on
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


def _leave(head: Head, abort: Abort) -> None:
    """Called by the control thread while the main thread is inside a step."""
    from pipeworker.worker.control import say

    say(abort)
    status = head.finish(abort.exit_status)
    os._exit(AGAIN if abort.exit_status == AGAIN else status)


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
