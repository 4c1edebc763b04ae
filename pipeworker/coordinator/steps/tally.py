"""The outcome of a step: loss, gradient norm, and the scale of the update. Pure."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.errors import UsageError
from pipeworker.exact_sum import total
from pipeworker.facts.step import Batch, StepResult
from pipeworker.plan.placement import Placement
from pipeworker.wire.messages.step import StepDone, Update

_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass(slots=True)
class Tally:
    """The sums of a step, over the mini-batches done so far.

    Attributes:
        busy: seconds that each worker of the first replica computed.
        data_seconds: seconds that its first stage read mini-batches.
    """

    step: int
    placement: Placement
    started: float
    batches: int = 0
    microbatches: int = 0
    busy: tuple[float, ...] = ()
    data_seconds: float = 0.0
    _losses: float = 0.0
    _counts: float = 0.0
    _counted: bool = False
    _mean_busy: float = 0.0
    _samples: int = 0
    _tokens: int = 0
    _epoch: int = 0
    _first_epoch: int = 0
    _squares: tuple[float, ...] = ()
    _rate: float = 0.0

    def add(self, done: Sequence[StepDone], batch: Batch) -> None:
        """Add a mini-batch that every worker has run; `done` is by rank.

        Raises:
            UsageError: some losses of the step have a count, and others have none.
        """
        placement = self.placement
        # Gradients are those of all replicas, so the first replica has them all.
        first = done[: placement.workers]
        ends = [done[rank] for rank in placement.ranks_of(placement.stages - 1)]
        losses = [loss for one in ends for loss in one.losses]
        counts = [count for one in ends for count in one.counts]
        # Left to right, as the plain loop adds: sum() compensates since Python 3.12.
        self._losses += functools.reduce(operator.add, losses, 0.0)
        is_first, is_counted = not self.batches, bool(counts)
        if len(counts) not in (0, len(losses)) or (
            losses and not is_first and is_counted is not self._counted
        ):
            raise UsageError(
                "loss(output, target) returned a pair (sum, count) for some micro-batches of step "
                f"{self.step} and a scalar for others; return the same kind for all"
            )
        self._counted = self._counted or is_counted
        self._counts += total(counts)
        self._mean_busy += sum(d.busy for d in done) / len(done)
        busy = self.busy or (0.0,) * len(first)
        self.busy = tuple(so_far + d.busy for so_far, d in zip(busy, first, strict=True))
        self.data_seconds += done[placement.rank_of(0)].data_seconds
        self._samples += batch.samples
        self._tokens += batch.tokens
        self._epoch = batch.epoch
        if not self.batches:
            self._first_epoch = batch.epoch
        self._squares = tuple(itertools.chain.from_iterable(d.squares for d in first))
        # Of all replicas: each may update a part of the parameters.
        rates = [(d.leading, d.learning_rate) for d in done if not math.isnan(d.learning_rate)]
        self._rate = min(rates)[1] if rates else 0.0
        self.batches += bool(batch.microbatches)
        self.microbatches += batch.microbatches

    def outcome(
        self, following: Batch | None, now: float, clip: float | None, scaler: LossScaler | None
    ) -> tuple[StepResult, Update]:
        """Return the row of the step, and the update.

        The gradient is the mean over the mini-batches, or the sum divided by Σcount.

        Args:
            following: the next mini-batch; None if the data has ended.
            now: the time, in seconds.
            clip: largest norm of the whole gradient; None for no limit.
            scaler: the loss scale of the step, with fp16.
        """
        count = self._counts if self._counted else float(self.batches)
        accumulated = math.sqrt(total(self._squares))
        divisor = (count or 1.0) * (scaler.scale if scaler else 1.0)
        norm = accumulated / divisor
        scale = 1.0
        if clip is not None and not norm + _CLIP_EPSILON <= clip:  # also NaN: all gradients are
            scale = clip / (norm + _CLIP_EPSILON)
        seconds = now - self.started
        busy = self._mean_busy / seconds if seconds > 0 else 1.0
        result = StepResult(
            step=self.step,
            loss=self._losses / count if count else math.nan,
            samples=self._samples,
            seconds=seconds,
            samples_per_second=self._samples / seconds if seconds > 0 else math.inf,
            grad_norm=norm if count else math.nan,
            lr=self._rate,
            bubble=min(1.0, max(0.0, 1.0 - busy)),
            epoch=self._epoch,
            loss_scale=scaler.scale if scaler else None,
            tokens=self._tokens or None,
        )
        update = Update(
            self.step,
            divisor,
            scale,
            overflow=scaler is not None and not math.isfinite(accumulated),
            epoch_ended=following is None or following.epoch != self._first_epoch,
        )
        return result, update
