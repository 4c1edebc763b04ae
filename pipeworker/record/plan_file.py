"""The file ``plan.json`` of a run: the layers of its stages, and the facts behind them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pipeworker.errors import UnreadableFile
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.record.files.bounded_file import read_json
from pipeworker.record.rundir import RunDir

_MOST_BYTES = 64 << 20
_MOST_LAYERS = 1_000_000


class _Stage(msgspec.Struct):
    stage: int
    layers: tuple[int, int]
    replica: int = 0


class _Content(msgspec.Struct):
    stages: list[_Stage] = []
    actions: list[str] = []
    facts: NetworkFacts | None = None


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The plan of a run, as its directory records it.

    Attributes:
        ranges: the layers of each stage, half-open; empty if only the facts were asked for.
        schedule: the text of its schedule.
        facts: from which it was planned; None if it was divided without any.
    """

    ranges: tuple[tuple[int, int], ...]
    schedule: str
    facts: NetworkFacts | None

    @staticmethod
    def read(run_dir: RunDir) -> PlanFile:
        """Read the file, which anybody may have changed.

        Raises:
            FileNotFoundError: the run has no plan yet.
            UnreadableFile: it is not the plan of a run.
        """
        why = "it is not the plan of a run"
        content = msgspec.convert(
            read_json(run_dir.plan, _Content, why, most=_MOST_BYTES), _Content
        )
        stages = sorted((one for one in content.stages if not one.replica), key=lambda s: s.stage)
        ranges = tuple(one.layers for one in stages)
        ends = [0, *(stop for _, stop in ranges)]
        follow = [first for first, _ in ranges] == ends[:-1] and ends == sorted({*ends})
        if not follow or ends[-1] > _MOST_LAYERS:
            raise UnreadableFile(run_dir.plan, "the layers of its stages do not follow each other")
        if content.facts is not None and not content.facts.is_possible:
            raise UnreadableFile(run_dir.plan, "its facts have a number that no layer has")
        return PlanFile(ranges, "\n".join(content.actions), content.facts)

    @property
    def balance(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(stop - first for first, stop in self.ranges)
