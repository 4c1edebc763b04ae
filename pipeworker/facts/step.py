"""Mini-batches, and results of steps and evaluation passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeworker.facts.limits import (
    LONGEST_NAME,
    MOST_MICROBATCHES,
    MOST_SAMPLES,
    check,
    check_names,
)


@dataclass(frozen=True, slots=True)
class Batch:
    """The mini-batch that the first stage has read for the next step.

    Attributes:
        signature: a number that stands for its structure, shapes and dtypes: equal numbers mean
            that all of these are equal.
        samples: of all replicas; 0 if the step ends without another mini-batch, so that the
            replicas only add up their gradients. Then `microbatches` is 0 too.
        epoch: counts from 0.
        digest: checksum of its content, with several replicas, to compare what they have read.
        tokens: of all replicas, for rates; 0 if unknown.
    """

    signature: int
    samples: int
    microbatches: int
    epoch: int
    digest: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        count = self.microbatches
        possible = 0 <= self.samples <= MOST_SAMPLES and 0 <= count <= MOST_MICROBATCHES
        both = bool(count) == bool(self.samples)
        check(possible and both, f"a mini-batch of {self.samples} samples in {count} micro-batches")
        check(self.epoch >= 0, f"epoch {self.epoch}")
        check(0 <= self.digest < 1 << 32, f"a digest of {self.digest}")
        check(0 <= self.tokens <= MOST_SAMPLES, f"a mini-batch of {self.tokens} tokens")


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, over all stages: a row of metrics.jsonl.

    Attributes:
        step: counts from 1.
        loss: mean over the samples, or Σsum / Σcount.
        samples: of the step, over all replicas.
        seconds: from the step's start to its last gradient.
        samples_per_second: over all replicas.
        grad_norm: 2-norm of the whole gradient, before clipping.
        lr: learning rate of the parameter group that has the model's first trained parameter.
        bubble: measured idle share, 0 to 1, over all stages.
        epoch: counts from 0.
        loss_scale: what the loss was multiplied by; None except with ``--precision fp16``.
        tokens: of the step, over all replicas; None if their number is unknown.
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
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation pass after `step`: a row of evaluation.jsonl.

    The loss, and the values of the metrics in `names`, are averaged over samples; a loss may be
    Σsum / Σcount instead.
    """

    step: int
    loss: float
    names: tuple[str, ...] = ()
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_names(self.names, "metrics")
        names, values = len(self.names), len(self.values)
        check(names == values, f"{names} names of metrics for {values} values")

    @staticmethod
    def of(row: Mapping[str, Any]) -> Evaluation:
        """Return the result that a row holds; what is no metric is left out."""
        found = {
            name: value
            for name, value in row.items()
            if isinstance(value, float) and name != "loss" and len(name) <= LONGEST_NAME
        }
        loss = row.get("loss")
        loss = loss if isinstance(loss, float) else math.nan
        return Evaluation(row["step"], loss, tuple(found), tuple(found.values()))

    def row(self) -> dict[str, float]:
        """Return ``loss`` and the metrics by name."""
        return {"loss": self.loss, **dict(zip(self.names, self.values, strict=True))}
