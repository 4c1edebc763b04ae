"""Who sends which messages."""

from __future__ import annotations

from pipeworker.wire.messages.advance import Advance
from pipeworker.wire.messages.calls import Call
from pipeworker.wire.messages.checkpoint import Saved
from pipeworker.wire.messages.evaluation import EvaluationDone
from pipeworker.wire.messages.failure import Abort, Failed, Signalled
from pipeworker.wire.messages.plan import Described, Plan, Ready
from pipeworker.wire.messages.presence import Heartbeat, Hello, Ping, Welcome
from pipeworker.wire.messages.step import StepDone, Upcoming
from pipeworker.wire.messages.store import StoreReply, StoreRequest

FromWorker = (
    Hello
    | Described
    | Ready
    | Upcoming
    | StepDone
    | EvaluationDone
    | Call
    | Saved
    | Heartbeat
    | Failed
    | Signalled
    | StoreRequest
)
ToWorker = Welcome | Plan | Advance | StoreReply | Ping | Abort
Message = FromWorker | ToWorker
