"""The evaluation passes of a run, and which of them is the best. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pipeworker.facts.criterion import Criterion
from pipeworker.facts.step import Evaluation


@dataclass(slots=True)
class Evaluations:
    """The figures of the evaluation passes up to the current step.

    A figure may be the best although its checkpoint was never completed: then a later pass that is
    better than those whose checkpoints exist is worth one.

    Attributes:
        best: the step of the best pass, of equal ones the first; None if none has a finite figure.
        since: the passes after the best one.
        kept: the step of the best pass whose checkpoint is, or will be, complete.
    """

    criterion: Criterion
    best: int | None = None
    since: int = 0
    kept: int | None = None
    _values: dict[int, float | None] = field(default_factory=dict)
    _seen: dict[int, float | None] = field(default_factory=dict)  # also of steps to be repeated
    _lost: set[int] = field(default_factory=set)

    @staticmethod
    def of(criterion: Criterion, passes: Iterable[Evaluation]) -> Evaluations:
        """Return the passes that a run has recorded."""
        found = Evaluations(criterion)
        for evaluation in passes:
            found.add(evaluation)
        return found

    def add(self, evaluation: Evaluation) -> bool:
        """Add a pass; return whether its checkpoint is to be kept.

        A pass that is repeated after a loss has the same figures, and counts once.
        """
        step = evaluation.step
        if step not in self._values:
            self._add(step, self.criterion.value(evaluation.row()))
        return self.kept == step

    def _add(self, step: int, value: float | None) -> None:
        self._values[step] = self._seen[step] = value
        self.since += 1
        if self._is_better(value, self.best):
            self.best, self.since = step, 0
        if step not in self._lost and self._is_better(value, self.kept):
            self.kept = step

    def _is_better(self, value: float | None, step: int | None) -> bool:
        return self.criterion.is_better(value, None if step is None else self._values[step])

    def lose(self, steps: Iterable[int]) -> None:
        """Note that the checkpoints of these steps will not be complete."""
        self._lost |= {*steps}
        self._count()

    def keep_only(self, steps: Collection[int]) -> None:
        """Note that there are checkpoints of no other steps."""
        self.lose(self._values.keys() - steps)

    def roll_back(self, step: int) -> None:
        """Count the passes up to a step only; its own checkpoint can be written again.

        The step may follow the current one: the checkpoint of a later step may be completed after
        an earlier snapshot was chosen, and the job resumes from it after a second loss.
        """
        self._values = {at: self._seen[at] for at in sorted(self._seen) if at <= step}
        self._lost = {at for at in self._lost if at < step}
        self._count()

    def _count(self) -> None:
        values, self._values = self._values, {}
        self.best, self.kept, self.since = None, None, 0
        for step, value in values.items():
            self._add(step, value)
