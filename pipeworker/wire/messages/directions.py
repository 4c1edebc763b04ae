"""The command to a worker, and the messages that workers and the coordinator send."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.wire.messages.checkpoint import Copy, Save, Saved
from pipeworker.wire.messages.plan import Described, Plan, Ready
from pipeworker.wire.messages.presence import (
    Abort,
    Failed,
    Heartbeat,
    Hello,
    Ping,
    Signalled,
    Welcome,
)
from pipeworker.wire.messages.profile import Measure, Measured
from pipeworker.wire.messages.step import (
    Call,
    Change,
    EndPass,
    Evaluate,
    EvaluationDone,
    RunStep,
    StepDone,
    Upcoming,
    Wait,
)
from pipeworker.wire.messages.store import StoreReply, StoreRequest


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is done: leave."""


Next = RunStep | Evaluate | Save | Wait | Finish


@dataclass(frozen=True, slots=True)
class Advance:
    """The next command, and what to execute before it.

    Before it come an update, or the loss of the last evaluation pass, or the end of an epoch, and
    then a snapshot.
    """

    next: Next
    update: Change | None = None
    copy: Copy | None = None


_WhileJoining = Hello | Described | Measured | Ready | StoreRequest
_WhileRunning = Upcoming | StepDone | EvaluationDone | Call | Saved
FromWorker = _WhileJoining | _WhileRunning | Heartbeat | Failed | Signalled
ToWorker = Welcome | Measure | Plan | Advance | EndPass | StoreReply | Ping | Abort
Message = FromWorker | ToWorker


def is_last(message: object) -> bool:
    """Return whether a message of the coordinator ends a worker."""
    if isinstance(message, Advance):
        return isinstance(message.next, Finish)
    return isinstance(message, Abort)
