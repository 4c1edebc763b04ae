"""What is decided once, before the first step: who owns what, and by which schedule it runs. Pure.

The schedule of a mini-batch depends on its number of micro-batches alone; each is built and checked
once, when the first mini-batch of that number is announced. Each replica runs that of its own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeworker.coordinator.effects import Planned, StagePlan
from pipeworker.errors import UsageError
from pipeworker.job.options import Options
from pipeworker.plan import orders, partition, skips, ties
from pipeworker.plan.actions import Edge, format_actions
from pipeworker.plan.check import Kept, check
from pipeworker.plan.connect import forward_only
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import Schedule, between, edges
from pipeworker.plan.shares import block
from pipeworker.plan.simulate import simulate
from pipeworker.plan.skips import Skip
from pipeworker.plan.ties import Tie
from pipeworker.wire.messages.plan import Described, Plan, Ready, SkipRoute, StageRange, TiedWeights
from pipeworker.wire.messages.position import Position
from pipeworker.wire.messages.presence import Hello

_MOST_SCHEDULES = 16
"""Of mini-batches with fewer micro-batches, that are kept at once: data may have any number."""


@dataclass(slots=True)
class Blueprint:
    """A job's division into stages.

    Attributes:
        ranges: each stage's layers, from the first to before the second number.
        skips: skip connections between stages, and within one.
        ties: weights with several places, each with the stages of the places.
        evaluation: the forward-only schedule of one micro-batch.
        types: the classes that every worker knows.
        names: of the layers in the user's module.
    """

    options: Options
    placement: Placement
    ranges: tuple[tuple[int, int], ...]
    skips: tuple[Skip, ...]
    ties: tuple[Tie, ...]
    evaluation: Schedule
    types: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    _within: dict[int, list[Edge]] = field(default_factory=dict)  # a replica, by stage
    _between: dict[int, list[Edge]] = field(default_factory=dict)  # replicas, by rank
    _schedules: dict[int, tuple[Schedule, Kept]] = field(default_factory=dict)

    @staticmethod
    def draw(options: Options, placement: Placement, described: Sequence[Described]) -> Blueprint:
        """Divide the model that the workers described.

        Raises:
            UsageError: they do not agree, or it cannot be divided as the options ask.
        """
        if len({(d.layers, d.names) for d in described}) > 1:
            raise UsageError(
                "model() gave different layers on different workers: it must depend on nothing but "
                "the job file, its arguments and the seed"
            )
        if len({d.weights for d in described}) > 1:
            raise UsageError(
                "the model's initial weights differ from rank to rank: give model as a function, "
                "which is called under the job's seed, or seed torch before you build it"
            )
        ranges = partition.ranges(Blueprint.balance(options, placement, len(described[0].layers)))
        surveyed = described[placement.rank_of(0)]
        between_layers = [Skip(s.source, s.target, s.name) for s in surveyed.skips]
        between_stages = skips.between_stages(between_layers, ranges)
        evaluation = forward_only(placement, skips.pairs(between_stages))
        check(evaluation)
        found = Blueprint(
            options,
            placement,
            ranges,
            between_stages,
            ties.placed([Tie(t.names) for t in surveyed.ties], ranges),
            evaluation,
            tuple(sorted(set.intersection(*({*d.types} for d in described)))),
            surveyed.names or tuple(map(str, range(len(surveyed.layers)))),
        )
        for edge in edges(found.of_replica(options.microbatches, 0)[0]):
            for stage in {edge.source, edge.target}:
                found._within.setdefault(stage, []).append(edge)
        for edge in between(placement, deals=options.read_data == "once"):
            for replica in (edge.origin, edge.goal):
                rank = placement.rank_of(edge.source, replica)
                found._between.setdefault(rank, []).append(edge)
        return found

    @staticmethod
    def balance(options: Options, placement: Placement, layers: int) -> tuple[int, ...]:
        """How many of so many layers each stage is given.

        Raises:
            UsageError: they cannot be divided as the options ask.
        """
        chosen = options.balance or partition.even(layers, placement.stages)
        return partition.check_balance(chosen, layers, placement.stages)

    def of_replica(self, microbatches: int, replica: int) -> tuple[Schedule, Kept]:
        """What a replica runs of a mini-batch of so many micro-batches; the first has the most."""
        return self.schedule(len(block(microbatches, self.placement.replicas, replica)))

    def prepare(self, microbatches: int) -> None:
        """Make the schedules for a mini-batch of so many micro-batches."""
        for replica in range(self.placement.replicas):
            self.of_replica(microbatches, replica)

    def schedule(self, microbatches: int) -> tuple[Schedule, Kept]:
        """The checked schedule for a replica with so many micro-batches."""
        if microbatches not in self._schedules:
            options = self.options
            built = orders.arrange(
                options.schedule,
                self.placement,
                microbatches,
                options.recompute,
                skips.pairs(self.skips),
                ties.pairs(self.ties),
            )
            self._schedules[microbatches] = built, check(built)
            most = len(block(options.microbatches, self.placement.replicas, 0))
            others = [count for count in self._schedules if count != most]
            for count in others[:-_MOST_SCHEDULES]:
                del self._schedules[count]
        return self._schedules[microbatches]

    def reasons(self) -> list[str]:
        """What was decided, for the log."""
        built, _ = self.of_replica(self.options.microbatches, 0)
        balance = tuple(stop - first for first, stop in self.ranges)
        return [
            f"balance {balance} of {self.ranges[-1][1]} layers; schedule {built.name} is proven",
            *(f"tied: {' = '.join(tie.names)}" for tie in self.ties),
            *(f"skip {s.name!r} from stage {s.source} to {s.target}" for s in self.skips),
        ]

    def plan(self, rank: int) -> Plan:
        """What the worker of this rank is told."""
        placement = self.placement
        held = set(placement.stages_of(rank))
        mine = {edge for stage in held for edge in self._within.get(stage, ())}
        mine |= {*self._between.get(rank, ())}
        return Plan(
            tuple(StageRange(stage, *self.ranges[stage]) for stage in sorted(held)),
            tuple(map(str, sorted(mine))),
            tuple(
                SkipRoute(skip.source, skip.target, skip.name)
                for skip in self.skips
                if held & {skip.source, skip.target}
            ),
            tuple(TiedWeights(tie.names, tie.stages) for tie in self.ties if held & {*tie.stages}),
            format_actions(self.evaluation.workers[placement.worker_of(rank)]),
            self.types,
        )

    def named(self, weight: str) -> str:
        """A weight, as ``3.bias``, by its name in the user's module."""
        layer, _, rest = weight.partition(".")
        return f"{self.names[int(layer)]}.{rest}"

    def stage_at(self, position: Position) -> int:
        """The stage of a position's layer; -1 where it has none."""
        for stage, (first, stop) in enumerate(self.ranges):
            if first <= position.layer < stop:
                return stage
        return -1

    def planned(self, workers: Sequence[tuple[Hello, Ready]]) -> Planned:
        """The record of it, once every stage is built; `workers` by rank."""
        stages: dict[tuple[int, int], StagePlan] = {}
        for hello, ready in workers:
            for built in ready.stages:
                replica = self.placement.replica_of(hello.rank)
                stages[replica, built.stage] = StagePlan(
                    replica,
                    built.stage,
                    self.ranges[built.stage],
                    built.layers,
                    built.parameters,
                    hello.rank,
                    ready.device,
                    hello.host,
                    hello.pid,
                )
        batches = (ready.batch.microbatches for _, ready in workers if ready.batch)
        microbatches = next(batches, self.options.microbatches)
        schedule, kept = self.of_replica(microbatches, 0)
        ordered = tuple(stages[stage] for stage in sorted(stages))
        length = max(ready.length for _, ready in workers)
        return Planned(ordered, schedule, kept, simulate(schedule), microbatches, length)
