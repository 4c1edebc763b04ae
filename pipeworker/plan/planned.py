"""The result of the planner: how a network's layers are divided and in which order they run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pipeworker.plan.actions import INPUTS, Kind
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Costs, Timing
from pipeworker.plan.text import name_of


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds for which a stage computes in a step, by the kind of its actions."""

    forward: float
    recompute: float
    backward: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.forward + self.recompute + self.backward


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan for a network, with the step time and the memory that it predicts.

    Attributes:
        schedule: the checked schedule of a whole mini-batch.
        order: the value of ``--schedule`` that gives its order: a name, or a text.
        balance: number of layers of each stage.
        recompute: recompute mode of each stage.
        costs: costs of each stage, as simulated.
        timing: simulated times of a step, without the update of the weights.
        update: seconds of the slowest worker's update of the weights.
        memory: predicted peak memory of each worker, in bytes.
        limits: bytes that each worker may use; None without a limit.
        why: sentences for people that say what decided the plan.
        lacking: what does not fit into the memory, as a sentence; "" if all does.
    """

    schedule: Schedule
    order: str
    balance: tuple[int, ...]
    recompute: tuple[str, ...]
    costs: Costs
    timing: Timing
    update: float
    memory: tuple[int, ...]
    limits: tuple[int | None, ...]
    why: tuple[str, ...] = ()
    lacking: str = ""

    @property
    def name(self) -> str:
        """The name of its order."""
        return name_of(self.order)

    @property
    def step_seconds(self) -> float:
        """The predicted duration of a step in seconds, from its first action to its update."""
        return self.timing.makespan + self.update

    @property
    def stage_seconds(self) -> tuple[StageSeconds, ...]:
        """The seconds that each stage computes in a step, by kind of work."""
        counts = Counter((a.kind, a.stage) for actions in self.schedule.workers for a in actions)

        def seconds(stage: int, *kinds: Kind) -> float:
            return sum(counts[kind, stage] * self.costs.of(kind, stage) for kind in kinds)

        return tuple(
            StageSeconds(
                seconds(stage, Kind.FORWARD),
                seconds(stage, Kind.RECOMPUTE),
                seconds(stage, *INPUTS, Kind.BACKWARD_WEIGHT),
            )
            for stage in range(self.schedule.placement.stages)
        )

    @property
    def fits(self) -> bool:
        """Whether each worker stays within its limit."""
        pairs = zip(self.memory, self.limits, strict=True)
        return all(limit is None or memory <= limit for memory, limit in pairs)

    @property
    def virtual_stages(self) -> int:
        """The largest number of stages that one worker holds."""
        return max(map(len, self.schedule.placement.held))
