"""The result of the planner: how a network's layers are divided and in which order they run."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Costs, Timing


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan for a network, with the step time and the memory that it predicts.

    Attributes:
        schedule: the checked schedule of a whole mini-batch.
        order: the value of ``--schedule`` that names its order.
        balance: number of layers of each stage.
        recompute: recompute mode of each stage.
        costs: costs of each stage, as simulated.
        timing: simulated times of a step, without the update of the weights.
        update: seconds of the slowest worker's update of the weights.
        memory: predicted peak memory of each worker, in bytes.
        limits: bytes that each worker may use; None without a limit.
        why: sentences for people that say what decided the plan.
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

    @property
    def step_seconds(self) -> float:
        """The predicted duration of a step in seconds, from its first action to its update."""
        return self.timing.makespan + self.update

    @property
    def virtual_stages(self) -> int:
        """The largest number of stages that one worker holds."""
        return max(map(len, self.schedule.placement.held))
