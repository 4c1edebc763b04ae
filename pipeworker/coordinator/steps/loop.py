"""What a job does next: the loop of a job file, or the calls of the user's own. Pure.

A loop is told what every worker has done, and says what is due by it: a record, an update. Then it
is asked what is next. Between the two there may be a checkpoint, of which it knows nothing, nor of
workers and messages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeworker.coordinator.effects import Effect, Log, Warn
from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.steps.calls import Calls
from pipeworker.coordinator.steps.progress import Progress
from pipeworker.coordinator.steps.snapshots import Mark
from pipeworker.coordinator.steps.tally import Tally
from pipeworker.errors import UsageError
from pipeworker.job.options import EPOCH, Options
from pipeworker.plan.placement import Placement
from pipeworker.wire.messages.advance import Finish
from pipeworker.wire.messages.calls import Call, CallKind, Loaded, Wait
from pipeworker.wire.messages.evaluation import Evaluate, Evaluated, Evaluation
from pipeworker.wire.messages.failure import Cause, Failure
from pipeworker.wire.messages.position import Phase, Position
from pipeworker.wire.messages.step import Batch, RunStep, StepDone, StepResult, Update


@dataclass(frozen=True, slots=True)
class Due:
    """What comes before what is next.

    Attributes:
        boundary: no step is half done: the job may stop or save here.
        evaluates: an evaluation pass of this step comes first; a checkpoint is taken behind it.
        saves: a checkpoint is taken here, whether or not there is one of this step.
        failure: the job ends by it.
    """

    update: Update | Evaluated | None = None
    effects: tuple[Effect, ...] = ()
    boundary: bool = False
    evaluates: bool = False
    saves: bool = False
    failure: Failure | None = None


class Loop(Protocol):
    """The one that feeds a generation."""

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to do."""

    @property
    def answered(self) -> bool:
        """Whether workers say when they have done what is next; a prediction they do not."""

    def begin(self, batch: Batch | None) -> None:
        """Every stage is built; `batch` is ready where stage 0 is."""

    def ran(self, done: Sequence[StepDone], now: float) -> Due:
        """Every worker has run a mini-batch; `done` is by rank."""

    def evaluated(self, evaluation: Evaluation) -> Due:
        """Every worker has ended an evaluation pass."""

    def called(self, call: Call) -> Due | None:
        """The user's own loop made its next call on one rank; None while others have not."""

    def next(self, now: float) -> RunStep | Evaluate | Wait | Finish | None:
        """What is next; None while nobody is told anything: calls are waited for."""


def alike(placement: Placement, by_rank: Sequence[Batch | None], step: int) -> Batch | None:
    """The mini-batch of `step` that the first stage of every replica has read.

    Raises:
        UsageError: they have not read the same.
    """
    first, *others = [by_rank[rank] for rank in placement.ranks_of(0)]
    for replica, other in enumerate(others, 1):
        if _content(first) != _content(other):
            raise UsageError(
                f"data() gave replica {replica} another mini-batch for step {step} than replica 0: "
                "every replica reads all of it and takes its part, so it must be the same each "
                "time it is read: let nothing in it depend on the process, the time or the order "
                "in which processes come; or have replica 0 read it for all, by --read-data once"
            )
    return first


def _content(batch: Batch | None) -> Batch | None:
    """But for the number of its shapes, which each replica gives by itself."""
    return None if batch is None else dataclasses.replace(batch, signature=0)


@dataclass(slots=True)
class _Steps:
    """The mini-batches of steps: begun, added up, completed."""

    options: Options
    placement: Placement
    progress: Progress
    step: int = 0
    tally: Tally = field(default_factory=lambda: Tally(0.0))
    _stage_order: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        ranks = range(self.placement.workers)  # of the first replica
        self._stage_order = tuple(sorted(ranks, key=self.placement.stages_of))

    def begin(self, batch: Batch, now: float, *, whole: bool | None = None) -> RunStep:
        """The first mini-batch of the next step."""
        self.step += 1
        self.tally = Tally(now)
        return self.run(batch, whole=whole)

    def run(self, batch: Batch, *, whole: bool | None = None) -> RunStep:
        """One more mini-batch of the step; `whole`: the last, if that is known otherwise."""
        options, tally, scaler = self.options, self.tally, self.progress.scaler
        complete = tally.batches + 1 == options.accumulate or not batch.microbatches
        return RunStep(
            step=self.step,
            batch=batch,
            last=(self.step == options.steps and complete and options.evaluate_every != EPOCH)
            or not batch.microbatches,
            first=tally.microbatches,
            loss_scale=scaler.scale if scaler else 1.0,
            whole=self.placement.replicas == 1 or (complete if whole is None else whole),
        )

    def add(self, done: Sequence[StepDone], batch: Batch) -> None:
        placement = self.placement
        stage_order = [done[rank] for rank in self._stage_order]
        ends = [done[rank] for rank in placement.ranks_of(placement.stages - 1)]
        self.tally.add(stage_order, ends, sum(d.busy for d in done) / len(done), batch)

    def complete(self, following: Batch | None, now: float) -> tuple[StepResult, Due]:
        """The gradients of the step are there: its row, and all that is due."""
        step = self.step
        outcome = self.tally.outcome(now, self.options.clip_grad_norm, self.progress.scaler)
        result = self.progress.done(step, outcome)
        new = step > self.progress.recorded  # else it is done again, behind a loss
        effects: list[Effect] = [result] if new else []
        self.progress.recorded = max(step, self.progress.recorded)
        failure = None
        if not math.isfinite(outcome.loss):
            text = f"loss is {outcome.loss} at step {step}"
            if self.options.stop_on_nan:
                failure = Failure(Cause.USER, text, position=Position(Phase.LOSS, step))
            elif new:
                again = "training goes on (--stop-on-nan would stop here)"
                effects.append(Warn(f"{text}; {again}"))
        if outcome.overflow:
            scale = self.progress.scaler
            effects.append(Log(f"step {step}: a gradient overflowed; no update, scale {scale}"))
        epoch_ended = following is None or following.epoch != outcome.first_epoch
        update = Update(step, outcome.divisor, outcome.scale, outcome.overflow, epoch_ended)
        return result, Due(update, tuple(effects), boundary=True, failure=failure)


class FileLoop:
    """Steps until ``--steps`` or the data ends, with evaluation passes between them.

    With ``--epochs`` a step ends with its epoch, so that a run which goes on further than it was
    begun for is one that was begun for as many.
    """

    answered = True

    def __init__(self, options: Options, placement: Placement, progress: Progress) -> None:
        self._options = options
        self._steps = _Steps(options, placement, progress, progress.steps)
        self._batch: Batch | None = None
        self._running: Batch | None = None
        self._half_done = False
        self._evaluate = False

    @property
    def finished(self) -> bool:
        ended = self._batch is None or self._steps.step == self._options.steps
        return ended and not self._half_done and not self._evaluate

    def begin(self, batch: Batch | None) -> None:
        self._batch = batch

    def ran(self, done: Sequence[StepDone], now: float) -> Due:
        assert self._running
        steps, ran = self._steps, self._running
        steps.add(done, ran)
        self._batch = alike(steps.placement, [d.batch for d in done], steps.step + 1)
        # Where the data ends in the middle of a step, replicas have not added up what they have.
        left = self._more or (ran.microbatches and steps.placement.replicas > 1)
        self._half_done = bool(left) and steps.tally.batches < self._options.accumulate
        if self._half_done:
            return Due()
        due = steps.complete(self._batch, now)[1]
        assert isinstance(due.update, Update)
        ended = due.update.epoch_ended
        self._evaluate = self._options.evaluates(steps.step, epoch_ended=ended)
        return dataclasses.replace(due, evaluates=self._evaluate)

    @property
    def _more(self) -> bool:
        """Whether the next mini-batch may be of the same step."""
        assert self._running
        if self._batch is None:
            return False
        return self._options.epochs is None or self._batch.epoch == self._running.epoch

    def evaluated(self, evaluation: Evaluation) -> Due:
        progress = self._steps.progress
        new = evaluation.step > progress.evaluated
        progress.evaluation, progress.evaluated = (
            evaluation,
            max(evaluation.step, progress.evaluated),
        )
        return Due(Evaluated(evaluation.loss), (evaluation,) if new else (), boundary=True)

    def called(self, call: Call) -> Due | None:
        raise AssertionError(call)  # not legal in a job file's generation

    def next(self, now: float) -> RunStep | Evaluate | Wait | Finish | None:
        if self._evaluate:
            self._evaluate = False
            return Evaluate(self._steps.step)
        if self.finished:
            return Finish()
        batch = self._batch
        if self._half_done:
            self._running = batch if batch and self._more else _no_more(self._running)
            return self._steps.run(self._running)
        assert batch
        self._running = batch
        return self._steps.begin(batch, now)


def _no_more(last: Batch | None) -> Batch:
    """What ends a step behind its last mini-batch."""
    assert last
    return Batch(last.signature, 0, 0, last.epoch)


class CallLoop:
    """What the user's own loop calls, when all ranks have called it."""

    def __init__(self, options: Options, placement: Placement, progress: Progress) -> None:
        self._steps = _Steps(options, placement, progress, progress.steps)
        self._progress = progress
        self._calls = Calls(placement, deals=options.read_data == "once")
        self._batch: Batch | None = None
        self._asked: CallKind | None = None
        self._half_done = False
        self._gave: Wait | None = Wait()

    @property
    def finished(self) -> bool:
        return self._asked is CallKind.CLOSE

    @property
    def answered(self) -> bool:
        return self._asked is not CallKind.PREDICT

    def begin(self, batch: Batch | None) -> None:
        """Mini-batches come with calls."""

    def ran(self, done: Sequence[StepDone], now: float) -> Due:
        assert self._batch
        self._steps.add(done, self._batch)
        self._asked = None
        if self._half_done:
            return Due()
        result, due = self._steps.complete(self._batch, now)
        self._gave = Wait(result)
        return due

    def evaluated(self, evaluation: Evaluation) -> Due:
        self._asked, self._gave = None, Wait(evaluation)
        self._progress.evaluation = evaluation
        return Due(Evaluated(evaluation.loss), (evaluation,), boundary=not self._half_done)

    def called(self, call: Call) -> Due | None:
        if wrong := self._calls.add(call):
            return Due(failure=Failure(Cause.USAGE, wrong))
        if not self._calls.complete:
            return None
        self._asked = call.kind
        if call.loaded is not None:
            self._go_on_from(call.loaded)
        return Due(saves=call.kind is CallKind.SAVE)

    def _go_on_from(self, loaded: Loaded) -> None:
        progress = self._progress
        scaler = progress.scaler and Scaler(loaded.scale or Scaler().scale, loaded.good_steps)
        progress.back_to(Mark(loaded.step, scaler))
        progress.saved = -1  # what is there of the same step may be another run's
        self._steps.step = progress.recorded = progress.evaluated = loaded.step

    def next(self, now: float) -> RunStep | Evaluate | Wait | Finish | None:
        match self._asked:
            case CallKind.STEP:
                batch = self._batch = self._calls.batch
                assert batch
                more, last = self._half_done, self._calls.last
                self._half_done = not last
                if more:
                    return self._steps.run(batch, whole=last)
                return self._steps.begin(batch, now, whole=last)
            case CallKind.CLOSE:
                return Finish()
            case CallKind.EVALUATE | CallKind.PREDICT:
                return Evaluate(self._progress.steps)
            case CallKind.SAVE | CallKind.LOAD:
                self._asked = None
                return Wait()
            case None:
                gave, self._gave = self._gave, None
                return gave


def loop_for(options: Options, placement: Placement, progress: Progress) -> Loop:
    """The job file's, or the user's own."""
    kind = CallLoop if options.own_loop else FileLoop
    return kind(options, placement, progress)
