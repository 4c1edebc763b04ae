"""The peak memory of each worker, predicted from the facts of layers and the order of its actions.

A worker holds, all the time: its process, and of each of its stages the parameters, gradients,
optimizer state and buffers of channels. With the order of its actions change

- *inputs*: from the forward of a micro-batch to the end of its backward;
- *graphs*: what a forward keeps for the backward. Without recompute they are held as long as the
  input. With recompute from the second forward to the end of the backward, and for the time of the
  first forward, which builds a graph too. A split backward ends with its second part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from pipeworker.facts.layer_facts import LayerFacts, NetworkFacts
from pipeworker.plan.actions import WEIGHTS, Kind
from pipeworker.plan.planner.costs import Range
from pipeworker.plan.recompute import OFFLOAD
from pipeworker.plan.schedule import CHANNEL_CAPACITY, Schedule

_BATCHES = 2
"""Mini-batches that the worker with stage 0 holds: the present one, and the next."""


class Held(NamedTuple):
    """The number of micro-batches of which a stage holds something at one time.

    Attributes:
        inputs: inputs.
        never, always, except_first: graphs, by recompute mode.
    """

    inputs: int
    never: int
    always: int
    except_first: int

    def graphs(self, mode: str) -> int:
        """Return the number of graphs in a recompute mode; offload has three on the device."""
        if mode == OFFLOAD:
            return min(self.never, _OFFLOADED)
        return self.never if mode == "never" else self.always if mode == "always" else self[3]


_OFFLOADED = 3
"""Micro-batches on the device with offload: one is computed, one leaves and one returns."""


class StageBytes(NamedTuple):
    """The bytes of a stage: always, for each input and graph that it holds, and for a time."""

    fixed: int
    input: int
    graph: int
    working: int

    def total(self, held: Held, mode: str) -> int:
        """Return the bytes while the stage holds so many micro-batches, without `working`."""
        return self.fixed + held.inputs * self.input + held.graphs(mode) * self.graph


class LayerBytes:
    """Sums of bytes over ranges of layers.

    Args:
        facts: the facts of the layers.
        microbatches: number of micro-batches of a mini-batch.
        copies: how many copies of parameters and optimizer state are in the worker's memory:
            snapshots, where no accelerator has a memory of its own.
    """

    def __init__(self, facts: NetworkFacts, microbatches: int, copies: int = 0) -> None:
        self.facts, self._microbatches = facts, microbatches
        layers = facts.layers
        self._state = _sums(
            layers,
            lambda x: (1 + copies) * (x.parameter_bytes + x.optimizer_bytes) + x.gradient_bytes,
        )
        self._saved = _sums(layers, lambda layer: layer.saved_bytes)
        between = [
            max(layer.saved_output_bytes, following.saved_input_bytes)
            for layer, following in pairwise(layers)
        ]
        self._between = [0, *accumulate(between, initial=0)]  # entry n: before layer n

    def input(self, layer: int) -> int:
        """Return the bytes of the input of the stage that begins with a layer."""
        return self.facts.layers[layer - 1].output_bytes if layer else self.facts.input_bytes

    def state(self, layers: Range) -> int:
        """Return the bytes of parameters, gradients and optimizer state."""
        return self._state[layers[1]] - self._state[layers[0]]

    def graph(self, layers: Range) -> int:
        """Return the bytes that the graph of a micro-batch keeps, with the stage's output."""
        first, stop = layers
        inner = self._between[stop] - self._between[first + 1]
        output = self.facts.layers[stop - 1]
        return (
            self._saved[stop]
            - self._saved[first]
            + inner
            + max(output.output_bytes, output.saved_output_bytes)
        )

    def stage(self, layers: Range) -> StageBytes:
        """Return the bytes of a stage.

        A stage receives into a buffer for each input that it holds, and into CHANNEL_CAPACITY more
        ahead of need; gradients likewise.
        """
        first, stop = layers
        facts, ahead = self.facts, min(CHANNEL_CAPACITY, self._microbatches)
        is_first, is_last = first == 0, stop == len(facts.layers)
        value = self.input(first)
        fixed, held = self.state(layers), 0
        if is_first:
            # All micro-batches are parts of the mini-batch.
            fixed += _BATCHES * self._microbatches * (value + facts.target_bytes)
        else:
            fixed += ahead * value
            held += value
        if is_last and not is_first:
            fixed += ahead * facts.target_bytes
            held += facts.target_bytes
        if not is_last:
            output = facts.layers[stop - 1]
            fixed += (ahead + 1) * output.output_bytes * output.passes_gradient
        for skip in facts.skips:
            if first <= skip.target < stop and skip.source < first:
                fixed += ahead * skip.bytes
                held += skip.bytes
        for tie in facts.ties:
            if (first <= tie.source < stop) is not (first <= tie.target < stop):
                fixed += tie.bytes
        working = max([layer.working_bytes for layer in facts.layers[first:stop]])
        return StageBytes(fixed, held, self.graph(layers), working)


Moments = tuple[tuple[Held, ...], ...]
"""For each moment at which a worker may hold most, what it holds of each of its stages."""


def moments(schedule: Schedule) -> list[Moments]:
    """Return, by worker, what it holds at the moments at which it may hold most.

    A moment at which it holds no more of anything than at another is left out. If the schedule
    recomputes every micro-batch, and splits no backward, the result is for any recompute mode; else
    only for ``always``, which then stands for the schedule as it is.
    """
    return [_moments(schedule, worker) for worker in range(schedule.placement.workers)]


def _moments(schedule: Schedule, worker: int) -> Moments:
    actions, held = schedule.workers[worker], schedule.placement.held[worker]
    again = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.RECOMPUTE}
    now = {stage: [0, 0, 0, 0] for stage in held}
    found: dict[tuple[tuple[int, ...], ...], None] = {}

    def note() -> None:
        found[tuple(tuple(now[stage]) for stage in held)] = None

    for kind, stage, m, _ in actions:
        counts = now.get(stage)
        if counts is None:
            continue
        if kind is Kind.FORWARD:
            kept = (stage, m) not in again
            counts[0] += 1
            counts[1] += 1
            counts[2] += 1
            counts[3] += 1
            note()
            counts[2] -= not kept
            counts[3] -= not kept and m != 0
        elif kind is Kind.RECOMPUTE:
            counts[2] += 1
            counts[3] += m != 0
            note()
        elif kind in WEIGHTS:
            for at in range(4):
                counts[at] -= 1
    return tuple(tuple(Held(*counts) for counts in moment) for moment in _most(found))


def _most(moments: Iterable[tuple[tuple[int, ...], ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Return the moments that no other one exceeds in everything."""
    flat = sorted({sum(moment, ()): moment for moment in moments}.items(), reverse=True)
    kept: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = []
    for numbers, moment in flat:
        if not any(all(a >= b for a, b in zip(k, numbers, strict=True)) for k, _ in kept):
            kept.append((numbers, moment))
    return [moment for _, moment in kept]


def peak(base: int, moments: Moments, stages: Sequence[StageBytes], modes: Sequence[str]) -> int:
    """Return the peak bytes of a worker.

    Args:
        base: bytes of the process without layers.
        moments: what the worker holds when it holds most.
        stages: bytes of each of its stages.
        modes: recompute mode of each of its stages.
    """
    most = 0
    for moment in moments:
        held = zip(stages, moment, modes, strict=True)
        most = max(most, sum([stage.total(counts, mode) for stage, counts, mode in held]))
    return base + most + max([stage.working for stage in stages])


def _sums(layers: Sequence[LayerFacts], value: Callable[[LayerFacts], int]) -> tuple[int, ...]:
    return tuple(accumulate(map(value, layers), initial=0))
