"""The division of a job into stages, and the schedules that it runs. Pure.

The division is decided once, before the first step. The schedule of a mini-batch depends only on
its number of micro-batches: each schedule is built and checked once, when the first mini-batch of
that number is announced. Each replica runs the schedule of its own part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pipeworker.coordinator.effects import Commit
from pipeworker.coordinator.steps.snapshots import Writing
from pipeworker.errors import ProtocolError, UsageError
from pipeworker.facts.connections import Borrowed, Skip, Tie
from pipeworker.facts.layer_names import LayerNames, layer_of, shown
from pipeworker.facts.position import Position
from pipeworker.facts.step import Batch
from pipeworker.job.options import Options
from pipeworker.plan import frozen, partition, skips, ties
from pipeworker.plan.actions import Edge, format_actions
from pipeworker.plan.check import LiveMicroBatches, check
from pipeworker.plan.connect import forward_only, lags
from pipeworker.plan.figures import plural
from pipeworker.plan.orders import Order, resolve
from pipeworker.plan.partition import block
from pipeworker.plan.placement import Placement
from pipeworker.plan.planned import Planned
from pipeworker.plan.schedule import CHANNEL_CAPACITY, Schedule, edges, replica_edges
from pipeworker.trace.sampling import Cost, cost_of
from pipeworker.wire.messages.checkpoint import Copy
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.plan import Described, Plan, Ready, StageRange
from pipeworker.wire.messages.step import Change, RunStep

_SET_ORDER = "; a set of strings has another order in each process"
_MAX_SCHEDULES = 16
"""Schedules for fewer micro-batches that are kept at once: data may have any number of them."""


@dataclass(slots=True)
class Blueprint:
    """The division of a job into stages.

    Attributes:
        ranges: each stage's layers, as a half-open pair of indices.
        skips: skip connections between stages, and within one.
        ties: tied weights, each with the stages of its places.
        evaluation: the forward-only schedule of one micro-batch.
        order: the source of its schedules.
        planned: the plan that decided them; None if no facts of the layers are known.
        names: names of the layers in the user's module.
        types: names of the classes that every worker knows.
        steps: the number of steps of the job, if its scheduler or its options say; else 0.
        hooks: names of the job file's functions that are called with what is recorded.
        frozen: the stages that have nothing to train.
    """

    options: Options
    placement: Placement
    ranges: tuple[tuple[int, int], ...]
    skips: tuple[Skip, ...]
    ties: tuple[Tie, ...]
    evaluation: Schedule
    order: Order
    recompute: tuple[str, ...]
    names: LayerNames
    types: tuple[str, ...]
    steps: int
    hooks: tuple[str, ...]
    frozen: tuple[int, ...]
    planned: Planned | None
    _edges: defaultdict[int, set[Edge]] = field(default_factory=lambda: defaultdict(set))  # by rank
    _schedules: dict[int, tuple[Schedule, LiveMicroBatches]] = field(default_factory=dict)
    _sent_microbatches: int = -1  # of the schedule that the workers have

    @staticmethod
    def draw(
        options: Options, described: Sequence[Described], planned: Planned | None
    ) -> Blueprint:
        """Divide the model that the workers described; `described` is by rank.

        Without a plan, stages are even, and all of them recompute unless an option says otherwise.

        Raises:
            UsageError: the descriptions differ, or the options do not fit the model.
        """
        if len({(d.layers, d.names) for d in described}) > 1:
            raise UsageError(
                "model(): different workers built different layers; it must depend only on the job "
                f"file, its arguments and the seed{_SET_ORDER}"
            )
        if len({d.weights for d in described}) > 1:
            raise UsageError(
                "model: the initial weights differ from rank to rank; pass it as a function, which "
                f"is called under the job's seed, or seed torch before building it{_SET_ORDER}"
            )
        layers = len(described[0].layers)
        if planned is None:
            order, placement = options.schedule_source, options.placement
            balance = Blueprint.balance(options, placement, described[placement.rank_of(0)])
            modes = (options.recompute,) * placement.stages
        else:
            order = resolve(planned.order, planned.virtual_stages)
            placement = planned.schedule.placement
            balance, modes = planned.balance, planned.recompute
        ranges = partition.ranges(balance)
        surveyed = described[placement.rank_of(0)]
        between_stages = skips.between_stages(surveyed.skips, ranges)
        pairs = skips.pairs(between_stages)
        evaluation = forward_only(placement, pairs)
        check(forward_only(placement, pairs, lags(placement)[-1] + CHANNEL_CAPACITY + 1))
        found = Blueprint(
            options,
            placement,
            ranges,
            between_stages,
            ties.placed(surveyed.ties, ranges),
            evaluation,
            order,
            modes,
            LayerNames(surveyed.names) if surveyed.names else LayerNames.numbered(layers),
            tuple(sorted(set.intersection(*({*d.types} for d in described)))),
            options.total_steps(surveyed.epoch_length),
            surveyed.hooks,
            frozen.stages(set.intersection(*({*d.frozen} for d in described)), ranges),
            planned,
        )
        schedule, _ = found.for_replica(options.microbatches, 0)
        if found.frozen:  # results of an own loop pass over the channels of gradients too
            schedule = found._build(schedule.microbatches, ())
        for edge in edges(schedule):
            for replica in range(placement.replicas):
                for stage in (edge.source, edge.target):
                    found._edges[placement.rank_of(stage, replica)].add(edge)
        for edge in replica_edges(placement, scatters_data=options.data_reader == "first"):
            for replica in (edge.origin, edge.goal):
                found._edges[placement.rank_of(edge.source, replica)].add(edge)
        return found

    @staticmethod
    def balance(options: Options, placement: Placement, model: Described) -> tuple[int, ...]:
        """Return the number of layers of each stage, for a model that a worker described.

        Raises:
            UsageError: the options do not fit the model.
        """
        layers, stages, shared = model.layers, placement.stages, model.shared_buffers
        try:
            if isinstance(options.balance, tuple):
                return partition.check_balance(options.balance, layers, stages, shared)
            return partition.even(len(layers), stages, stages // placement.workers, shared)
        except UsageError as error:
            if not options.own_loop or not shared:
                raise
            raise UsageError(
                f"{error}, or pass a sample to pipeworker.Pipeline if no forward changes the buffer"
            ) from None

    def check_resumed(self, layers: Sequence[str], step: int) -> None:
        """Raise UsageError unless the model has the layers of the checkpoint of `step`, if any."""
        names = self.names.prefixes
        if not layers or names == layers:
            return
        if len(layers) != len(names):
            difference = f"{plural(len(names), 'layer')}, and the checkpoint has {len(layers)}"
        else:
            units = zip(LayerNames(tuple(layers)).units, self.names.units, strict=True)
            changed = zip(layers, names, units, strict=True)
            old, new = next(pair for was, now, pair in changed if was != now)
            difference = f"a layer {new!r}, which is {old!r} in the checkpoint"
            if old == new:
                difference = f"other names of weights in the layer {new!r} than the checkpoint"
        raise UsageError(
            f"cannot resume from step {step}: model() has {difference}; resume with the model that "
            "was saved"
        )

    def check_built(self, ready: Ready) -> None:
        """Raise ProtocolError unless a worker has built the stages that were planned for it."""
        planned = {stage: self.ranges[stage] for stage in self.placement.stages_of(ready.rank)}
        built = {b.stage: (b.first, b.first + len(b.layers)) for b in ready.stages}
        if built != planned:
            raise ProtocolError(f"stages {built} were built instead of {planned}")

    def check_apart(self, ready: Iterable[Ready]) -> None:
        """Check that workers have built layers of one parameter only where these are tied.

        Raises:
            UsageError: layers on different stages share a parameter, or a function of the job gives
                each worker other numbers.
        """
        ready = [*ready]
        kept: dict[str, int] = {}
        for function in (one for worker in ready for one in worker.cached):
            if kept.setdefault(function.origin, function.numbers) != function.numbers:
                raise UsageError(
                    f"{function.name}() of the job: keeps parameters (functools.cache), and built "
                    "them with other random numbers on each worker, those of the first layer that "
                    "needed it; call torch.manual_seed in it, under torch.random.fork_rng, or "
                    "build a new module for each layer"
                )
        names: dict[str, set[str]] = {}
        for parameter in (one for worker in ready for one in worker.existing):
            names.setdefault(parameter.origin, set()).add(parameter.name)
        ties.check_declared(names.values(), self.ties)

    def check_borrowed(self, ready: Iterable[Ready], uses: Iterable[Borrowed]) -> None:
        """Check that no layer of another worker has a parameter that a layer or the loss uses.

        Raises:
            UsageError: one has it.
        """
        for use in uses:
            for parameter in (one for worker in ready for one in worker.existing):
                if parameter.origin == use.origin and layer_of(parameter.name) != use.layer:
                    raise ties.used_elsewhere(use.user, parameter.name)

    def for_replica(self, microbatches: int, replica: int) -> tuple[Schedule, LiveMicroBatches]:
        """Return the schedule of a replica's part of a mini-batch; replica 0 has the largest."""
        return self.schedule(len(block(microbatches, self.placement.replicas, replica)))

    def prepare(self, microbatches: int) -> None:
        """Make the schedules for a mini-batch of `microbatches` micro-batches."""
        for replica in range(self.placement.replicas):
            self.for_replica(microbatches, replica)

    def schedule(self, microbatches: int) -> tuple[Schedule, LiveMicroBatches]:
        """Return the checked schedule for a replica with `microbatches` micro-batches."""
        if microbatches not in self._schedules:
            options, built = self.options, self._build(microbatches, self.frozen)
            self._schedules[microbatches] = built, check(built)
            most = len(block(options.microbatches, self.placement.replicas, 0))
            others = [count for count in self._schedules if count != most]
            for count in others[:-_MAX_SCHEDULES]:
                del self._schedules[count]
        return self._schedules[microbatches]

    def _build(self, microbatches: int, frozen: tuple[int, ...]) -> Schedule:
        pairs = skips.pairs(self.skips), ties.pairs(self.ties)
        return self.order.build(self.placement, microbatches, self.recompute, *pairs, frozen)

    def summary(self) -> list[str]:
        """Return the decisions as lines for the log."""
        built, _ = self.for_replica(self.options.microbatches, 0)
        balance = tuple(stop - first for first, stop in self.ranges)
        return [
            f"balance {balance} of {self.ranges[-1][1]} layers; schedule {built.name} is proven",
            *(f"tied: {' = '.join(map(shown, tie.names))}" for tie in self.ties),
            *(f"skip {s.name!r} from stage {s.source} to {s.target}" for s in self.skips),
        ]

    def plan(self, rank: int) -> Plan:
        """Return the message with the stages and channels of a rank."""
        placement = self.placement
        held = set(placement.stages_of(rank))
        return Plan(
            tuple(StageRange(s, *self.ranges[s], self.recompute[s]) for s in sorted(held)),
            tuple(map(str, sorted(self._edges[rank]))),
            tuple(skip for skip in self.skips if held & {skip.source, skip.target}),
            tuple(tie for tie in self.ties if held & {*tie.stages}),
            format_actions(self.evaluation.workers[placement.worker_of(rank)]),
            placement.held,
            self.types,
            self.steps,
        )

    def cost_to_record(self, batch: Batch) -> Cost:
        """Estimate what it costs to record a mini-batch."""
        count, replicas = batch.microbatches, range(self.placement.replicas)
        return cost_of(self.for_replica(count, replica)[0] for replica in replicas)

    def run_messages(self, run: RunStep, update: Change | None, copy: Copy | None) -> list[Advance]:
        """Return one message per rank; the action list is included only if it has changed."""
        placement, count = self.placement, run.batch.microbatches
        if self._sent_microbatches == count:
            return [Advance(run, update, copy)] * placement.ranks
        self._sent_microbatches = count
        texts: dict[int, list[str]] = {}  # by micro-batches: replicas may have the same number
        messages = []
        for rank in range(placement.ranks):
            built, _ = self.for_replica(count, placement.replica_of(rank))
            if built.microbatches not in texts:
                texts[built.microbatches] = list(map(format_actions, built.workers))
            text = texts[built.microbatches][placement.worker_of(rank)]
            messages.append(Advance(replace(run, actions=text), update, copy))
        return messages

    def commit(self, written: Writing) -> Commit:
        """Return the request to complete a checkpoint that all of its ranks have written."""
        names = self.names
        return Commit(
            written.state,
            tuple(tuple(map(names.of_numbered, tie.names)) for tie in self.ties),
            names.prefixes,
            tuple(file for rank in sorted(written.files) for file in written.files[rank]),
        )

    @property
    def has_run(self) -> bool:
        """Whether the workers have been sent a schedule."""
        return self._sent_microbatches >= 0

    def stage_at(self, position: Position) -> int:
        """Return the stage of a position's layer, -1 if it has none."""
        layer, ranges = position.layer, enumerate(self.ranges)
        return next((stage for stage, (first, stop) in ranges if first <= layer < stop), -1)
