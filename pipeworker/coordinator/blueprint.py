"""What is decided once, before the first step: who owns what, and by which schedule it runs. Pure.

The schedule of a mini-batch depends on its number of micro-batches alone; each is built and proven
when it is first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeworker.coordinator.effects import Planned, StagePlan
from pipeworker.errors import UsageError
from pipeworker.job.options import Options
from pipeworker.plan import partition, schedule, skips, ties
from pipeworker.plan.proof import Proof, prove
from pipeworker.plan.schedule import Edge, Schedule
from pipeworker.plan.skips import Skip
from pipeworker.plan.ties import Tie
from pipeworker.wire.messages import Described, Hello, Plan, Ready, SkipRoute, TiedWeights


@dataclass(slots=True)
class Blueprint:
    """A job's division into stages.

    Attributes:
        ranges: each stage's layers, from the first to before the second number.
        skips: skip connections between stages, and within one.
        ties: weights with several places, each with the stages of the places.
    """

    options: Options
    ranges: tuple[tuple[int, int], ...]
    skips: tuple[Skip, ...]
    ties: tuple[Tie, ...]
    _edges: tuple[Edge, ...] = ()
    _schedules: dict[int, tuple[Schedule, Proof]] = field(default_factory=dict)

    @staticmethod
    def draw(options: Options, described: Sequence[Described]) -> Blueprint:
        """Divide the model that the workers described.

        Raises:
            UsageError: they do not agree, or it cannot be divided as the options ask.
        """
        if len({d.layers for d in described}) > 1:
            raise UsageError(
                "model() gave different layers on different workers: it must depend on nothing but "
                "the job file, its arguments and the seed"
            )
        if len({d.weights for d in described}) > 1:
            raise UsageError(
                "the model's initial weights differ from rank to rank: give model as a function, "
                "which is called under the job's seed, or seed torch before you build it"
            )
        layers, stages = len(described[0].layers), options.stages
        balance = options.balance or partition.even(layers, stages)
        partition.check_balance(balance, layers, stages)
        ranges = partition.ranges(balance)
        between_layers = [Skip(s.source, s.target, s.name) for s in described[0].skips]
        found = Blueprint(
            options,
            ranges,
            skips.between_stages(between_layers, ranges),
            ties.placed([Tie(t.names) for t in described[0].ties], ranges),
        )
        found._edges = schedule.edges(found.schedule(options.microbatches)[0])
        return found

    def schedule(self, microbatches: int) -> tuple[Schedule, Proof]:
        """The proven schedule for a mini-batch of so many micro-batches."""
        if microbatches not in self._schedules:
            options = self.options
            built = schedule.build(
                options.schedule,
                options.stages,
                microbatches,
                options.recompute,
                skips.pairs(self.skips),
                ties.pairs(self.ties),
            )
            self._schedules[microbatches] = built, prove(built)
        return self._schedules[microbatches]

    def reasons(self) -> list[str]:
        """What was decided, for the log."""
        built, _ = self.schedule(self.options.microbatches)
        balance = tuple(stop - first for first, stop in self.ranges)
        return [
            f"balance {balance} of {self.ranges[-1][1]} layers; schedule {built.name} is proven",
            *(f"tied: {' = '.join(tie.names)}" for tie in self.ties),
            *(f"skip {s.name!r} from stage {s.source} to {s.target}" for s in self.skips),
        ]

    def plan(self, rank: int) -> Plan:
        """What the worker of this rank is told."""
        return Plan(
            rank,
            self.options.stages,
            *self.ranges[rank],
            tuple(str(edge) for edge in self._edges if rank in (edge.source, edge.target)),
            tuple(
                SkipRoute(skip.source, skip.target, skip.name)
                for skip in self.skips
                if rank in (skip.source, skip.target)
            ),
            tuple(TiedWeights(tie.names, tie.stages) for tie in self.ties if rank in tie.stages),
        )

    def planned(self, workers: Sequence[tuple[Hello, Ready]]) -> Planned:
        """The record of it, once every stage is built; `workers` by rank."""
        stages = tuple(
            StagePlan(layers, r.layers, r.parameters, r.device, hello.host, hello.pid)
            for layers, (hello, r) in zip(self.ranges, workers, strict=True)
        )
        built, proof = self.schedule(self.options.microbatches)
        return Planned(stages, proof, built)
