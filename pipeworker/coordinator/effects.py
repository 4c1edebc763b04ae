"""The effects that a job returns for the service to perform, as frozen facts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.failure import Failure
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.plan.check import LiveMicroBatches
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Timing
from pipeworker.wire.lines import Joined, Restart, Snapshot
from pipeworker.wire.messages.directions import ToWorker
from pipeworker.wire.messages.plan import Built
from pipeworker.wire.messages.presence import Hello


class Status(Enum):
    """The outcome of a job."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Send:
    """A message to a peer, in a frame of this generation."""

    peer: bytes
    message: ToWorker
    generation: int


@dataclass(frozen=True, slots=True)
class Log:
    """A decision and its reason."""

    text: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A message that is ignored, with the reason. A peer may send any number of them."""

    text: str


@dataclass(frozen=True, slots=True)
class Warn:
    """A warning that the user sees at once; a `note` is about what may be intended."""

    text: str
    note: bool = False


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage of a replica that has been built, and its worker."""

    replica: int
    built: Built
    worker: Hello
    device: str
    recompute: str = "auto"


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a job whose stages have all been built.

    Attributes:
        stages: the stages of replica 0, then of replica 1, ...
        schedule: the schedule of a replica with the most micro-batches.
        kept: the activations that it keeps.
        microbatches: micro-batches of the first mini-batch, over all replicas.
        length: mini-batches of an epoch; 0 if it is unknown.
    """

    stages: tuple[StagePlan, ...]
    schedule: Schedule
    kept: LiveMicroBatches
    timing: Timing
    microbatches: int
    length: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """A request to complete the checkpoint of `step`, whose parts have all been written.

    `ties` and `layers` are names; the evaluation is that of this very step.
    """

    step: int
    scaler: LossScaler | None = None
    ties: tuple[tuple[str, ...], ...] = ()
    layers: tuple[str, ...] = ()
    files: tuple[CheckpointFile, ...] = ()
    evaluation: Evaluation | None = None


@dataclass(frozen=True, slots=True)
class Discard:
    """A request to remove the unfinished checkpoint of `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a job, with its peak memory in bytes by rank and the causes of its restarts.

    `busy` is the share of the time of its steps that each worker of a replica computed.
    """

    status: Status
    exit_status: int
    steps: int
    peak_memory: tuple[int, ...]
    bubble: float
    failure: Failure | None
    causes: tuple[str, ...] = ()
    busy: tuple[float, ...] = ()


_Performed = Send | Log | Dropped | Warn | Planned | Commit | Discard | Ended
Effect = _Performed | Joined | Restart | Snapshot | StepResult | Evaluation
"""Of these, lines are sent to the parent; results of steps and evaluation passes are recorded."""
