"""The command to a worker, and the messages that workers and the coordinator send."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.wire.messages import checkpoint, plan, presence, profile, step, store


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is done: leave."""


Next = step.RunStep | step.Evaluate | checkpoint.Save | step.Wait | Finish


@dataclass(frozen=True, slots=True)
class Advance:
    """The next command, and what to execute before it.

    Before it come an update, or the loss of the last evaluation pass, or the end of an epoch, and
    then a snapshot.
    """

    next: Next
    update: step.Change | None = None
    copy: checkpoint.Copy | None = None


_WhileJoining = presence.Hello | plan.Described | profile.Measured | plan.Ready | store.StoreRequest
_WhileRunning = step.Upcoming | step.StepDone | step.EvaluationDone | step.Call | checkpoint.Saved
FromWorker = (
    _WhileJoining | _WhileRunning | presence.Heartbeat | presence.Failed | presence.Signalled
)
ToWorker = (
    presence.Welcome
    | profile.Measure
    | plan.Plan
    | Advance
    | step.EndPass
    | store.StoreReply
    | presence.Ping
    | presence.Abort
)
Message = FromWorker | ToWorker


def is_last(message: object) -> bool:
    """Return whether a message of the coordinator ends a worker."""
    if isinstance(message, Advance):
        return isinstance(message.next, Finish)
    return isinstance(message, presence.Abort)
