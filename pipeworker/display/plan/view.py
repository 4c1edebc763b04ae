"""The view of a plan that all of its displays show: its stages, and other choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.plan.figures import plural
from pipeworker.plan.partition import ranges
from pipeworker.plan.placement import held_text
from pipeworker.plan.planned import Planned, StageSeconds
from pipeworker.plan.planner.choices import Alternative
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Span, timeline


@dataclass(frozen=True, slots=True)
class StageView:
    """The view of one stage of a plan.

    Attributes:
        layers: half-open range of its layers.
        parameters: number of elements of its parameters.
        seconds: for which it computes in a step.
        memory: predicted peak bytes of its worker, with all of its stages.
        limit: bytes that its worker may use; None without a limit.
    """

    stage: int
    worker: int
    layers: tuple[int, int]
    parameters: int
    seconds: StageSeconds
    memory: int
    limit: int | None
    mode: str


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan with everything that its displays need.

    Attributes:
        samples_each: samples of a micro-batch.
        samples: samples of a mini-batch; if they are unknown, those of micro-batches of that size.
        measured: whether seconds were measured; else they are shares of counted operations.
        spans: when each worker computes what, by worker.
        choices: this plan among plans for other schedules and numbers of stages.
    """

    planned: Planned
    samples_each: int
    samples: int
    measured: bool
    stages: tuple[StageView, ...]
    spans: tuple[tuple[Span, ...], ...]
    choices: tuple[Alternative, ...] = ()

    @staticmethod
    def of(planned: Planned, facts: NetworkFacts, choices: Sequence[Alternative] = ()) -> PlanView:
        """Return the view of a plan that was made from `facts`."""
        schedule, costs = planned.schedule, planned.costs
        seconds = planned.stage_seconds
        stages = tuple(
            StageView(
                stage,
                worker,
                layers,
                sum(layer.parameters for layer in facts.layers[slice(*layers)]),
                seconds[stage],
                planned.memory[worker],
                planned.limits[worker],
                planned.recompute[stage],
            )
            for stage, (worker, layers) in enumerate(
                zip(schedule.placement.owners, ranges(planned.balance), strict=True)
            )
        )
        return PlanView(
            planned,
            facts.samples,
            facts.batch_samples
            or facts.samples * schedule.microbatches * schedule.placement.replicas,
            facts.measured,
            stages,
            timeline(schedule, costs),
            tuple(choices),
        )

    def samples_per_second(self, planned: Planned) -> float:
        """Return the samples of this plan's mini-batch that a plan trains on in a second."""
        seconds = planned.step_seconds
        return self.samples / seconds if seconds else 0.0

    def is_chosen(self, choice: Alternative) -> bool:
        """Return whether a choice is this plan."""
        planned = self.planned
        return (choice.name, choice.request.workers, choice.virtual_stages) == (
            planned.name,
            planned.schedule.placement.workers,
            planned.virtual_stages,
        )

    @property
    def title(self) -> str:
        """The plan in a line: stages, micro-batches, schedule."""
        return title_of(self.planned.schedule)

    @property
    def rows(self) -> tuple[str, ...]:
        """A label for each worker: the stages that it holds."""
        return labels_of(self.planned.schedule)


def title_of(schedule: Schedule) -> str:
    """Return a schedule in a line: stages, micro-batches and its name."""
    stages, workers = schedule.placement.stages, schedule.placement.workers
    on = "" if workers == stages else f" on {plural(workers, 'worker')}"
    count = plural(schedule.microbatches, "micro-batch")
    return f"{plural(stages, 'stage')}{on}, {count}, {schedule.name}"


def labels_of(schedule: Schedule) -> tuple[str, ...]:
    """Return a label for each worker of a schedule: the stages that it holds."""
    held = schedule.placement.held
    return tuple(
        held_text(some) if len(some) < 4 else f"stages {some[0]} … {some[-1]}" for some in held
    )
