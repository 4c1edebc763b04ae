"""The events of a job, as frozen facts: a recorded sequence of them can be replayed."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.plan.planned import Planned
from pipeworker.wire.lines import JobEvent
from pipeworker.wire.messages.directions import FromWorker


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message from `peer`, a transport identity, in a frame of this generation."""

    peer: bytes
    generation: int
    message: FromWorker


@dataclass(frozen=True, slots=True)
class InvalidFrame:
    """A frame from `peer` that is not a message."""

    peer: bytes
    text: str


@dataclass(frozen=True, slots=True)
class VersionMismatch:
    """A Hello in another version of the protocol; the text names the worker."""

    text: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection of `peer` is closed. It may be reopened."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class CheckpointEnded:
    """The checkpoint of `step`, for which the job returned Commit, is complete at `path`.

    If there is an `error`, the checkpoint cannot be completed.
    """

    step: int
    path: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class PlanMade:
    """The plan for which a generation returned MakePlan; without one, the `error` says why."""

    generation: int
    planned: Planned | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """The run directory was moved to `path`."""

    path: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; for `suspended` seconds of it, the coordinator did not run."""

    suspended: float = 0.0


@dataclass(frozen=True, slots=True)
class ParentReads:
    """Whether the next line to the coordinator's parent is sent at once; at first it is."""

    reads: bool


@dataclass(frozen=True, slots=True)
class ParentLost:
    """The coordinator's parent, the worker of this rank or a launcher (-1), ended or is silent."""

    rank: int = -1
    text: str = "the process that started the job is gone"


@dataclass(frozen=True, slots=True)
class EffectFailed:
    """The service could not perform an effect that the job depends on."""

    text: str


_FromWorkers = MessageReceived | InvalidFrame | VersionMismatch | Disconnected
_FromService = CheckpointEnded | PlanMade | Moved | Tick | ParentReads | EffectFailed
Event = _FromWorkers | _FromService | JobEvent | ParentLost
