"""Schedules without a model: a step of equal stages, in units of a forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeworker.display.plan.svg import Picture
from pipeworker.display.plan.text import Paint, plain, timeline_lines
from pipeworker.display.plan.view import labels_of, title_of
from pipeworker.display.text import table
from pipeworker.plan.check import check
from pipeworker.plan.columns import columns_of, peak_graphs
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Costs, Timing, simulate, timeline


@dataclass(frozen=True, slots=True)
class EqualStages:
    """A schedule whose workers have equal parts of a network, and what a step of it costs.

    A forward of a worker's part takes 1 and its backward 2, whatever the number of its stages.

    Attributes:
        held: the most micro-batches of which a worker keeps a graph at once; a micro-batch counts
            by its share of the worker's stages.
    """

    schedule: Schedule
    costs: Costs
    timing: Timing
    held: float

    @staticmethod
    def of(schedule: Schedule) -> EqualStages:
        """Return the costs of a schedule, which is checked.

        Raises:
            ScheduleError: it cannot run.
        """
        placement = schedule.placement
        share = placement.workers / placement.stages
        costs = Costs.even(placement.stages, share, 2 * share)
        check(schedule)
        graphs = [
            peak_graphs(columns_of(actions), stages, len(actions))
            for actions, stages in zip(schedule.workers, placement.held, strict=True)
        ]
        return EqualStages(schedule, costs, simulate(schedule, costs), max(graphs) * share)

    def lines(self, width: int, paint: Paint = plain) -> Iterator[str]:
        """Yield the schedule and its timeline in `width` columns, coloured by `paint`."""
        schedule = self.schedule
        yield f"{title_of(schedule)}, bubble {self.timing.bubble:.1%}"
        yield "equal stages: a worker's forward takes 1, its backward 2"
        yield ""
        spans = timeline(schedule, self.costs)
        yield from timeline_lines(labels_of(schedule), spans, width, paint)

    def picture(self) -> Picture:
        """Return the picture of a step."""
        schedule = self.schedule
        return Picture(
            title_of(schedule),
            labels_of(schedule),
            timeline(schedule, self.costs),
            self.timing.bubble,
            timed=False,
        )


def side_by_side(found: Mapping[str, EqualStages | str]) -> list[str]:
    """Return a table of schedules by name; a text is the reason why one cannot run."""
    rows = [["schedule", "stages a worker", "step", "bubble", "micro-batches held", ""]]
    for name, one in found.items():
        if isinstance(one, str):
            rows.append([name, "-", "-", "-", "-", one])
            continue
        rows.append(
            [
                name,
                str(max(map(len, one.schedule.placement.held))),
                _units(one.timing.makespan),
                f"{one.timing.bubble:.1%}",
                _units(one.held),
                "",
            ]
        )
    return table(rows, right=range(1, 5))


def _units(value: float) -> str:
    """Format a number with four significant digits; a large one without decimals."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
