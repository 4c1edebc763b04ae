"""What the mini-batches of one step give: loss, gradient norm, and the scale of the update."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from pipeworker.coordinator.scaler import Scaler
from pipeworker.exact import total
from pipeworker.wire.messages.step import Batch, StepDone

_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one step, over all stages.

    Attributes:
        loss: mean over the samples, or Σsum / Σcount.
        norm: 2-norm of the whole gradient, before clipping.
        divisor: what the accumulated gradients are divided by in the update.
        scale: what they are then multiplied by, to clip their norm.
        epoch, first_epoch: of its last and of its first mini-batch.
        busy: seconds that each worker of the first replica computed, in the order of the stages.
        overflow: with a loss scale, whether a gradient is not finite.
    """

    loss: float
    norm: float
    divisor: float
    scale: float
    overflow: bool
    learning_rate: float
    samples: int
    seconds: float
    bubble: float
    epoch: int
    first_epoch: int
    busy: tuple[float, ...] = ()


@dataclass(slots=True)
class Tally:
    """Adds up the mini-batches of a step as they are done."""

    started: float
    batches: int = 0
    microbatches: int = 0
    _losses: float = 0.0
    _counts: float = 0.0
    _counted: bool = False
    _busy: float = 0.0
    _worked: tuple[float, ...] = ()
    _samples: int = 0
    _epoch: int = 0
    _first_epoch: int = 0
    _squares: tuple[float, ...] = ()
    _rate: float = 0.0

    def add(
        self, done: Sequence[StepDone], ends: Sequence[StepDone], busy: float, batch: Batch
    ) -> None:
        """Every stage has run a mini-batch.

        Args:
            done: of one replica, in the order of the stages: gradients are those of all replicas.
            ends: of the workers with the last stage, by replica, which have the losses.
            busy: seconds of computing, the mean over all workers.
        """
        losses = [loss for one in ends for loss in one.losses]
        counts = [count for one in ends for count in one.counts]
        # Left to right, as the plain loop adds: sum() compensates since Python 3.12.
        self._losses += functools.reduce(operator.add, losses, 0.0)
        self._counted = self._counted or bool(counts)
        self._counts += total(counts)
        self._busy += busy
        worked = self._worked or (0.0,) * len(done)
        self._worked = tuple(so_far + d.busy for so_far, d in zip(worked, done, strict=True))
        self._samples += batch.samples
        self._epoch = batch.epoch
        if not self.batches:
            self._first_epoch = batch.epoch
        self._squares = tuple(itertools.chain.from_iterable(d.squares for d in done))
        rates = (d.learning_rate for d in done if not math.isnan(d.learning_rate))
        self._rate = next(rates, 0.0)
        self.batches += bool(batch.microbatches)
        self.microbatches += batch.microbatches

    def outcome(self, now: float, clip: float | None, scaler: Scaler | None) -> Outcome:
        """The step as a whole; gradients are the mean of the mini-batches', or Σ / Σcount."""
        count = self._counts if self._counted else float(self.batches)
        loss_scale = scaler.scale if scaler else 1.0
        loss = self._losses / count if count else math.nan
        accumulated = math.sqrt(total(self._squares))
        divisor = (count or 1.0) * loss_scale
        norm = accumulated / divisor if count else math.nan
        scale = 1.0
        if clip is not None and norm + _CLIP_EPSILON > clip:
            scale = clip / (norm + _CLIP_EPSILON)
        seconds = now - self.started
        busy = self._busy / seconds if seconds > 0 else 1.0
        return Outcome(
            loss=loss,
            norm=norm,
            divisor=divisor,
            scale=scale,
            overflow=scaler is not None and not math.isfinite(accumulated),
            learning_rate=self._rate,
            samples=self._samples,
            seconds=seconds,
            bubble=min(1.0, max(0.0, 1.0 - busy)),
            epoch=self._epoch,
            first_epoch=self._first_epoch,
            busy=self._worked,
        )
