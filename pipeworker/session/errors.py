"""The errors of a session's calls, and whether the job continues after them."""

from __future__ import annotations

from dataclasses import replace

from pipeworker.coordinator import report
from pipeworker.display.commands import Commands, relative
from pipeworker.errors import LayerError, PipeworkerError, UsageError
from pipeworker.facts.failure import Cause, Failure
from pipeworker.record.files.located import located
from pipeworker.record.rundir import RunDir
from pipeworker.wire.messages.presence import Abort
from pipeworker.worker.blame import UserCodeError

STAYS_OPEN = "\n  the pipeline stays open: the call has changed nothing"
"""The end of the message of an error after which the loop may continue."""


class JobEnded(PipeworkerError):
    """The end of the job, for a reason that is not on this rank."""

    def __init__(self, abort: Abort) -> None:
        super().__init__(abort.reason)
        self.abort = abort


class CallFailed(Exception):
    """A call that has failed on some rank and has changed nothing on any."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    def error(self, own: Exception | None) -> Exception:
        """Return the error to raise; `own` is the one that occurred on this rank, if any did."""
        failure = self.failure
        if isinstance(own, UserCodeError):
            text = report.describe(replace(failure, traceback=""))
            error: Exception = LayerError(f"{text}{STAYS_OPEN}")
            error.__cause__ = own.error
            return error
        if own is not None:
            return extended(own, STAYS_OPEN)
        kind = UsageError if failure.cause is Cause.USAGE else PipeworkerError
        return kind(f"{report.with_location(failure)}{STAYS_OPEN}")


def is_regular_end(error: BaseException) -> bool:
    """Return whether an exception ends a script, or a generator in it, without an error."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)


def saved_step(run_dir: RunDir) -> str:
    """Return where the last checkpoint of a user's own loop is, and how to continue; "" if none."""
    step = run_dir.checkpoints.last_step()
    if step < 0:
        return ""
    path = relative(located(run_dir.checkpoints.at(step)))
    resume = Commands(own_loop=True).resume(relative(str(run_dir.path)))
    return f"\n  step {step} is saved in {path}; continue {resume}"


def extended(error: Exception, text: str) -> Exception:
    """Return an error with more text at the end of its message."""
    error.args = (f"{error}{text}",)
    return error
