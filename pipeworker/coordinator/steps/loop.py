"""The next command of a job: from the loop of a job file, or from the calls of a user's loop. Pure.

A loop receives the results of all workers, and returns what is due because of them: a record, an
update. Then it is asked for the next command. In between there may be a checkpoint; a loop knows
nothing of checkpoints, workers and messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeworker.coordinator.effects import Effect, Log
from pipeworker.coordinator.steps.progress import Progress
from pipeworker.coordinator.steps.tally import Tally
from pipeworker.errors import UsageError
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.step import Batch, Evaluation, StepResult
from pipeworker.job.options import EPOCH, Options
from pipeworker.plan.figures import plural
from pipeworker.plan.placement import Placement
from pipeworker.wire.lines import Warned
from pipeworker.wire.messages.directions import Finish
from pipeworker.wire.messages.step import (
    Change,
    Evaluate,
    Evaluated,
    RunStep,
    StepDone,
    Update,
    Wait,
)

LONG_PASS = 10_000
"""The number of steps after which data without a length may be infinite."""
_LONG = (
    f"data(): a pass has not ended after {LONG_PASS} steps, and may be infinite; Ctrl-C saves a "
    "checkpoint and stops, and --resume with --steps N sets an end"
)


@dataclass(frozen=True, slots=True)
class Due:
    """The actions that are due before the next command.

    Attributes:
        update: the update that workers apply first, if any.
        effects: records and log lines.
        can_save: whether the job may save or stop here: no step is half done, and no evaluation of
            the last one follows.
        must_save: whether a checkpoint is written here, even if there is one of this step.
        is_best: whether the evaluation of this step is the best, so that its checkpoint is kept.
        failure: the failure by which the job ends, if any.
        loses_nothing: whether the job saves a checkpoint before it ends by the failure.
    """

    update: Change | None = None
    effects: tuple[Effect, ...] = ()
    can_save: bool = False
    must_save: bool = False
    is_best: bool = False
    failure: Failure | None = None
    loses_nothing: bool = False


def common_batch(placement: Placement, by_rank: Sequence[Batch | None], step: int) -> Batch | None:
    """Return the mini-batch of `step` that all replicas have read, or raise UsageError."""
    first, *others = [by_rank[rank] for rank in placement.ranks_of(0)]
    for replica, other in enumerate(others, 1):
        if content_of(first) != content_of(other):
            raise UsageError(
                f"data(): replica {replica} read another mini-batch for step {step} than replica "
                "0; every replica reads all mini-batches and takes its part, so they must not "
                "depend on the process, the time or the order of processes. Or use --data-reader "
                "first, by which replica 0 reads for all"
            )
    return first


def content_of(batch: Batch | None) -> Batch | None:
    """Return a mini-batch without what each replica counts itself: its shapes and tokens."""
    return None if batch is None else replace(batch, signature=0, tokens=0)


class BaseLoop:
    """The current step: begun, added up, completed."""

    _tally: Tally

    def __init__(self, options: Options, placement: Placement, progress: Progress) -> None:
        self._options, self.placement, self._progress = options, placement, progress
        self._step = progress.steps
        self._batch: Batch | None = None
        self._half_done, self._total = False, 0

    def start(self, batch: Batch | None, steps: int = 0) -> None:
        """Begin: every stage is built, and `batch` is the first mini-batch, if one was read.

        `steps` is the number of steps of the run, 0 if unknown.
        """
        self._batch, self._total = batch, steps

    def _begin(self, batch: Batch, now: float, *, last: bool | None = None) -> RunStep:
        """Return the command that runs the first mini-batch of the next step."""
        self._step += 1
        self._tally = Tally(self._step, self.placement, now)
        return self._run(batch, last=last)

    def _run(self, batch: Batch, *, last: bool | None = None) -> RunStep:
        """Return the command that runs one more mini-batch of the step.

        A mini-batch without micro-batches only completes the step. `last` says whether it is the
        last one; None to find out from the options.
        """
        options, tally, scaler = self._options, self._tally, self._progress.scaler
        complete = tally.batches + 1 == options.accumulate or not batch.microbatches
        return RunStep(
            step=self._step,
            batch=batch,
            last=(self._step == options.steps and complete and options.evaluate_every != EPOCH)
            or not batch.microbatches,
            first=tally.microbatches,
            loss_scale=scaler.scale if scaler else 1.0,
            complete=self.placement.replicas == 1 or (complete if last is None else last),
        )

    def _complete(self, following: Batch | None, now: float) -> tuple[StepResult, Update, Due]:
        """Complete the step; `following` is the next mini-batch, None if the data has ended."""
        step, options, progress = self._step, self._options, self._progress
        clip, scaler = options.clip_grad_norm, progress.scaler
        result, update = self._tally.outcome(following, now, clip, scaler)
        tally = self._tally
        progress.complete_step(result, tally.busy, tally.data_seconds, overflow=update.overflow)
        new = step > progress.recorded  # not repeated after a loss
        effects: list[Effect] = [result] if new else []
        progress.recorded = max(step, progress.recorded)
        failure = None
        wrong = _not_finite(result)
        if wrong and options.stop_on_nan:
            failure = Failure(Cause.USER, wrong, position=Position(Phase.LOSS, step))
        elif wrong and new and progress.finite:  # the first such step of several
            more = "training continues (--stop-on-nan would stop here)"
            effects.append(Warned(f"{wrong}; {more}"))
        progress.finite = not wrong
        if update.overflow:
            after = progress.scaler
            effects.append(Log(f"step {step}: a gradient overflowed; no update, scale {after}"))
            if new and scaler and after and after.is_least and not scaler.is_least:
                effects.append(
                    Warned(
                        f"--precision fp16: a gradient is not finite at step {step} even with the "
                        "least loss scale, and such a step makes no update; find the layer where "
                        "values overflow, or use --precision bf16"
                    )
                )
        return result, update, Due(update, tuple(effects), can_save=True, failure=failure)

    def _lacking(self, evaluation: Evaluation) -> Failure | None:
        """Return the failure of an evaluation without the figure that ``--best`` names."""
        names, evaluations = [*evaluation.row()], self._progress.evaluations
        if evaluations.best is not None or evaluations.criterion.name in names:
            return None
        if len(names) == 1:
            found = f"no figure but {names[0]}; have metrics() return {evaluations.criterion.name}"
            remedy = "or leave the option out"
        else:
            found = f"no such figure; use one of {', '.join(names)}"
            remedy = "with max: before it if more is better"
        text = f"--best {self._options.best}: the evaluation has {found}, {remedy}"
        return Failure(Cause.USAGE, text)

    def _evaluated(self, evaluation: Evaluation) -> Evaluated:
        """Return the figures of an evaluation that schedulers may use."""
        criterion = self._progress.evaluations.criterion
        best = criterion.value(evaluation.row()) if criterion.more else None
        return Evaluated(evaluation.loss, best)


def _not_finite(result: StepResult) -> str:
    """Return what is not finite in a step, or "".

    With a loss scale, a gradient that overflows is part of training: the step makes no update.
    """
    if not math.isfinite(result.loss):
        return f"loss is {result.loss} at step {result.step}"
    if result.loss_scale is None and not math.isfinite(result.grad_norm):
        return f"the gradient is not finite at step {result.step}"
    return ""


class FileLoop(BaseLoop):
    """The loop of a job file: steps until ``--steps`` or the data ends, and evaluation passes.

    With ``--epochs`` a step ends with its epoch, so a run of N epochs that is resumed for more has
    the same steps as one that was started for as many.

    Attributes:
        evaluates: whether the next command is an evaluation pass.
    """

    _running: Batch
    _steps_of_pass = 0
    """The steps of the present pass over the data that this loop has done."""

    def __init__(self, options: Options, placement: Placement, progress: Progress) -> None:
        super().__init__(options, placement, progress)
        # The state after step 0 that a snapshot has is that after this evaluation.
        first = options.evaluate_first and not self._step and progress.evaluation is None
        progress.evaluation_due = progress.evaluation_due and options.evaluate_every is not None
        self.evaluates = first or options.evaluate_only or progress.evaluation_due

    @property
    def finished(self) -> bool:
        """Whether there are no more commands."""
        ended = self._has_ended or self._is_impatient
        is_due = self.evaluates or self._progress.evaluation_due
        return ended and not self._half_done and not is_due

    @property
    def _has_ended(self) -> bool:
        """Whether all steps are done."""
        return self._batch is None or self._step == self._options.steps

    @property
    def _is_impatient(self) -> bool:
        """Whether as many evaluations as ``--patience`` permits have not been better."""
        patience = self._options.patience
        return patience is not None and self._progress.evaluations.since >= patience

    @property
    def stopped_early(self) -> str:
        """Why a job that is done has not run all of its steps; "" if it has."""
        if self._has_ended:
            return ""
        found, options = self._progress.evaluations, self._options
        name = found.criterion.name
        lacked = f"a better {name} than that of step {found.best}"
        lacked = f"a finite {name}" if found.best is None else lacked
        count = plural(found.since, "evaluation")
        return f"{count} without {lacked} (--patience {options.patience})"

    def step_done(self, done: Sequence[StepDone], now: float) -> Due:
        """Return what is due after a mini-batch that every worker has run; `done` is by rank."""
        ran, tally, placement = self._running, self._tally, self.placement
        tally.add(done, ran)
        self._batch = common_batch(placement, [d.batch for d in done], self._step + 1)
        # If the data ends within a step, replicas have not yet added up their gradients.
        left = self._more or (ran.microbatches and placement.replicas > 1)
        self._half_done = bool(left) and tally.batches < self._options.accumulate
        if self._half_done:
            return Due()
        _, update, due = self._complete(self._batch, now)
        self.evaluates = self._options.evaluates(self._step, epoch_ended=update.epoch_ended)
        self._steps_of_pass = 0 if update.epoch_ended else self._steps_of_pass + 1
        if self._steps_of_pass == LONG_PASS and not self._total:
            due = replace(due, effects=(*due.effects, Warned(_LONG, note=True)))
        return replace(due, can_save=not self.evaluates)

    def leave_evaluation(self, due: Due) -> Due:
        """Leave an evaluation pass that is due, or was interrupted, to the run that resumes."""
        text = f"the evaluation after step {self._step} is not complete; --resume begins with it"
        self._progress.evaluation_due = True
        note = Warned(text, note=True)
        return replace(due, effects=(*due.effects, note), can_save=True)

    @property
    def _more(self) -> bool:
        """Whether the next mini-batch may belong to the same step."""
        if self._batch is None:
            return False
        return self._options.epochs is None or self._batch.epoch == self._running.epoch

    def evaluation_done(self, evaluation: Evaluation) -> Due:
        """Return what is due after an evaluation pass that every worker has completed."""
        progress = self._progress
        new = evaluation.step > progress.evaluated
        progress.evaluation = evaluation
        progress.evaluated = max(evaluation.step, progress.evaluated)
        is_best = progress.evaluations.add(evaluation)
        was_left, progress.evaluation_due = progress.evaluation_due, False
        progress.outdated = progress.outdated or was_left
        failure = self._lacking(evaluation)
        if failure is not None and not progress.started:
            new = False  # a row would keep the directory of a run that is a mistake
        # An evaluation before the first step leaves the numbers of training as they are.
        return Due(
            self._evaluated(evaluation) if evaluation.step else None,
            (evaluation,) if new else (),
            can_save=True,
            must_save=is_best and was_left,  # its checkpoint lacks the figures
            is_best=is_best,
            failure=failure,
            loses_nothing=progress.started,
        )

    def next(self, now: float) -> RunStep | Evaluate | Wait | Finish | None:
        """Return the next command, or None while waiting for calls from the user's loop."""
        if self.evaluates:
            self.evaluates = False
            return Evaluate(self._step)
        if self.finished:
            return Finish()
        batch = self._batch
        if self._half_done and not self._more:  # one without samples completes the step
            batch = Batch(self._running.signature, 0, 0, self._running.epoch)
        assert batch
        self._running = batch
        return self._run(batch) if self._half_done else self._begin(batch, now)
