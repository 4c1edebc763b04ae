"""A division of layers into stages, judged: its step time, and by how much memory it exceeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import ceil
from typing import NamedTuple

from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.plan import frozen
from pipeworker.plan.actions import Action, Edge, Kind
from pipeworker.plan.orders import Order
from pipeworker.plan.partition import cuts, even, ranges
from pipeworker.plan.placement import Placement
from pipeworker.plan.planner.costs import (
    LayerCosts,
    Range,
    Seconds,
    edge_bytes,
    stage_pairs,
)
from pipeworker.plan.planner.memory import (
    Ends,
    LayerBytes,
    Moments,
    StageBytes,
    moments,
    moments_of,
    peak,
)
from pipeworker.plan.planner.step_graph import Path, StepGraph
from pipeworker.plan.recompute import OFFLOAD
from pipeworker.plan.schedule import CHANNEL_CAPACITY, Pairs, Schedule

MODES = ("never", "except_first", "always")
"""The recompute modes that ``auto`` chooses from, the fastest first. Offload keeps three graphs on
the device, and so needs no less memory than recompute, which keeps one."""
MAX_GRAPHS = 20
"""Graphs of steps that are kept at once."""
_MOST_RUNS = 4
"""The runs of a worker's stages whose modes are chosen apart: 81 choices."""


class Judged(NamedTuple):
    """A balance, with its recompute modes; the smaller one in this order is the better one.

    Attributes:
        excess: the most bytes by which a worker exceeds its limit.
        total: these bytes, added up over the workers.
        seconds: simulated seconds of a step, with the update of the weights.
        modes: recompute mode of each stage.
        path: a longest path through the step.
    """

    excess: int
    total: int
    seconds: float
    balance: tuple[int, ...]
    modes: tuple[str, ...]
    path: Path


class Divisions:
    """The divisions of a network's layers into the stages of a placement, under an order.

    Args:
        facts: the facts of the network and of the workers.
        order: the order in which the stages run.
        placement: which worker holds which stages.
        microbatches: number of micro-batches of a mini-batch.
        recompute: the recompute mode of each stage; empty to choose the fastest that fit.

    Raises:
        UsageError: there are fewer layers than stages, or they share buffers.
    """

    def __init__(
        self,
        facts: NetworkFacts,
        order: Order,
        placement: Placement,
        microbatches: int,
        recompute: Sequence[str] = (),
    ) -> None:
        self.facts, self.order, self.placement = facts, order, placement
        self.microbatches, self.recompute = microbatches, tuple(recompute)
        self.layers, self.stages = len(facts.layers), placement.stages
        self.cuts = cuts(self.layers, facts.shared_buffers)
        """The layers before which a stage may end."""
        self.even = even(
            self.layers, self.stages, self.stages // placement.workers, facts.shared_buffers
        )
        self.costs = LayerCosts(facts)
        self.bytes = LayerBytes(facts, microbatches)
        self.limits = facts.limits or (None,) * placement.workers
        self.speeds = facts.speeds or (1.0,) * placement.workers
        self._lines: dict[int, tuple[object, tuple[Action, ...]]] = {}
        """By worker, its actions in the schedule that was built last, and what they depend on."""
        schedule = self._built((), (), (MODES[-1],) * self.stages, ())
        self.moments = moments(schedule)
        self._ends = _ends_of(placement, self.moments, microbatches)
        self.splits = any(
            a.kind is Kind.BACKWARD_INPUT for order in schedule.workers for a in order
        )
        """Whether the order depends on what is recomputed: where backwards are split, the weight
        part of a recomputed micro-batch is not deferred."""
        whole = [index for index, layer in enumerate(facts.layers) if not layer.splits]
        self.unsplit = whole[0] if self.splits and whole else None
        """The first layer whose backward the order splits and which cannot be split, if any."""
        self._split_moments: dict[tuple[int, tuple[str, ...]], Moments] = {}
        first = StepGraph(schedule, handles=facts.handling > 0)
        self._graphs: dict[tuple[Pairs, Pairs, tuple[str, ...], tuple[int, ...]], StepGraph] = {
            ((), (), (MODES[-1],) * self.stages, ()): first
        }
        self._front = frozen.front(facts.frozen, self.layers + 1)
        """The number of frozen layers at the front of the network."""
        self.nodes = len(first)
        """The size of the step's graph: the time of one judgement is proportional to it."""
        self.judged: dict[tuple[int, ...], Judged] = {}
        self._stages: dict[tuple[int, Range], tuple[Seconds, StageBytes]] = {}
        self._fits: dict[tuple[int, tuple[Range, ...]], tuple[tuple[str, ...], int, int]] = {}
        self.has_transfers = bool(facts.latency or facts.seconds_per_byte or facts.handling)

    def frozen(self, divided: Sequence[Range]) -> tuple[int, ...]:
        """Return the stages that have nothing to train."""
        return frozen.stages(self.facts.frozen, divided) if self.facts.frozen else ()

    def stage(self, stage: int, layers: Range) -> tuple[Seconds, StageBytes]:
        """Return the seconds and bytes of a stage with these layers."""
        found = self._stages.get((stage, layers))
        if found is None:
            speed, ends = self.speeds[self.placement.owners[stage]], self._ends[stage]
            if layers[1] <= self._front and stage < self.stages - 1:
                ends = ends._replace(has_backward=False)
            found = self.costs.seconds(layers, speed), self.bytes.stage(layers, ends)
            self._stages[stage, layers] = found
        return found

    def fit(self, worker: int, held: Sequence[Range]) -> tuple[tuple[str, ...], int, int]:
        """Return the modes of a worker's stages, its peak bytes, and by how many it exceeds.

        Of the modes that fit, those that recompute the least. If none fit, those of the lowest
        peak.
        """
        key = worker, tuple(held)
        found = self._fits.get(key)
        if found is None:
            found = self._fits[key] = self._fit(worker, held)
        return found

    def _fit(self, worker: int, held: Sequence[Range]) -> tuple[tuple[str, ...], int, int]:
        numbers, limit = self.placement.held[worker], self.limits[worker]
        stages = [self.stage(s, layers) for s, layers in zip(numbers, held, strict=True)]
        sizes = [size for _, size in stages]
        least: tuple[tuple[str, ...], int, int] | None = None
        for modes in self._options(numbers, [seconds.forward for seconds, _ in stages]):
            used = self._peak(worker, sizes, modes)
            excess = 0 if limit is None else max(0, used - limit)
            if least is None or excess < least[2]:
                least = modes, used, excess
            if not excess:
                break
        assert least
        return least

    def _options(
        self, numbers: Sequence[int], forwards: Sequence[float]
    ) -> Iterator[tuple[str, ...]]:
        """Yield the modes that a worker's stages may have, by the seconds that they add.

        Many stages are divided into runs that have one mode, because the number of their modes is
        a power of their number.
        """
        if self.recompute:
            yield tuple(self.recompute[number] for number in numbers)
            return
        count = len(numbers)
        yield (MODES[0],) * count  # which adds nothing
        again = dict(zip(MODES, (0, self.microbatches - 1, self.microbatches), strict=True))

        def added(modes: Sequence[str]) -> float:
            return sum(again[mode] * seconds for mode, seconds in zip(modes, forwards, strict=True))

        run = ceil(count / _MOST_RUNS)
        chosen = product(MODES, repeat=ceil(count / run))
        options = [tuple(mode for mode in modes for _ in range(run))[:count] for modes in chosen]
        yield from sorted(options, key=added)[1:]  # stable: the first of equal ones is first

    def peak(self, worker: int, held: Sequence[Range], modes: Sequence[str]) -> int:
        """Return the peak bytes of a worker with these layers in its stages; modes are theirs."""
        numbers = self.placement.held[worker]
        sizes = [self.stage(s, layers)[1] for s, layers in zip(numbers, held, strict=True)]
        return self._peak(worker, sizes, modes)

    def _peak(self, worker: int, sizes: Sequence[StageBytes], modes: Sequence[str]) -> int:
        if not self.splits:
            return peak(self.facts.base_bytes, self.moments[worker], sizes, modes)
        counted = [mode if mode in ("never", OFFLOAD) else MODES[-1] for mode in modes]
        return peak(self.facts.base_bytes, self._moments_of(worker, modes), sizes, counted)

    def _moments_of(self, worker: int, modes: Sequence[str]) -> Moments:
        """Return the moments of a worker in these modes of its stages, for an order that splits."""
        key = worker, tuple(modes)
        if key not in self._split_moments:
            by_stage, held = [""] * self.stages, self.placement.held[worker]
            for stage, mode in zip(held, modes, strict=True):
                by_stage[stage] = mode
            line = self.order.line(worker, self.placement, self.microbatches, by_stage)
            self._split_moments[key] = moments_of(line, held)
        return self._split_moments[key]

    def judge(self, balance: tuple[int, ...]) -> Judged:
        """Return the step time of a balance under the best recompute modes."""
        known = self.judged.get(balance)
        if known is None:
            excesses, modes, works, transfers, update = self._prepare(balance)
            seconds, path = self._graph(balance, modes).longest(works, transfers)
            known = Judged(max(excesses), sum(excesses), seconds + update, balance, modes, path)
            self.judged[balance] = known
        return known

    def _prepare(
        self, balance: tuple[int, ...]
    ) -> tuple[list[int], tuple[str, ...], list[float], Mapping[Edge, float], float]:
        """Return the excess of each worker, the modes, all costs, and the slowest update."""
        divided = ranges(balance)
        modes = [""] * self.stages
        excesses, update = [], 0.0
        for worker, numbers in enumerate(self.placement.held):
            chosen, _, over = self.fit(worker, [divided[n] for n in numbers])
            excesses.append(over)
            for number, mode in zip(numbers, chosen, strict=True):
                modes[number] = mode
            own = sum([self.stage(number, divided[number])[0].update for number in numbers])
            update = max(update, own)
        works: list[float] = []
        for number, layers in enumerate(divided):
            works += _works(self.stage(number, layers)[0], modes[number])
        transfers: Mapping[Edge, float] = {}
        if self.has_transfers:
            sizes = edge_bytes(self.facts, divided)
            transfers = {edge: self.costs.transfer(size) for edge, size in sizes.items()}
        return excesses, tuple(modes), [*works, *(self.facts.handling,) * 2], transfers, update

    def _graph(self, balance: tuple[int, ...], modes: tuple[str, ...]) -> StepGraph:
        """Return the graph of the step; skips and ties matter where transfers take time."""
        skips, tied = self.pairs(balance) if self.has_transfers else ((), ())
        still = self.frozen(ranges(balance))
        key = skips, tied, modes if self.splits else (MODES[-1],) * self.stages, still
        graph = self._graphs.pop(key, None)
        if graph is None:
            if len(self._graphs) >= MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]  # the one that was used the longest ago
            graph = StepGraph(self._built(*key), handles=self.facts.handling > 0)
        self._graphs[key] = graph
        return graph

    def _built(
        self, skips: Pairs, ties: Pairs, modes: tuple[str, ...], frozen: tuple[int, ...]
    ) -> Schedule:
        """Return the schedule of a step; makes anew the actions of workers whose modes change.

        Most balances that are judged one after the other differ in the modes of few workers.
        """
        order, placement, count = self.order, self.placement, self.microbatches
        for worker, held in enumerate(placement.held):
            key = skips, ties, frozen, [modes[stage] for stage in held]
            if worker not in self._lines or self._lines[worker][0] != key:
                line = order.actions(worker, placement, count, modes, skips, ties, frozen)
                self._lines[worker] = key, line
        workers = tuple(self._lines[worker][1] for worker in range(placement.workers))
        return Schedule(order.name, count, placement, workers, skips, ties, frozen=frozen)

    def pairs(self, balance: tuple[int, ...]) -> tuple[Pairs, Pairs]:
        """Return the pairs of stages that skips lead between, and those that share a parameter."""
        divided = ranges(balance)
        skips = tuple(sorted(stage_pairs(self.facts.skips, divided)))
        tied = stage_pairs(self.facts.ties, divided)
        return skips, tuple(sorted({*tied, *((b, a) for a, b in tied)}))

    def peaks(self, balance: tuple[int, ...]) -> tuple[int, ...]:
        """Return the predicted peak bytes of each worker."""
        divided = ranges(balance)
        return tuple(
            self.fit(worker, [divided[n] for n in numbers])[1]
            for worker, numbers in enumerate(self.placement.held)
        )


def _ends_of(placement: Placement, moments: Sequence[Moments], microbatches: int) -> list[Ends]:
    """Return how each stage is connected to others, under the order with these moments."""
    owners, last = placement.owners, placement.stages - 1
    buffers, gradients = [0] * placement.stages, [0] * placement.stages
    for held, found in zip(placement.held, moments, strict=True):
        for place, stage in enumerate(held):
            most = max(moment[place].inputs for moment in found)
            deferred = max(1, *(moment[place].deferred for moment in found))
            buffers[stage] = min(most + CHANNEL_CAPACITY, microbatches)
            gradients[stage] = min(deferred + CHANNEL_CAPACITY, microbatches)
    apart = owners[0] != owners[last]
    return [
        Ends(
            stage > 0 and owners[stage - 1] != owners[stage],
            stage < last and owners[stage + 1] != owners[stage],
            apart,
            buffers[stage + 1] if stage < last else 0,
            buffers[last] * apart,
            gradients[stage - 1] if stage else 0,
        )
        for stage in range(placement.stages)
    ]


def _works(seconds: Seconds, mode: str) -> list[float]:
    """Return the seconds of each kind of work of a stage, as in Counts."""
    forward = seconds.forward
    return [
        forward,
        forward if mode == "always" else 0.0,
        forward if mode in ("always", "except_first") else 0.0,
        seconds.backward,
        seconds.backward_input,
        seconds.backward - seconds.backward_input,
    ]
