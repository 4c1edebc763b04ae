"""The view of a run that its page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeworker.display.report.curves import Curve
from pipeworker.plan.actions import Kind
from pipeworker.trace.causes import Breakdown


@dataclass(frozen=True, slots=True)
class Box:
    """Something that a worker did in a step, in seconds from the step's begin.

    Attributes:
        kind: what it computed; a text for what is no computation, as ``update``.
        stage, microbatch: of an action; -1 for others.
    """

    kind: Kind | str
    stage: int
    microbatch: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class StepView:
    """A step, as measured or as planned: what each worker did, by rank."""

    title: str
    seconds: float
    rows: Sequence[Sequence[Box]]


@dataclass(frozen=True, slots=True)
class MemoryView:
    """The memory of a worker over a step.

    Attributes:
        label: the worker.
        times: seconds from the step's begin.
        sizes: bytes at these times.
        planned: the peak that the plan predicts; None if there is no plan.
        limit: bytes that the worker may use; None without a limit.
    """

    label: str
    times: Sequence[float]
    sizes: Sequence[int]
    planned: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class ReportView:
    """All that the page of a run shows.

    Attributes:
        answer: the change that would help most.
        figures: names and values of the run's most important figures.
        workers: labels of the workers, by rank.
        steps: recorded steps, the most usual one first.
        planned: the step that the plan predicts; None without a plan.
        found, foreseen: where the time went, and where it goes as planned; None if no step is
            recorded, or without a plan.
        happened: when, and what, in order of time.
    """

    title: str
    answer: str
    figures: Sequence[tuple[str, str]]
    curves: Sequence[Curve]
    workers: Sequence[str]
    steps: Sequence[StepView]
    planned: StepView | None
    memory: Sequence[MemoryView]
    found: Breakdown | None
    foreseen: Breakdown | None
    happened: Sequence[tuple[str, str]]
