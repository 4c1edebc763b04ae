"""The costs of a range of layers: seconds of computing and of transfers, from measured facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from pipeworker.facts.layer_facts import LayerFacts, LayerSkip, NetworkFacts
from pipeworker.plan.actions import Edge, Payload
from pipeworker.plan.partition import stages_of_layers
from pipeworker.plan.placement import Placement
from pipeworker.plan.simulate import Costs

LOSS_FORWARD = 1 / 3
"""The share of the loss's seconds that its forward takes; a recompute runs it again."""
Range = tuple[int, int]
"""A stage's layers, as a half-open range of indices."""


class Seconds(NamedTuple):
    """Seconds of a stage for one micro-batch, and of its update."""

    forward: float
    backward: float
    backward_input: float
    update: float


class LayerCosts:
    """Sums over ranges of layers: each takes the same time, however many layers it has.

    Attributes:
        forward, backward: running sums over all layers, in seconds on a worker of speed 1; entry n
            is the sum over the first n layers.
    """

    def __init__(self, facts: NetworkFacts) -> None:
        self.facts = facts
        layers = facts.layers
        self.forward = _sums(layers, lambda layer: layer.forward)
        self.backward = _sums(layers, lambda layer: layer.backward)
        self._backward_input = _sums(layers, lambda layer: layer.backward_input)
        self._update = _sums(layers, lambda layer: layer.update)
        self._loss = facts.loss * LOSS_FORWARD, facts.loss * (1 - LOSS_FORWARD)

    def seconds(self, layers: Range, speed: float = 1.0) -> Seconds:
        """Return the seconds of a stage on a worker of a speed; the last stage has the loss.

        The first part of a split backward also computes the loss's gradient. A stage whose input
        needs no gradient has no first part.
        """
        first, stop = layers
        forward = self.forward[stop] - self.forward[first]
        backward = self.backward[stop] - self.backward[first]
        backward_input = self._backward_input[stop] - self._backward_input[first]
        if stop == len(self.facts.layers):
            forward += self._loss[0]
            backward += self._loss[1]
            backward_input += self._loss[1]
        update = self._update[stop] - self._update[first]
        return Seconds(
            forward / speed,
            backward / speed,
            # Sums of floats may exceed each other in the last bit.
            min(backward_input, backward) / speed,
            update / speed,
        )

    def transfer(self, size: int) -> float:
        """Return the seconds that a value of `size` bytes takes from worker to worker."""
        return self.facts.latency + size * self.facts.seconds_per_byte


def stage_costs(costs: LayerCosts, ranges: Sequence[Range], placement: Placement) -> Costs:
    """Return the costs of stages, with the transfers between those of different workers."""
    speeds = costs.facts.speeds or (1.0,) * placement.workers
    found = [
        costs.seconds(layers, speeds[owner])
        for layers, owner in zip(ranges, placement.owners, strict=True)
    ]
    return Costs(
        tuple(seconds.forward for seconds in found),
        tuple(seconds.backward for seconds in found),
        tuple(seconds.backward_input for seconds in found),
        transfers={e: costs.transfer(size) for e, size in edge_bytes(costs.facts, ranges).items()},
        handling=costs.facts.handling,
    )


def edge_bytes(facts: NetworkFacts, ranges: Sequence[Range]) -> Mapping[Edge, int]:
    """Return the bytes that a micro-batch sends over each channel that stages may have."""
    layers, last = facts.layers, len(ranges) - 1
    found = {Edge(0, last, Payload.TARGET): facts.target_bytes}
    for stage, (_, stop) in enumerate(ranges[:-1]):
        value = layers[stop - 1]
        found[Edge(stage, stage + 1, Payload.ACTIVATION)] = value.output_bytes
        passes = value.output_bytes if value.passes_gradient else 0
        found[Edge(stage + 1, stage, Payload.GRADIENT)] = passes
    for (source, target), size in stage_pairs(facts.skips, ranges).items():
        found[Edge(source, target, Payload.SKIP)] = size
        found[Edge(target, source, Payload.SKIP_GRADIENT)] = size
    for (source, target), size in stage_pairs(facts.ties, ranges).items():
        found[Edge(source, target, Payload.TIED)] = size
        found[Edge(target, source, Payload.TIED)] = size
    return found


def stage_pairs(
    skips: Iterable[LayerSkip], ranges: Sequence[Range]
) -> Mapping[tuple[int, int], int]:
    """Return the bytes that pass between two stages, over all connections between their layers."""
    stage_of = stages_of_layers(ranges)
    found: dict[tuple[int, int], int] = {}
    for skip in skips:
        pair = stage_of[skip.source], stage_of[skip.target]
        if pair[0] != pair[1]:
            found[pair] = found.get(pair, 0) + skip.bytes
    return found


def _sums(layers: Sequence[LayerFacts], value: Callable[[LayerFacts], float]) -> tuple[float, ...]:
    return tuple(accumulate(map(value, layers), initial=0.0))
