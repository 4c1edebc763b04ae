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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any, NoReturn, TypeVar

from pipeworker.coordinator import report
from pipeworker.environment import timings
from pipeworker.errors import LayerError, PeerLost, PipeworkerError, UsageError
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.limits import LONGEST_TEXT
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.host.position import Tracker
from pipeworker.host.signals import USUAL, deferred_interrupt, reported_interrupt
from pipeworker.job.file import JobFile
from pipeworker.ranks.coordinator_process import EventListener
from pipeworker.ranks.rank_info import RankInfo
from pipeworker.ranks.rendezvous import rendezvous
from pipeworker.runs.begin import PreparedRun, RunRequest
from pipeworker.session import errors
from pipeworker.session.process import frame_of_child, plain_modes
from pipeworker.wire.messages.checkpoint import Save
from pipeworker.wire.messages.directions import Advance, FromWorker, ToWorker, is_last
from pipeworker.wire.messages.presence import Abort, Failed, Signalled
from pipeworker.wire.messages.step import Call, CallKind, EvaluationDone, RunStep, Wait
from pipeworker.worker.blame import UserCodeError, raised, user_traceback
from pipeworker.worker.control import Control, exit_process
from pipeworker.worker.device import numerics
from pipeworker.worker.settings import Settings
from pipeworker.worker.stage import rng
from pipeworker.worker.step.evaluation import PassFailed
from pipeworker.worker.worker import Worker

_numbers = itertools.count()
_THREAD = threading.RLock()
"""Held by the thread that is in a call of any pipeline."""
_T = TypeVar("_T")


class Session:
    """One rank of one job; without `job`, that of the request's job file.

    A job without data whose layers stash and pop needs a `sample`, an input of the model. On rank 0
    `listen` is called with the run, and returns the listener to the coordinator's events.
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
        self._left = False
        self._own_loop = bool(request.options.get("own_loop"))
        self._own_error: Exception | None = None
        self._begun: ToWorker | None = None
        self._steps_begun = self._interrupted = False
        self._tracker = Tracker()
        self._call_lock = threading.Lock()
        self._working = False  # a plain attribute: an interrupt cannot leave it locked
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
        joined = False
        try:
            with deferred_interrupt(USUAL):
                self._control = Control(settings, self._leave)
                self._control.start(signals=False)
                self.worker = Worker(settings, self._control)
                atexit.register(self._at_exit)
                self._at_end_of_child = Finalize(None, self._at_exit, exitpriority=0)
                self._child = frame_of_child()
                self._control.send(self.worker.hello())
                joined = True
        except BaseException as error:
            if joined:
                self.fail(error)
            elif self._coordinator:
                self._coordinator.finish(1)
            raise

    @property
    def closed(self) -> bool:
        """Whether this process has left the job, or is a child that a rank has forked."""
        return self._left or self._is_forked

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def check_open(self) -> None:
        """Check that the job is not over, and that this process is no child of a rank's process.

        Such a child lacks the rank's connections.
        """
        if self._left:
            raise PipeworkerError(
                f"this pipeline is closed: its job is over; create another one{self._saved}"
            )
        if self._is_forked:
            raise UsageError(
                "this pipeline belongs to another process: "
                f"process {self._pid} has forked this one; make all calls there"
            )

    def run(self, between: Callable[[], None] = lambda: None) -> None:
        """Take part in the job to its end, which a loop of the user's own requests first.

        `between` is called after each command of the coordinator. Without a loop of the user's own,
        an interrupt first ends the step that runs and saves it; a second one ends the job at once.
        """
        reports = nullcontext() if self._own_loop else reported_interrupt(self._report_interrupt)
        with self.participating(), reports:
            if self._own_loop:
                changed = self.worker.has_changed()
                self.send(Call(self.rank, CallKind.CLOSE, changed=changed))
            while not is_last(message := self.receive()):
                self._steps_begun = isinstance(message, Advance)
                self.perform(message)
                between()
        self.close()
        if self._interrupted:
            raise KeyboardInterrupt

    def _report_interrupt(self) -> bool:
        """Ask for the end of the job after this step; return False if no step has begun."""
        self._interrupted = self._steps_begun
        if self._interrupted:
            self.send(Signalled(self.rank, "SIGINT"))
        return self._interrupted

    def build(self) -> None:
        """Take part until every stage is built."""
        with self.participating():
            while not isinstance(message := self.receive(), Advance):
                self.perform(message)

    @contextmanager
    def participating(self) -> Iterator[Session]:
        """Take part in the job inside the context; an error there ends it on all ranks.

        The exception is a call that has failed and changed nothing: the job then continues. Before
        a loop of the user's own ends, its last whole step is saved.
        """
        self.check_open()
        if not self._call_lock.acquire(blocking=False):
            raise UsageError(
                "this pipeline is busy: a call was made inside another one, or in another thread; "
                "wait for each call to return"
            )
        if not _THREAD.acquire(blocking=False):
            self._call_lock.release()
            busy = UsageError(
                "a pipeline in another thread is busy, and all of a process draw from the same "
                "random streams; wait for each call to return"
            )
            if self._begun is None:  # it is not built yet
                self._fail(busy)
            raise busy
        try:
            modes = numerics.deterministic_mode(lambda: self.worker.deterministic)
            with rng.preserve_generators(), plain_modes(), modes:
                yield self
        except errors.CallFailed as failed:
            own, self._own_error = self._own_error, None
            error = failed.error(own)
            raise error from error.__cause__
        except BaseException as error:
            self._fail(error)
        finally:
            _THREAD.release()
            self._call_lock.release()

    def receive(self) -> ToWorker:
        """Return the coordinator's next message; raise JobEnded if it is the end of the job."""
        message = self._control.receive()
        if isinstance(message, Abort):
            raise errors.JobEnded(message)
        return message

    def perform(self, message: ToWorker) -> None:
        """Execute a command of the coordinator and send the answer.

        An update and a checkpoint are not interrupted halfway, nor before the answer is sent: the
        coordinator waits for it.
        """
        runs = isinstance(message, Advance) and isinstance(message.next, RunStep)
        with self.working(), nullcontext() if runs else deferred_interrupt(USUAL):
            self._begun = message
            answer = self.worker.handle(message)
            if answer is not None:
                self.send(answer)
            self.worker.record()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Mark the time in which this rank may get stuck because another one has failed."""
        self._working = True
        try:
            if self._control.ended is not None:
                raise errors.JobEnded(self._control.ended)
            yield
        finally:
            self._working = False

    def send(self, message: FromWorker) -> None:
        self._control.send(message)

    def prepare(self, kind: CallKind, prepare: Callable[[], _T]) -> _T:
        """Prepare the arguments of a call; if they are wrong, no rank performs it."""
        try:
            return prepare()
        except UsageError as error:
            self._own_error = error
            mistake = str(error)[:LONGEST_TEXT]
            self.call(Call(self.rank, kind, mistake=mistake))
            raise

    def call(self, call: Call) -> Advance:
        """Report a call of the user's loop; return the coordinator's command for it.

        Raises:
            CallFailed: the arguments of another rank are wrong.
        """
        self.send(call)
        while True:
            message = self._receive_advance()
            if not isinstance(message.next, Save) or call.kind in (CallKind.SAVE, CallKind.CLOSE):
                return message
            self.perform(message)  # the job ends

    def stream(
        self, step: int, run: Callable[[], EvaluationDone]
    ) -> StepResult | Evaluation | None:
        """Run a forward-only pass, report it, and return its result.

        Raises:
            CallFailed: the user's code raised in the pass, on this rank or on another one.
        """
        try:
            with self.working():
                done = run()
        except PassFailed as failed:
            self._own_error = failed.error
            self.send(self.worker.pass_done(step, failure=failed.failure))
        else:
            self.send(done)
        return self.wait_for_result()

    def wait_for_result(self) -> StepResult | Evaluation | None:
        """Return the result of a call when all ranks have completed it; execute what is due.

        Raises:
            CallFailed: the call has failed, and has changed nothing.
        """
        while True:
            message = self._receive_advance()
            self.perform(message)
            if isinstance(message.next, Wait):  # else a checkpoint is due first
                assert not isinstance(message.next.result, Failure)
                return message.next.result

    def _receive_advance(self) -> Advance:
        message = self.receive()
        assert isinstance(message, Advance)
        if isinstance(message.next, Wait) and isinstance(message.next.result, Failure):
            self._begun = message
            raise errors.CallFailed(message.next.result)
        return message

    def finish(self) -> None:
        """Save a checkpoint and end the job, together with all ranks. Idempotent."""
        if not self.closed:
            self.run()

    def close(self) -> None:
        """Leave the job and remove everything of pipeworker's from the process. Idempotent."""
        if self.closed:
            return
        self._left = True
        atexit.unregister(self._at_exit)
        self._at_end_of_child.cancel()
        self.worker.close()
        self._working = False  # an interrupt may have come before working() could reset it
        self._control.close()
        if self._coordinator:
            self._coordinator.finish(1)

    def fail(self, error: BaseException) -> None:
        """End the job because the user's loop raised an error between two calls."""
        if self.closed:
            return
        text = f"the script of {self._control.name} {raised(error)}"
        cause, shown = Cause.USER, user_traceback(error)
        if isinstance(error, KeyboardInterrupt):
            cause = Cause.SIGNAL
        elif isinstance(error, UsageError):  # of an earlier call, which the script did not catch
            cause, text, shown = Cause.USAGE, str(error).removesuffix(errors.STAYS_OPEN), ""
        self._report_failure(Failure(cause, text, self.rank, traceback=shown))
        self._show_saved()

    def _fail(self, error: BaseException) -> NoReturn:
        if isinstance(error, errors.JobEnded):
            self.close()
            if self._interrupted:
                raise KeyboardInterrupt from None
            raise self._error_of(error.abort) from None
        original = error.error if isinstance(error, UserCodeError) else error
        if self._is_forked:  # inside the call
            raise original
        failure = self.worker.explain(error)
        if isinstance(error, KeyboardInterrupt):
            text = f"{self._control.name} was interrupted by {type(error).__name__}"
            failure = replace(failure, cause=Cause.SIGNAL, message=text)
        abort = self._report_failure(failure)
        if isinstance(original, PeerLost):
            raise self._error_of(abort) from None
        if isinstance(original, UsageError):
            raise errors.extended(original, self._saved)
        if not isinstance(original, Exception):
            self._show_saved()
            raise original
        text = report.describe(replace(failure, traceback=""))
        raise LayerError(f"{text}{self._saved}") from original

    def _report_failure(self, failure: Failure) -> Abort:
        """Report why this rank has failed, save what is to be saved, and leave.

        Return how the job ended. A rank without a loop of the user's own does not wait after an
        interrupt, which is the second one.
        """
        waits = self._own_loop or failure.cause is not Cause.SIGNAL
        self.send(Failed(self.rank, failure, stays=waits))
        try:
            if not waits:
                return Abort(failure.message, 1)
            self.worker.disconnect()  # the other ranks save too, once they do not wait
            while True:
                message = self._control.receive_after(self._begun)
                if isinstance(message, Abort):
                    return message
                with deferred_interrupt(USUAL):
                    self._begun = message
                    if isinstance(message, Advance) and (answer := self.worker.finish(message)):
                        self.send(answer)
        finally:  # a second interrupt
            self.close()

    def _error_of(self, abort: Abort) -> PipeworkerError:
        """Return the error for a rank that did not cause the end of the job."""
        kind = UsageError if abort.exit_status == UsageError.exit_status else PipeworkerError
        reason = abort.reason or "the job is over: another rank has ended it"
        return kind(f"{reason}{self._saved}")

    @property
    def _saved(self) -> str:
        """The last checkpoint of a user's own loop, and how to continue from it; "" if none."""
        if not self._own_loop or not self.worker.is_loaded:
            return ""
        return errors.saved_step(self.worker.loaded.run_dir)

    def _show_saved(self) -> None:
        """Show where the last checkpoint is, beside an error that is not pipeworker's."""
        if not self.rank and (text := self._saved):
            with suppress(OSError):  # the stream belongs to the script
                print(f"pipeworker: {text.strip()}", file=sys.stderr, flush=True)

    def _leave(self, abort: Abort) -> None:
        """End the process if it stays stuck; the control thread calls this when the job is over.

        A rank that is computing a layer continues: it learns of the end when it next waits.
        """
        waited, limits = 0.0, timings()
        while self._working:
            time.sleep(limits.poll)
            waited = waited + limits.poll if self._tracker.waiting else 0.0
            if waited >= limits.stuck:
                status = self._coordinator.finish(1) if self._coordinator else 1
                kept = abort.exit_status if self._restarts_by_status else status
                exit_process(replace(abort, exit_status=kept))

    def _at_exit(self) -> None:
        """Close a pipeline that the script left open; fail the job if an exception ends it.

        Before Python 3.13, a forked child of ``multiprocessing`` does not run the functions of
        ``atexit``, but ``Finalize``, while its exception is raised. From 3.13 on it runs the first,
        and has caught the exception before.
        """
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        error = error or SystemExit(self._child.f_locals.get("exitcode") if self._child else None)
        interactive = hasattr(sys, "ps1")  # which no error ends
        if not (errors.is_regular_end(error) or interactive):
            self.fail(error)
        else:
            self.end()

    def end(self) -> None:
        """Finish a job that nothing refers to any more; show an error, which nothing can catch."""
        try:
            self.finish()
        except PipeworkerError as ended:
            print(f"error: {ended}", file=sys.stderr)
