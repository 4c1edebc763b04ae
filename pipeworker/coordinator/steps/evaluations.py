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
    _values: dict[int, float | None] = field(default_factory=dict)  # also of steps to be repeated
    _lost: set[int] = field(default_factory=set)
    _last: int = -1  # the step of the last pass that counts

    @staticmethod
    def of(criterion: Criterion, passes: Iterable[Evaluation]) -> Evaluations:
        """Return the passes that a run has recorded."""
        found = Evaluations(criterion)
        found._values = {one.step: criterion.value(one.row()) for one in passes}
        found._count(max(found._values, default=-1))
        return found

    def add(self, evaluation: Evaluation) -> bool:
        """Add a pass; return whether its checkpoint is to be kept.

        A pass that is repeated after a loss has the same figures, and counts once.
        """
        step = evaluation.step
        self._values[step] = self.criterion.value(evaluation.row())
        self._count(step)
        return self.kept == step

    def lose(self, steps: Iterable[int]) -> None:
        """Note that the checkpoints of these steps will not be complete."""
        self._lost |= {*steps}
        self._count(self._last)

    def keep_only(self, steps: Collection[int]) -> None:
        """Note that there are checkpoints of no other steps."""
        self.lose(self._values.keys() - steps)

    def roll_back(self, step: int) -> None:
        """Count the passes up to a step only; its own checkpoint can be written again.

        The step may follow the current one: the checkpoint of a later step may be completed after
        an earlier snapshot was chosen, and a second loss goes on from it.
        """
        self._lost = {at for at in self._lost if at < step}
        self._count(step)

    def _count(self, last: int) -> None:
        self.best, self.kept, self.since, self._last = None, None, 0, last
        for step in sorted(at for at in self._values if at <= last):
            value = self._values[step]
            self.since += 1
            if self._is_better(value, self.best):
                self.best, self.since = step, 0
            if step not in self._lost and self._is_better(value, self.kept):
                self.kept = step

    def _is_better(self, value: float | None, step: int | None) -> bool:
        return self.criterion.is_better(value, None if step is None else self._values[step])
