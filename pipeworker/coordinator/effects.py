"""The effects that a job returns for the service to perform, as frozen facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.layer_facts import LayerFacts, NetworkFacts
from pipeworker.facts.step import Evaluation
from pipeworker.job.options import Options
from pipeworker.wire.lines import JobLine
from pipeworker.wire.messages.directions import ToWorker


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
class WritePlan:
    """A request to write ``plan.json``: all stages have been built."""

    content: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeepFacts:
    """A request to keep facts of layers for later jobs, by their digests."""

    facts: Mapping[str, LayerFacts]


@dataclass(frozen=True, slots=True)
class MakePlan:
    """A request to make the plan of a job of these options, with the workers of a generation."""

    generation: int
    facts: NetworkFacts
    options: Options


@dataclass(frozen=True, slots=True)
class JobState:
    """The coordinator's own part of a snapshot or checkpoint, after `step`.

    Attributes:
        epoch: the epochs that a user's own loop has ended.
        evaluation_due: whether the job was stopped before the evaluation pass of the step ended.
    """

    step: int
    scaler: LossScaler | None = None
    evaluation: Evaluation | None = None
    epoch: int = 0
    evaluation_due: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """A request to complete the checkpoint of a state, whose parts have all been written.

    `ties` and `layers` are names.
    """

    state: JobState
    ties: tuple[tuple[str, ...], ...] = ()
    layers: tuple[str, ...] = ()
    files: tuple[CheckpointFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Withdraw:
    """A request to remove the row of `step`, the last one, because its update has failed."""

    step: int


@dataclass(frozen=True, slots=True)
class Discard:
    """A request to remove the unfinished checkpoint of `step`."""

    step: int


Effect = (
    Send | Log | Dropped | WritePlan | KeepFacts | MakePlan | Commit | Withdraw | Discard | JobLine
)
"""A line is sent to the parent; results of steps and of evaluation passes are also recorded."""
