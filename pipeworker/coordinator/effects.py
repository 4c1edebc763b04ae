"""What the coordinator's decisions ask of the shell around them. Facts only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pipeworker.coordinator.scaler import Scaler
from pipeworker.plan.check import Kept
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Timing
from pipeworker.wire.lines import Again, Joined, Snapshot
from pipeworker.wire.messages.checkpoint import File
from pipeworker.wire.messages.directions import ToWorker
from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.failure import Failure
from pipeworker.wire.messages.step import StepResult


class Status(Enum):
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Send:
    peer: bytes
    message: ToWorker
    generation: int


@dataclass(frozen=True, slots=True)
class Log:
    """A decision and its reason."""

    text: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A message that is not acted on. A peer may send any number of them."""

    text: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Something the user should see at once, though the job goes on.

    Attributes:
        note: it may well be meant so.
    """

    text: str
    note: bool = False


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage of a replica that is built, and where."""

    replica: int
    stage: int
    layers: tuple[int, int]
    classes: tuple[str, ...]
    parameters: int
    rank: int
    device: str
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Planned:
    """All stages are built; the job starts.

    Attributes:
        stages: those of replica 0, then of replica 1, ...
        schedule: of a replica with the most micro-batches; `kept`, `timing`: what it keeps and
            takes.
        microbatches: of the first mini-batch, over all replicas: fewer than asked for where it has
            fewer samples.
        length: mini-batches of an epoch; 0 where that is not known.
    """

    stages: tuple[StagePlan, ...]
    schedule: Schedule
    kept: Kept
    timing: Timing
    microbatches: int
    length: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """Every worker has written its part of the checkpoint of `step`: make it complete.

    Attributes:
        scaler: the state of the loss scale, with fp16.
        ties: the names of tied weights.
        layers: their names.
        files: what the workers have written.
        evaluation: of this very step, if there was one.
    """

    step: int
    scaler: Scaler | None = None
    ties: tuple[tuple[str, ...], ...] = ()
    layers: tuple[str, ...] = ()
    files: tuple[File, ...] = ()
    evaluation: Evaluation | None = None


@dataclass(frozen=True, slots=True)
class Discard:
    """The checkpoint of `step` will not be complete: what is there of it goes."""

    step: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The verdict on a job.

    Attributes:
        peak_memory: bytes, by rank.
        causes: why generations had to start again.
        busy: the share of the time of its steps that each worker of a replica computed.
    """

    status: Status
    exit_status: int
    steps: int
    peak_memory: tuple[int, ...]
    bubble: float
    failure: Failure | None
    causes: tuple[str, ...] = ()
    busy: tuple[float, ...] = ()


# The results of steps and evaluation passes are there to be recorded.
Effect = (
    Send
    | Log
    | Dropped
    | Warn
    | Joined
    | Again
    | Snapshot
    | Planned
    | Commit
    | Discard
    | Ended
    | StepResult
    | Evaluation
)
