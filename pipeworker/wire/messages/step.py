"""A step: its mini-batches, what is run, what that gave, and the update."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker import exact
from pipeworker.wire.messages.limits import MOST_MICROBATCHES, MOST_SAMPLES, check


@dataclass(frozen=True, slots=True)
class Batch:
    """The mini-batch the first stage holds ready for the next step.

    Attributes:
        signature: numbers its shapes: equal numbers mean equal structure, shapes and dtypes.
        samples, microbatches: of all replicas; both are 0 where a step ends without another one,
            and the replicas' gradients are to be added up.
        digest: of all that it holds, with several replicas: all have read the same.
    """

    signature: int
    samples: int
    microbatches: int
    epoch: int
    digest: int = 0

    def __post_init__(self) -> None:
        count = self.microbatches
        possible = 0 <= self.samples <= MOST_SAMPLES and 0 <= count <= MOST_MICROBATCHES
        both = bool(count) == bool(self.samples)
        check(possible and both, f"a mini-batch of {self.samples} samples in {count} micro-batches")
        check(self.epoch >= 0, f"epoch {self.epoch}")
        check(0 <= self.digest < 1 << 32, f"a digest of {self.digest}")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, over all stages: a row of metrics.jsonl.

    Attributes:
        step: counts from 1.
        loss: mean over the samples, or Σsum / Σcount.
        samples, samples_per_second: of all its mini-batches.
        seconds: from the step's start to its last gradient.
        grad_norm: 2-norm of the whole gradient, before clipping.
        lr: of the first parameter group.
        bubble: measured idle share, 0 to 1, over all stages.
        epoch: counts from 0.
        loss_scale: with fp16 alone.
    """

    step: int
    loss: float
    samples: int
    seconds: float
    samples_per_second: float
    grad_norm: float
    lr: float
    bubble: float
    epoch: int
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Upcoming:
    """Where stage 0 is, the next mini-batch is cut into a number of micro-batches that is new.

    Told when it is read, within a step, so that its schedule is made before it is needed.
    """

    rank: int
    microbatches: int

    def __post_init__(self) -> None:
        count = self.microbatches
        check(1 <= count <= MOST_MICROBATCHES, f"a mini-batch of {count} micro-batches")


@dataclass(frozen=True, slots=True)
class StepDone:
    """A worker has run its tuple; gradients are accumulated and not applied.

    Attributes:
        losses: from where the last stage is, each micro-batch's share of the loss (already weighted
            by samples), or each sum where the loss function returns ``(sum, count)``.
        counts: with `losses`, the counts of ``(sum, count)`` losses, else empty.
        squares: their exact sum is the squared 2-norm of this worker's gradient; a few, however
            many parameters there are (:func:`pipeworker.exact.partials`).
        busy: seconds spent computing (forward, recompute, backward, data).
        learning_rate: of the first parameter group; NaN where the worker has no optimizer.
        batch: from where stage 0 is, the next mini-batch; None when the data ended.
        copied: the last step whose state is copied as a whole (:class:`Copy`), -1 for none.
        copying: seconds of work that copy took.
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
    copied: int = -1
    copying: float = 0.0

    def __post_init__(self) -> None:
        losses, counts = len(self.losses), len(self.counts)
        check(losses <= MOST_MICROBATCHES, f"{losses} losses")
        check(counts in (0, losses), f"{counts} counts for {losses} losses")
        check(len(self.squares) <= exact.MOST, f"{len(self.squares)} squares")
        check(not exact.total(self.squares) < 0.0, "a negative sum of squares")
        check(self.busy >= 0.0, f"{self.busy} seconds of work")
        check(self.copied >= -1 and self.copying >= 0.0, "a copy that cannot be")
        check(self.peak_memory >= 0, f"{self.peak_memory} bytes of memory")


@dataclass(frozen=True, slots=True)
class Update:
    """Apply the gradients of `step`, and step the scheduler.

    Attributes:
        divisor: what gradients are divided by: Σcount, mini-batches, the loss scale.
        scale: what they are then multiplied by, to clip their norm.
        overflow: somewhere a gradient is not finite, so on all stages the optimizer does nothing.
        epoch_ended: the next mini-batch belongs to another epoch than the step's first.
    """

    step: int
    divisor: float = 1.0
    scale: float = 1.0
    overflow: bool = False
    epoch_ended: bool = False


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run one mini-batch of a step; its gradients are added to those of the ones before.

    Attributes:
        last: no further mini-batch will be needed.
        actions: the worker's tuple as text, when it differs from the last one.
        first: the number of its first micro-batch within the step, for the random streams.
        loss_scale: what gradients are multiplied by on their way (fp16).
        whole: the step's gradients are complete with it: replicas add theirs up.
    """

    step: int
    batch: Batch
    last: bool
    actions: str = ""
    first: int = 0
    loss_scale: float = 1.0
    whole: bool = True
