"""A rank in a process of the user's: joins a job, takes part in calls, leaves as it came.

Unlike a worker that was started for the job, it leaves the process its signals, its output and its
random streams, and an error is raised where it happened. Only a rank that is stuck in a step that
cannot end, because another has failed, has its process ended.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from pipeworker.coordinator import report
from pipeworker.environment import timings
from pipeworker.errors import LayerError, PeerLost, PipeworkerError, UsageError
from pipeworker.host.position import Tracker
from pipeworker.job.file import Job
from pipeworker.session.begin import Asked, Begun
from pipeworker.session.head import Hear
from pipeworker.session.meet import meet
from pipeworker.session.place import Place
from pipeworker.wire.messages.advance import Advance
from pipeworker.wire.messages.calls import Call, CallKind, Wait
from pipeworker.wire.messages.directions import FromWorker, ToWorker
from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.failure import Abort, Cause, Failed, Failure
from pipeworker.wire.messages.step import StepResult
from pipeworker.worker.blame import Raised, user_traceback
from pipeworker.worker.control import Control, leave_process
from pipeworker.worker.device import numerics
from pipeworker.worker.service import over
from pipeworker.worker.settings import Settings
from pipeworker.worker.stage import rng
from pipeworker.worker.worker import Worker

_numbers = itertools.count()


class JobEnded(PipeworkerError):
    """The job is over, by no fault of this rank's."""

    def __init__(self, abort: Abort) -> None:
        super().__init__(abort.reason)
        self.abort = abort


def script() -> str:
    """The path of the program that runs, as the job's file."""
    name = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "script"
    return str(Path(name).resolve())


class Session:
    """One rank of one job.

    Args:
        place: its rank and how many there are.
        job: None for the job file that is asked for.
        asked: what the script asks for.
        sample: an input of the model, for a job without data whose layers stash and pop.
        listen: given the run, gives who is told what the coordinator says, on rank 0.

    Raises:
        UsageError: what is asked for is wrong, or the ranks cannot meet.
    """

    def __init__(
        self,
        place: Place,
        job: Job | None,
        asked: Asked,
        *,
        sample: Any = None,
        listen: Callable[[Begun], Hear],
    ) -> None:
        asked.check()
        self.rank = place.rank
        self._is_started_again = place.has_store  # by the exit status
        self._pid = os.getpid()
        self.closed = False
        self._tracker = Tracker()
        self._one = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._meeting = meet(
            place,
            f"script-{next(_numbers)}",
            lambda _: asked.begin(),
            listen,
        )
        settings = Settings(
            rank=place.rank,
            endpoint=self._meeting.endpoint,
            token=self._meeting.token,
            local_rank=place.local_rank,
            tracker=self._tracker,
            to_log=False,
            job=job,
            sample=sample,
        )
        self._control = Control(
            endpoint=settings.endpoint,
            token=settings.token,
            rank=settings.rank,
            generation=settings.generation,
            tracker=settings.tracker,
            leave=self._leave,
        )
        self._control.start(signals=False)
        self.worker = Worker(settings, self._control)
        atexit.register(self._abandoned)
        self._control.send(self.worker.hello())

    def run(self) -> None:
        """Take part to the end of a job whose loop is not the user's own.

        Raises:
            as :meth:`inside`.
        """
        with self.inside():
            while not over(message := self.receive()):
                self.perform(message)
        self.shut()

    def join(self) -> None:
        """Take part until every stage is built."""
        with self.inside():
            while not isinstance(message := self.receive(), Advance):
                self.perform(message)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Take part in the job. An error ends it, on all ranks.

        Raises:
            LayerError: the user's code raised; the message says where, the cause is its exception.
            UsageError: something was given that cannot be.
            PipeworkerError: the job is over: another rank failed.
        """
        if self.closed:
            raise PipeworkerError("the job is over: this pipeline is closed")
        if not self._one.acquire(blocking=False):
            raise UsageError(
                "a call of this pipeline was made inside another one, or in another thread"
            )
        try:
            modes = numerics.put_back(lambda: self.worker.deterministic)
            with rng.undisturbed(), _plain_modes(), modes:
                yield
        except BaseException as error:
            self._fail(error)
        finally:
            self._one.release()

    def receive(self) -> ToWorker:
        """What the coordinator says next.

        Raises:
            JobEnded: that the job is over, and has failed.
        """
        message = self._control.receive()
        if isinstance(message, Abort):
            raise JobEnded(message)
        return message

    def perform(self, message: ToWorker) -> None:
        """Do what the coordinator says, and answer."""
        with self.working():
            answer = self.worker.handle(message)
        if answer is not None:
            self.send(answer)

    @contextmanager
    def working(self) -> Iterator[None]:
        """While this rank may be stuck because another has failed."""
        self._idle.clear()
        try:
            if self._control.over is not None:
                raise JobEnded(self._control.over)
            yield
        finally:
            self._idle.set()

    def send(self, message: FromWorker) -> None:
        self._control.send(message)

    def call(self, call: Call) -> ToWorker:
        """Make a call of the user's loop; returns what the coordinator says to it."""
        self.send(call)
        return self.receive()

    def given(self) -> StepResult | Evaluation | None:
        """What a call that is complete on all ranks gave; what is due with it is done."""
        while True:
            message = self.receive()
            self.perform(message)
            assert isinstance(message, Advance)
            if isinstance(message.next, Wait):  # else a checkpoint comes first
                return message.next.gave

    def finish(self) -> None:
        """Save and end the job, with all ranks.

        Raises:
            as :meth:`inside`.
        """
        with self.inside():
            self.send(Call(self.rank, CallKind.CLOSE))
            while not over(message := self.receive()):
                self.perform(message)
        self.shut()

    def shut(self) -> None:
        """Leave: nothing of ours stays in the process. Idempotent."""
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self._abandoned)
        self.worker.close()
        self._control.close()
        if self._meeting.head is not None:
            self._meeting.head.finish(1)

    def left_by(self, error: BaseException) -> None:
        """The user's own loop raised between two calls: the job has failed."""
        if self.closed:
            return
        text = f"the script of {self._control.name} raised {type(error).__name__}: {error}"
        cause = Cause.SIGNAL if isinstance(error, KeyboardInterrupt) else Cause.USER
        failure = Failure(cause, text.rstrip(": "), self.rank, traceback=user_traceback(error))
        self._tell(failure, wait=cause is Cause.USER)

    def _fail(self, error: BaseException) -> NoReturn:
        if isinstance(error, JobEnded):
            self.shut()
            raise _error_of(error.abort) from None
        failure = self.worker.explain(error)
        if isinstance(error, KeyboardInterrupt):
            text = f"{self._control.name} was interrupted by {type(error).__name__}"
            failure = replace(failure, cause=Cause.SIGNAL, message=text)
        abort = self._tell(failure, wait=not isinstance(error, KeyboardInterrupt))
        theirs = error.error if isinstance(error, Raised) else error
        if isinstance(theirs, UsageError) or not isinstance(theirs, Exception):
            raise theirs
        if isinstance(theirs, PeerLost):
            raise _error_of(abort) from None
        raise LayerError(report.describe(replace(failure, traceback=""))) from theirs

    def _tell(self, failure: Failure, *, wait: bool) -> Abort:
        """Say why this rank fails and leave; returns how the job ended, if it was waited for."""
        self.send(Failed(self.rank, failure))
        message: ToWorker = Abort(failure.message, 1)
        while wait and not isinstance(message := self._control.receive(), Abort):
            continue
        self.shut()
        assert isinstance(message, Abort)
        return message

    def _leave(self, abort: Abort) -> None:
        """Called by the control thread: the job is over. End the process if it stays stuck.

        A rank that is busy in a layer may go on: it learns of the end when it next waits.
        """
        waited, limits = 0.0, timings()
        while not self._idle.wait(limits.look):
            waited = waited + limits.look if self._tracker.waits else 0.0
            if waited >= limits.stuck:
                status = self._meeting.head.finish(1) if self._meeting.head else 1
                leave_process(
                    abort if self._is_started_again else replace(abort, exit_status=status)
                )

    def _abandoned(self) -> None:
        """The interpreter ends, and nobody has closed the pipeline: it is closed now.

        Unless an exception is why: then the job has failed, on all ranks.
        """
        if os.getpid() != self._pid:  # a child that the user's code has forked
            return
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.left_by(error)
            return
        try:
            self.finish()
        except PipeworkerError as ended:
            print(f"error: {ended}", file=sys.stderr)


@contextmanager
def _plain_modes() -> Iterator[None]:
    """Whatever modes the user's code has entered: the job's numbers do not depend on them."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        current = torch.accelerator.current_accelerator()
        for device in ("cpu", *([current.type] if current else [])):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _error_of(abort: Abort) -> PipeworkerError:
    """How the job's end reads on a rank that did not cause it."""
    kind = UsageError if abort.exit_status == UsageError.exit_status else PipeworkerError
    return kind(abort.reason or "another rank has ended the job")
