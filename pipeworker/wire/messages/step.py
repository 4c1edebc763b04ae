"""Messages about steps, evaluation passes, and the calls of a user's own training loop."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pipeworker import exact_sum
from pipeworker.facts.connections import Borrowed
from pipeworker.facts.failure import Failure
from pipeworker.facts.limits import (
    LONGEST_TEXT,
    MOST_MICROBATCHES,
    MOST_NOTES,
    check,
    check_names,
)
from pipeworker.facts.step import Batch, Evaluation, StepResult


@dataclass(frozen=True, slots=True)
class Upcoming:
    """The next mini-batch has a number of micro-batches that none before had.

    The worker with stage 0 sends it when it reads that mini-batch, within a step, so that the
    coordinator makes the schedule before it is needed.
    """

    rank: int
    microbatches: int

    def __post_init__(self) -> None:
        count = self.microbatches
        check(1 <= count <= MOST_MICROBATCHES, f"a mini-batch of {count} micro-batches")


@dataclass(frozen=True, slots=True)
class StepDone:
    """A worker has run its actions; gradients are accumulated and not applied.

    Attributes:
        losses: from the worker with the last stage, each micro-batch's share of the loss (already
            weighted by samples), or each sum if the loss function returns ``(sum, count)``.
        counts: with `losses`, the counts of ``(sum, count)`` losses, else empty.
        squares: floats whose exact sum is the squared 2-norm of this worker's gradient; few,
            however many parameters there are (:func:`pipeworker.exact_sum.partials`).
        busy: seconds spent computing (forward, recompute, backward, data), and before that on the
            update of the last step, unless that came with another command.
        learning_rate: of the group of the first parameter that the worker trains; NaN without one.
        batch: from the worker with stage 0, the next mini-batch; None at the end of the data.
        snapshot_step: the last step whose snapshot is complete, -1 for none.
        snapshot_lacked_memory: whether a snapshot was not made because memory is short.
        snapshot_torn: the last step whose snapshot will not be complete, because a forward changed
            weights in place while they were copied, or because the host that mirrors it has not
            stored it; -1 for none.
        data_seconds: seconds spent reading the next mini-batch, part of `busy`.
        borrowed: uses of parameters that no layer of this worker has, in forwards 1, 2, 4, ... of a
            stage.
        notes: hints for the user about what layers do, from the first forward of each.
        leading: the layer of the parameter that has `learning_rate`, and its number in the layer.
    """

    rank: int
    step: int
    losses: tuple[float, ...]
    counts: tuple[float, ...]
    squares: tuple[float, ...]
    busy: float
    learning_rate: float
    peak_memory: int
    batch: Batch | None
    snapshot_step: int = -1
    snapshot_seconds: float = 0.0
    snapshot_lacked_memory: bool = False
    snapshot_torn: int = -1
    data_seconds: float = 0.0
    borrowed: tuple[Borrowed, ...] = ()
    notes: tuple[str, ...] = ()
    leading: tuple[int, ...] = (0, 0)

    def __post_init__(self) -> None:
        for use in self.borrowed:
            check_names((use.user, use.origin), "names of parameters")
        check_names(self.notes, "notes", MOST_NOTES)
        check(len(self.leading) == 2, f"a place of {len(self.leading)} numbers")
        losses, counts = len(self.losses), len(self.counts)
        check(losses <= MOST_MICROBATCHES, f"{losses} losses")
        check(counts in (0, losses), f"{counts} counts for {losses} losses")
        check(len(self.squares) <= exact_sum.MOST, f"{len(self.squares)} squares")
        check(not exact_sum.total(self.squares) < 0.0, "a negative sum of squares")
        check(self.busy >= 0.0, f"{self.busy} seconds of work")
        check(self.data_seconds >= 0.0, f"{self.data_seconds} seconds of reading")
        check(self.snapshot_step >= -1, f"a snapshot of step {self.snapshot_step}")
        check(self.snapshot_torn >= -1, f"a torn snapshot of step {self.snapshot_torn}")
        check(self.snapshot_seconds >= 0.0, f"{self.snapshot_seconds} seconds for a snapshot")
        check(self.peak_memory >= 0, f"{self.peak_memory} bytes of memory")


@dataclass(frozen=True, slots=True)
class Update:
    """A command: apply the gradients of `step`, and step the scheduler.

    Attributes:
        divisor: divides the gradients: Σcount, the number of mini-batches, the loss scale.
        scale: then multiplies them, to clip their norm.
        overflow: whether a gradient of any worker is not finite: then no optimizer steps.
        epoch_ended: whether the next mini-batch belongs to another epoch than the step's first.
    """

    step: int
    divisor: float = 1.0
    scale: float = 1.0
    overflow: bool = False
    epoch_ended: bool = False


@dataclass(frozen=True, slots=True)
class RunStep:
    """A command: run one mini-batch of a step, and add its gradients to those of earlier ones.

    Attributes:
        last: whether no further mini-batch will be needed.
        actions: the worker's actions as text, empty if they are those of the last mini-batch.
        first: the number of its first micro-batch within the step, for the random streams.
        loss_scale: multiplies the gradients during backward (fp16).
        complete: whether it completes the step's gradients: then replicas add theirs up.
        recorded: whether the worker records when its actions began and ended.
    """

    step: int
    batch: Batch
    last: bool
    actions: str = ""
    first: int = 0
    loss_scale: float = 1.0
    complete: bool = True
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """A worker has completed the evaluation pass, or the prediction, after `step`.

    The `result` of an evaluation comes from the worker with the last stage; memory is in bytes. A
    `failure` of the user's code changed nothing: the channels of the worker are empty again. Only
    workers of a user's own loop report one, so that the loop can continue.
    """

    rank: int
    step: int
    peak_memory: int
    result: Evaluation | None
    failure: Failure | None = None

    def __post_init__(self) -> None:
        check(self.peak_memory >= 0, f"{self.peak_memory} bytes of memory")


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The figures of the last evaluation pass that schedulers may use.

    Attributes:
        loss: of its first set.
        best: the figure of ``--best`` if more of it is better, else None; None if not finite, too.
    """

    loss: float
    best: float | None = None


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """The user's own loop has ended an epoch after `step`; step a scheduler that epochs step."""

    step: int


Change = Update | Evaluated | EpochEnded
"""A change of the training state."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """A command: run an evaluation pass, or a prediction, after `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class EndPass:
    """A request to the worker with stage 0: read no more of the evaluation pass after `step`.

    All workers complete the mini-batches that have been read, and report as at the pass's end.
    """

    step: int


class CallKind(Enum):
    """The kind of a call."""

    STEP = "step"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    END_EPOCH = "end_epoch"
    SAVE = "save"
    LOAD = "load"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The step, loss scale and epoch of the checkpoint that a user's own loop has loaded.

    Its `checksum` is another one for another checkpoint of the same step.
    """

    step: int
    scale: float = 0.0
    good_steps: int = 0
    epoch: int = 0
    checksum: int = 0

    def __post_init__(self) -> None:
        least = min(self.step, self.scale, self.good_steps, self.epoch, self.checksum)
        check(least >= 0, f"a loaded checkpoint with a negative field: {least}")


@dataclass(frozen=True, slots=True)
class Call:
    """The next call of the user's own loop on this rank; all ranks make the same calls.

    Attributes:
        batch: for STEP, the mini-batch on the first stage; None on the others.
        last: for STEP, whether this mini-batch completes the optimizer step.
        everywhere: for PREDICT, whether every rank gets the output.
        loaded: for LOAD, the checkpoint.
        changed: for CLOSE, whether the script has changed weights or optimizer since the last save.
        mistake: why this rank's arguments are wrong; then no rank performs the call.
    """

    rank: int
    kind: CallKind
    batch: Batch | None = None
    last: bool = True
    everywhere: bool = False
    loaded: Loaded | None = None
    changed: bool = False
    mistake: str = ""

    def __post_init__(self) -> None:
        loads = self.kind is CallKind.LOAD and not self.mistake
        consistent = (self.loaded is not None) == loads
        check(consistent, "LOAD without a checkpoint, or another call with one")
        check(len(self.mistake) <= LONGEST_TEXT, f"a mistake of {len(self.mistake)} characters")


@dataclass(frozen=True, slots=True)
class Wait:
    """A command: wait for the next call of the user's own loop.

    The `result` is that of the last call; a failure means that the call has changed nothing.
    """

    result: StepResult | Evaluation | Failure | None = None
