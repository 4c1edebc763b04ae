"""A rank in a process of the user's: joins a job, takes part in its calls, and leaves.

A worker that pipeworker starts owns its process; here signals, output and random streams remain the
user's, and an error is raised by the call that caused it. The process is ended only if this rank is
stuck in a step that cannot end because another rank has failed.
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
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.host.position import Tracker
from pipeworker.job.file import JobFile
from pipeworker.ranks.coordinator_process import EventListener
from pipeworker.ranks.rank_info import RankInfo
from pipeworker.ranks.rendezvous import rendezvous
from pipeworker.runs.begin import PreparedRun, RunRequest
from pipeworker.wire.messages.directions import Advance, FromWorker, ToWorker
from pipeworker.wire.messages.presence import Abort, Failed
from pipeworker.wire.messages.step import Call, CallKind, Wait
from pipeworker.worker.blame import UserCodeError, raised, user_traceback
from pipeworker.worker.control import Control, exit_process
from pipeworker.worker.device import numerics
from pipeworker.worker.settings import Settings
from pipeworker.worker.stage import rng
from pipeworker.worker.worker import Worker, is_last

_numbers = itertools.count()


class JobEnded(PipeworkerError):
    """The end of the job, for a reason that is not on this rank."""

    def __init__(self, abort: Abort) -> None:
        super().__init__(abort.reason)
        self.abort = abort


def script_path() -> str:
    """Return the path of the running program, which is the job's file."""
    name = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "script"
    return str(Path(name).resolve())


class Session:
    """One rank of one job; without `job`, that of the request's job file.

    Args:
        info: the rank.
        job: the job's functions.
        request: the request to begin or resume a run.
        sample: an input of the model, for a job without data whose layers stash and pop.
        listen: called on rank 0 with the run; returns the listener to the coordinator's events.
    """

    def __init__(
        self,
        info: RankInfo,
        job: JobFile | None,
        request: RunRequest,
        *,
        sample: Any = None,
        listen: Callable[[PreparedRun], EventListener],
    ) -> None:
        request.validate()
        self.rank = info.rank
        self._restarts_by_status = info.has_store  # torchrun, or another launcher of the user's
        self._pid = os.getpid()
        self.closed = False
        self._tracker = Tracker()
        self._call_lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        met = rendezvous(info, f"script-{next(_numbers)}", lambda _: request.prepare(), listen)
        self._coordinator = met.coordinator
        settings = Settings(
            rank=info.rank,
            endpoint=met.endpoint,
            token=met.token,
            local_rank=info.local_rank,
            tracker=self._tracker,
            to_log=False,
            job=job,
            sample=sample,
        )
        self._control = Control(settings, self._leave)
        self._control.start(signals=False)
        self.worker = Worker(settings, self._control)
        atexit.register(self._at_exit)
        self._control.send(self.worker.hello())

    def run(self, call: Call | None = None, between: Callable[[], None] = lambda: None) -> None:
        """Take part in the job to its end, after a `call` of the user's loop if it has one.

        `between` is called after each command of the coordinator.
        """
        with self.participating():
            if call:
                self.send(call)
            while not is_last(message := self.receive()):
                self.perform(message)
                between()
        self.close()

    def build(self) -> None:
        """Take part until every stage is built."""
        with self.participating():
            while not isinstance(message := self.receive(), Advance):
                self.perform(message)

    @contextmanager
    def participating(self) -> Iterator[Session]:
        """Take part in the job inside the context; an error there ends it on all ranks.

        Raises:
            LayerError: the user's code raised an exception, which is the cause.
            UsageError: an argument is wrong.
            PipeworkerError: the job is over because another rank failed.
        """
        if self.closed:
            raise PipeworkerError("this pipeline is closed: its job is over; create another one")
        if not self._call_lock.acquire(blocking=False):
            raise UsageError(
                "this pipeline is busy: a call was made inside another one, or in another thread; "
                "wait for each call to return"
            )
        try:
            modes = numerics.deterministic_mode(lambda: self.worker.deterministic)
            with rng.preserve_generators(), _plain_modes(), modes:
                yield self
        except BaseException as error:
            self._fail(error)
        finally:
            self._call_lock.release()

    def receive(self) -> ToWorker:
        """Return the coordinator's next message; raise JobEnded if it is the end of the job."""
        message = self._control.receive()
        if isinstance(message, Abort):
            raise JobEnded(message)
        return message

    def perform(self, message: ToWorker) -> None:
        """Execute a command of the coordinator and send the answer."""
        with self.working():
            answer = self.worker.handle(message)
        if answer is not None:
            self.send(answer)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Mark the time in which this rank may get stuck because another one has failed."""
        self._idle.clear()
        try:
            if self._control.ended is not None:
                raise JobEnded(self._control.ended)
            yield
        finally:
            self._idle.set()

    def send(self, message: FromWorker) -> None:
        self._control.send(message)

    def call(self, call: Call) -> ToWorker:
        """Report a call of the user's loop; return the coordinator's command for it."""
        self.send(call)
        return self.receive()

    def wait_for_result(self) -> StepResult | Evaluation | None:
        """Return the result of a call when all ranks have completed it; execute what is due."""
        while True:
            message = self.receive()
            self.perform(message)
            assert isinstance(message, Advance)
            if isinstance(message.next, Wait):  # else a checkpoint is due first
                return message.next.result

    def finish(self) -> None:
        """Save a checkpoint and end the job, together with all ranks."""
        self.run(Call(self.rank, CallKind.CLOSE))

    def close(self) -> None:
        """Leave the job and remove everything of pipeworker's from the process. Idempotent."""
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self._at_exit)
        self.worker.close()
        self._control.close()
        if self._coordinator:
            self._coordinator.finish(1)

    def fail(self, error: BaseException) -> None:
        """End the job because the user's loop raised an error between two calls."""
        if self.closed:
            return
        text = f"the script of {self._control.name} {raised(error)}"
        cause = Cause.SIGNAL if isinstance(error, KeyboardInterrupt) else Cause.USER
        failure = Failure(cause, text, self.rank, traceback=user_traceback(error))
        self._report_failure(failure, wait=cause is Cause.USER)

    def _fail(self, error: BaseException) -> NoReturn:
        if isinstance(error, JobEnded):
            self.close()
            raise _error_of(error.abort) from None
        failure = self.worker.explain(error)
        if isinstance(error, KeyboardInterrupt):
            text = f"{self._control.name} was interrupted by {type(error).__name__}"
            failure = replace(failure, cause=Cause.SIGNAL, message=text)
        abort = self._report_failure(failure, wait=not isinstance(error, KeyboardInterrupt))
        original = error.error if isinstance(error, UserCodeError) else error
        if isinstance(original, UsageError) or not isinstance(original, Exception):
            raise original
        if isinstance(original, PeerLost):
            raise _error_of(abort) from None
        raise LayerError(report.describe(replace(failure, traceback=""))) from original

    def _report_failure(self, failure: Failure, *, wait: bool) -> Abort:
        """Report why this rank has failed, and leave; return how the job ended."""
        self.send(Failed(self.rank, failure))
        message: ToWorker = Abort(failure.message, 1)
        while wait and not isinstance(message := self._control.receive(), Abort):
            continue
        self.close()
        assert isinstance(message, Abort)
        return message

    def _leave(self, abort: Abort) -> None:
        """End the process if it stays stuck; the control thread calls this when the job is over.

        A rank that is computing a layer continues: it learns of the end when it next waits.
        """
        waited, limits = 0.0, timings()
        while not self._idle.wait(limits.poll):
            waited = waited + limits.poll if self._tracker.waiting else 0.0
            if waited >= limits.stuck:
                status = self._coordinator.finish(1) if self._coordinator else 1
                kept = abort.exit_status if self._restarts_by_status else status
                exit_process(replace(abort, exit_status=kept))

    def _at_exit(self) -> None:
        """Close a pipeline that the script left open; fail the job if an exception ends it."""
        if os.getpid() != self._pid:  # a child that the user's code has forked
            return
        if (error := getattr(sys, "last_value", None)) is not None:
            self.fail(error)
            return
        try:
            self.finish()
        except PipeworkerError as ended:
            print(f"error: {ended}", file=sys.stderr)


@contextmanager
def _plain_modes() -> Iterator[None]:
    """Leave the modes that the user's code has entered: the job's numbers depend on none."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        current = torch.accelerator.current_accelerator()
        for device in ("cpu", *([current.type] if current else [])):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _error_of(abort: Abort) -> PipeworkerError:
    """Return the error for a rank that did not cause the end of the job."""
    kind = UsageError if abort.exit_status == UsageError.exit_status else PipeworkerError
    return kind(abort.reason or "the job is over: another rank has ended it")
