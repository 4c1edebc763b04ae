"""The progress of a job: steps done, the loss scale, how busy its workers were. Pure."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeworker.coordinator.effects import JobState
from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.coordinator.steps.evaluations import Evaluations
from pipeworker.coordinator.steps.speed import SpeedMeter
from pipeworker.facts.criterion import Criterion
from pipeworker.facts.layer_facts import LayerFacts, NetworkFacts
from pipeworker.facts.speed import Speed
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.job.options import Options
from pipeworker.plan.planned import Planned
from pipeworker.trace.sampling import Sampling
from pipeworker.wire.messages.checkpoint import Restore


@dataclass(frozen=True, slots=True)
class Start:
    """The state from which a coordinator continues a job that another process began.

    Attributes:
        on_disk: the checkpoint that the workers begin with; None for the initial weights.
        snapshot: the last snapshot of an earlier coordinator, which may be newer.
        layers: the names of the checkpoint's layers.
        recorded: as in :class:`Progress`, like `saved`.
        evaluations: the evaluation passes that are recorded.
        checkpoints: the steps of all complete checkpoints.
        causes: the causes of all restarts so far.
        elapsed: seconds since the start of the job.
        stages: the present number; 0 for that of the options.
        facts: the facts that the run was planned from; None if there are none.
        known: facts of layers of earlier jobs, by digest.
    """

    on_disk: tuple[JobState, Restore] | None = None
    snapshot: tuple[JobState, Restore] | None = None
    layers: tuple[str, ...] = ()
    recorded: int = 0
    evaluations: tuple[Evaluation, ...] = ()
    checkpoints: frozenset[int] = frozenset()
    saved: int = -1
    causes: tuple[str, ...] = ()
    elapsed: float = 0.0
    stages: int = 0
    facts: NetworkFacts | None = None
    known: Mapping[str, LayerFacts] = field(default_factory=dict)


@dataclass(slots=True)
class Progress:
    """The progress of a job, which outlasts its generations.

    Attributes:
        steps: the last completed step.
        attempts: generations begun.
        has_run: whether an earlier coordinator has completed a step of the run.
        recorded: the last step whose row is recorded; a step that is repeated after a loss gives
            the same row, which is not recorded again.
        evaluated: the last step whose evaluation is recorded; -1 if there is none.
        evaluation_due: whether the evaluation pass after the last step was left to a resumed run.
        evaluations: the evaluation passes up to the last completed step.
        saved: the step of the last checkpoint, -1 if there is none.
        outdated: whether the state has changed since the checkpoint of this step: by an own loop,
            or by the evaluation that was due.
        saved_at: the time at which the last checkpoint was begun.
        failed_saves: checkpoints that failed since the last complete one.
        seconds: the duration of the last step.
        finite: whether the loss and the gradient of the last step were finite.
        epoch: the epochs that a user's own loop has ended.
        facts: the facts that the job is planned from; None if there are none.
        seeks_facts: whether they are still to be found.
        known_facts: facts of layers of earlier jobs, by digest.
        sampling: decides which mini-batches are recorded.
        plans: the plans that were made from the facts, by number of workers.
        sources: digests of the job file and the modules beside it, by name, as workers last loaded
            them.
    """

    steps: int = 0
    scaler: LossScaler | None = None
    evaluation: Evaluation | None = None
    attempts: int = 0
    has_run: bool = False
    recorded: int = 0
    evaluated: int = -1
    evaluation_due: bool = False
    evaluations: Evaluations = field(default_factory=lambda: Evaluations(Criterion("loss")))
    saved: int = -1
    outdated: bool = False
    saved_at: float = 0.0
    save_requested: bool = False
    failed_saves: int = 0
    seconds: float = 0.0
    finite: bool = True
    epoch: int = 0
    facts: NetworkFacts | None = None
    seeks_facts: bool = False
    known_facts: Mapping[str, LayerFacts] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    plans: dict[int, Planned] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    _completed: int = 0  # steps that this process saw completed
    _bubbles: float = 0.0  # the sum of their bubbles
    _busy_seconds: tuple[float, ...] = ()  # by worker, since their number last changed
    _step_seconds: float = 0.0  # of the same steps
    _meter: SpeedMeter = field(default_factory=SpeedMeter)

    @staticmethod
    def after(start: Start, options: Options, now: float) -> Progress:
        """Return the progress of a job that another process began."""
        evaluations = Evaluations.of(Criterion.parse(options.best), start.evaluations)
        evaluations.keep_only(start.checkpoints)
        return Progress(
            saved_at=now,
            has_run=bool(start.causes) and start.recorded > options.resume_step,
            recorded=start.recorded,
            evaluated=max((one.step for one in start.evaluations), default=-1),
            saved=start.saved,
            evaluations=evaluations,
            facts=start.facts,
            seeks_facts=options.is_planned and start.facts is None,
            known_facts=start.known,
        )

    @property
    def started(self) -> bool:
        """Whether a step was completed since the run was started or resumed."""
        return self.has_run or self._completed > 0

    @property
    def bubble(self) -> float:
        """The mean idle share of the steps, 0 to 1."""
        return self._bubbles / self._completed if self._completed else 0.0

    @property
    def busy(self) -> tuple[float, ...]:
        """The share of the time of its steps that each worker of a replica computed."""
        total = self._step_seconds
        return tuple(seconds / total for seconds in self._busy_seconds) if total else ()

    @property
    def speed(self) -> Speed | None:
        """The speed of the steps; None before the first one."""
        return self._meter.speed(self._busy_seconds)

    @property
    def job_state(self) -> JobState:
        """The coordinator's part of a snapshot or checkpoint of the current step."""
        current = self.evaluation and self.evaluation.step == self.steps
        evaluation = self.evaluation if current else None
        return JobState(self.steps, self.scaler, evaluation, self.epoch, self.evaluation_due)

    def has_unsaved(self, step: int) -> bool:
        """Return whether the state after a step up to `step` is in no checkpoint."""
        return step > max(0, self.saved) or (self.outdated and step > 0)

    @property
    def lacks_best(self) -> bool:
        """Whether the evaluation of the current step is the best, and is in no checkpoint yet."""
        return self.evaluations.kept == self.steps and self.saved < self.steps

    def roll_back(self, state: JobState) -> None:
        """Return to an earlier state; later steps will be repeated, by new workers."""
        self._meter.begin()
        self.outdated = False
        self.steps, self.scaler, self.evaluation = state.step, state.scaler, state.evaluation
        self.epoch, self.evaluation_due = state.epoch, state.evaluation_due
        self.evaluations.roll_back(state.step)

    def end_epoch(self) -> None:
        """Count an epoch of a user's own loop; a checkpoint of this step is now outdated."""
        self.epoch += 1
        self.outdated = True

    def complete_step(
        self, result: StepResult, busy: Sequence[float], data: float, *, overflow: bool
    ) -> None:
        """Record a step.

        `busy` is the seconds that each worker of a replica computed; `data` those of reading.
        """
        self.steps, self.seconds, self.outdated = result.step, result.seconds, False
        self._completed += 1
        self._bubbles += result.bubble
        if len(busy) != len(self._busy_seconds):  # the first step with so many workers
            self._busy_seconds, self._step_seconds = (0.0,) * len(busy), 0.0
        self._busy_seconds = tuple(map(operator.add, self._busy_seconds, busy))
        self._step_seconds += result.seconds
        self._meter.add(result, data)
        if self.scaler:
            self.scaler = self.scaler.after(overflow=overflow)
