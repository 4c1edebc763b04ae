"""Where the time of steps went: what each worker computed, and why it was idle. Pure.

A step begins for all workers when the first of them receives its command, and ends when the first
of them receives the next one. What a worker waited is explained by the simulation that planned the
schedule: with the measured costs spread evenly over the stages its idle time is what the schedule
costs (*fill and drain*); what the stages' own costs add is *imbalance*. Of a longer wait, as much
is *data* as ``data()`` delayed the first stage, and as much of the rest is *coordinator* as the
first stage received its command after the worker did. A *transfer* is the time from a send to the
end of its receive, and what sends themselves take unless the channel is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import RECEIVES, REPLICAS, SENDS, Kind
from pipeworker.plan.planned import Planned
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Costs, simulate
from pipeworker.trace.mini_batches import MiniBatch, costs_of, recoveries, schedule_of
from pipeworker.trace.recorder import UPDATE
from pipeworker.trace.timeline import Command, WorkerLife
from pipeworker.trace.waits import Waits

FILL_DRAIN, IMBALANCE, TRANSFER, DATA = "fill_drain", "imbalance", "transfer", "data"
COORDINATOR, CHECKPOINT, RECOVERY, OTHER = "coordinator", "checkpoint", "recovery", "other"
CAUSES = (FILL_DRAIN, IMBALANCE, TRANSFER, DATA, COORDINATOR, CHECKPOINT, RECOVERY, OTHER)
PARTS = ("forward", "recompute", "backward", "optimizer")
"""What a worker computes."""
_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(slots=True)
class WorkerTime:
    """The seconds of a worker, idle ones by cause, which add up to those of the steps."""

    worker: int
    stages: tuple[int, ...]
    replica: int = 0
    forward: float = 0.0
    recompute: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    idle: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    @property
    def computing(self) -> float:
        """The seconds in which it computed gradients or updated weights."""
        return self.forward + self.recompute + self.backward + self.optimizer

    @property
    def parts(self) -> dict[str, float]:
        """All seconds, by what it computed and by why it was idle."""
        return {part: getattr(self, part) for part in PARTS} | self.idle


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The use of the time of some steps.

    Of their seconds the job was `suspended` for some, as by a batch system; they are among those of
    other causes. Workers are by rank.
    """

    seconds: float
    steps: tuple[int, ...]
    workers: tuple[WorkerTime, ...]
    suspended: float = 0.0

    @property
    def mean(self) -> dict[str, float]:
        """The mean seconds of the workers, by part."""
        names, all_parts = (*PARTS, *CAUSES), [time.parts for time in self.workers]
        return {name: sum(parts[name] for parts in all_parts) / len(all_parts) for name in names}


def breakdown(
    lives: Sequence[WorkerLife],
    chosen: Sequence[MiniBatch],
    between: str = COORDINATOR,
    suspended: float = 0.0,
) -> Breakdown:
    """Return where the time of some of the mini-batches went that are recorded.

    `between` is the cause of the time between two commands. For `suspended` seconds the job was
    suspended in other mini-batches, see :func:`undisturbed`.
    """
    explained = _Explained(chosen)
    workers: dict[int, WorkerTime] = {}
    total = suspended
    for one in chosen:
        total += one.end - one.begin
        waits = Waits.of(one.lives, one.commands)
        last = max(command.answered or 0.0 for command in one.commands)
        idle = explained.idle(one)
        for life, command, simulated in zip(one.lives, one.commands, idle, strict=True):
            time = workers.setdefault(life.rank, WorkerTime(life.rank, life.stages, life.replica))
            known, waited, for_replicas = _measured(time, life, command, waits)
            waited += waits.behind(life, command, last)
            outside = command.received - one.begin + one.end - last
            time.idle[between] += outside
            known += outside
            delays = waits.delays(life, command)
            known += _explain(time, waited, for_replicas, simulated, delays, between)
            time.idle[OTHER] += one.end - one.begin - known
    for time in workers.values():
        time.idle[OTHER] += suspended
    shown = {life.generation for one in chosen for life in one.lives}
    numbers = tuple(sorted({one.step for one in chosen}))
    for (before, after), begin, end in recoveries(lives):
        if min(shown) <= before and after <= max(shown):
            # The steps are a sample; they have as large a share of what happened between them.
            lost = (end - begin) * len(numbers) / (numbers[-1] - numbers[0] + 1)
            total += lost
            for time in workers.values():
                time.idle[RECOVERY] += lost
    found = tuple(workers[rank] for rank in sorted(workers))
    return Breakdown(total, numbers, found, suspended)


def _measured(
    time: WorkerTime, life: WorkerLife, command: Command, waits: Waits
) -> tuple[float, float, float]:
    """Add what a worker did in a mini-batch.

    Return its seconds, and those in which the actions waited for workers of the same replica, and
    of others.
    """
    idle, known, waited, for_replicas = time.idle, 0.0, 0.0, 0.0
    for name, begin, end in command.spans:
        known += end - begin
        if name == UPDATE:
            time.optimizer += end - begin
        else:
            idle[CHECKPOINT] += end - begin
    for span in command.actions:
        kind, took = span.action.kind, (span.end or span.begin) - span.begin
        wait = waits.within(life, span)
        took -= wait
        if kind in REPLICAS:
            for_replicas += wait
        else:
            waited += wait
        known += took
        if kind is Kind.FORWARD:
            time.forward += took
        elif kind is Kind.RECOMPUTE:
            time.recompute += took
        elif kind in _BACKWARDS:
            time.backward += took
        elif kind is Kind.LOAD:
            idle[DATA] += took
        elif kind in SENDS or kind in RECEIVES or kind in REPLICAS:
            idle[TRANSFER] += took
        else:
            known -= took
    return known, waited, for_replicas


def _explain(
    time: WorkerTime,
    waited: float,
    for_replicas: float,
    simulated: tuple[float, float],
    delays: tuple[float, float],
    between: str,
) -> float:
    """Add what a worker waited in a mini-batch, by cause; return the seconds that have one.

    Args:
        time: the seconds of the worker so far.
        waited: for workers of its replica.
        for_replicas: for those of others, which is data or else a transfer.
        simulated: the idle seconds with even costs, and with those measured.
        delays: those of :meth:`Waits.delays`.
        between: the cause of the second of them.
    """
    (even, own), (by_data, by_command), idle = simulated, delays, time.idle
    longer = max(0.0, waited - own)
    data = min(longer, by_data)
    late = min(longer - data, by_command)
    left = waited - data - late
    fill = min(left, even)
    imbalance = min(left - fill, max(0.0, own - even))
    of_replicas = min(for_replicas, by_data - data)
    idle[FILL_DRAIN] += fill
    idle[IMBALANCE] += imbalance
    idle[DATA] += data + of_replicas
    idle[TRANSFER] += for_replicas - of_replicas
    idle[between] += late
    return fill + imbalance + data + for_replicas + late


class _Explained:
    """The idle times of simulated schedules, with even costs and with those measured."""

    def __init__(self, chosen: Sequence[MiniBatch]) -> None:
        self._costs = {
            replica: costs_of(chosen, replica)
            for replica in {life.replica for one in chosen for life in one.lives}
        }
        self._idle: dict[tuple[int, Schedule], Sequence[tuple[float, float]]] = {}

    def idle(self, one: MiniBatch) -> list[tuple[float, float]]:
        """Return each worker's idle seconds with even costs, and with those measured."""
        replicas = [life.replica for life in one.lives]
        found = {replica: iter(self._of_replica(one, replica)) for replica in {*replicas}}
        return [next(found[replica]) for replica in replicas]

    def _of_replica(self, one: MiniBatch, replica: int) -> Sequence[tuple[float, float]]:
        """Return the same of the workers of one replica."""
        schedule = schedule_of(one, replica)
        key = replica, schedule  # replicas with one schedule may have other costs
        if key not in self._idle:
            measured = self._costs[replica]
            self._idle[key] = ((0.0, 0.0),) * len(schedule.workers)
            with suppress(ScheduleError, IndexError):  # of another version, or of no worker's
                even, own = simulate(schedule, evened(measured)), simulate(schedule, measured)
                pairs = zip(even.idle, own.idle, strict=True)
                self._idle[key] = [(sum(a.values()), sum(b.values())) for a, b in pairs]
        return self._idle[key]


def evened(costs: Costs) -> Costs:
    """Return the same costs spread evenly over the stages."""
    stages = len(costs.forward)
    forward, backward, backward_input = (
        (sum(each) / stages,) * stages
        for each in (costs.forward, costs.backward, costs.backward_input)
    )
    return Costs(forward, backward, backward_input)


def planned_breakdown(planned: Planned, mini_batches: int) -> Breakdown:
    """Return where a plan predicts that the time of one step goes, of so many mini-batches."""
    schedule, costs = planned.schedule, planned.costs
    alone = replace(costs, transfers={}, handling=0.0)
    own, even = simulate(schedule, alone), simulate(schedule, evened(alone))
    workers, by_stage = [], planned.stage_seconds
    for worker, held in enumerate(schedule.placement.held):
        time = WorkerTime(worker, held)
        for stage in held:
            seconds = by_stage[stage]
            time.forward += mini_batches * seconds.forward
            time.recompute += mini_batches * seconds.recompute
            time.backward += mini_batches * seconds.backward
        total = mini_batches * planned.timing.makespan
        left = max(0.0, total - time.computing)
        time.optimizer = planned.update
        fill, uneven = (mini_batches * sum(one.idle[worker].values()) for one in (even, own))
        time.idle[FILL_DRAIN] = min(left, fill)
        left -= time.idle[FILL_DRAIN]
        time.idle[IMBALANCE] = min(left, max(0.0, uneven - time.idle[FILL_DRAIN]))
        time.idle[TRANSFER] = left - time.idle[IMBALANCE]
        workers.append(time)
    return Breakdown(total + planned.update, (), tuple(workers))
