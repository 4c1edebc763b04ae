"""Lower bounds of the step times of balances, from paths through the step of others.

A path that was the longest for one balance is a path for every balance, with other costs. So its
duration bounds the step's from below. Between two balances that differ in few cuts only a few
stages of a path differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from pipeworker.plan.actions import Payload
from pipeworker.plan.partition import ranges
from pipeworker.plan.planner.costs import Range, Seconds
from pipeworker.plan.planner.stages import Divisions, Judged
from pipeworker.plan.planner.step_graph import COMMON, Counts, Path


def is_common(path: Path) -> bool:
    """Return whether a path is one through the step of every balance."""
    return all(edge.payload in COMMON for edge, _ in path.transfers)


class _Known(NamedTuple):
    """A path, and the seconds that it takes for the origin: all, in stages, at cuts."""

    path: Path
    total: float
    stages: list[float]
    crossings: list[tuple[int, int]]
    transfers: list[float]


class Bounds:
    """The bounds of the neighbours of a balance that fits into memory.

    Args:
        divisions: the divisions that the balance is one of.
        origin: the balance.
        paths: paths through the step of every balance with the origin's recompute modes.
    """

    def __init__(self, divisions: Divisions, origin: Judged, paths: Sequence[Path]) -> None:
        self._divisions = divisions
        self.balance, self._modes = origin.balance, origin.modes
        self._ranges = ranges(origin.balance)
        self._cuts = tuple(accumulate(origin.balance))
        self._frozen = divisions.frozen(self._ranges)
        self._known = [self._know(path, origin) for path in paths]

    def moved(self, cuts: range, step: int) -> tuple[int, ...] | None:
        """Return the balance with some neighbouring cuts moved by so many layers.

        Cut n is behind stage n. None if a stage would have no layer.
        """
        balance = list(self.balance)
        balance[cuts.start] += step
        balance[cuts.stop] -= step
        return tuple(balance) if min(balance[cuts.start], balance[cuts.stop]) >= 1 else None

    def at_least(self, cuts: range, step: int) -> float:
        """Return a bound of the balance with some cuts moved; infinite if it does not fit.

        It is 0 if a recompute mode changes, or the stages that are frozen: the actions may then be
        others.
        """
        divisions, placement = self._divisions, self._divisions.placement
        divided: dict[int, Range] = {}
        for stage in range(cuts.start, cuts.stop + 1):
            first, stop = self._ranges[stage]
            divided[stage] = first + step * (stage > cuts.start), stop + step * (stage < cuts.stop)
        if divisions.facts.frozen:
            moved = [divided.get(stage, layers) for stage, layers in enumerate(self._ranges)]
            if divisions.frozen(moved) != self._frozen:
                return 0.0
        changed: list[tuple[int, Seconds, str]] = []
        update = 0.0
        for worker in dict.fromkeys([placement.owners[stage] for stage in divided]):
            held = placement.held[worker]
            layers = [divided.get(stage, self._ranges[stage]) for stage in held]
            modes, _, excess = divisions.fit(worker, layers)
            if excess:
                return inf
            if any(mode != self._modes[s] for s, mode in zip(held, modes, strict=True)):
                return 0.0
            own = [divisions.stage(stage, r)[0] for stage, r in zip(held, layers, strict=True)]
            changed += zip(held, own, modes, strict=True)
            update = max(update, sum([seconds.update for seconds in own]))
        most = 0.0
        for known in self._known:
            total = known.total
            for stage, seconds, mode in changed:
                total += _value(known.path.stages[stage], seconds, mode) - known.stages[stage]
            if divisions.has_transfers:
                for cut in cuts:
                    total += self._transfers(known.crossings[cut], self._cuts[cut] + step)
                    total -= known.transfers[cut]
            most = max(most, total)
        return most + update

    def _know(self, path: Path, origin: Judged) -> _Known:
        divisions = self._divisions
        stages = [
            _value(path.stages[stage], divisions.stage(stage, layers)[0], origin.modes[stage])
            for stage, layers in enumerate(self._ranges)
        ]
        crossings = _crossings(path, len(self._cuts) - 1)
        transfers = [
            self._transfers(crossed, at)
            for crossed, at in zip(crossings, self._cuts[:-1], strict=True)
        ]
        total = sum(stages) + sum(transfers) + path.handled * divisions.facts.handling
        return _Known(path, total, stages, crossings, transfers)

    def _transfers(self, crossings: tuple[int, int], at: int) -> float:
        """Return the seconds of a path's transfers at a cut behind `at` layers."""
        costs = self._divisions.costs
        layer = costs.facts.layers[at - 1]
        activations, gradients = crossings
        found = activations * costs.transfer(layer.output_bytes)
        return found + gradients * costs.transfer(layer.output_bytes * layer.passes_gradient)


def _crossings(path: Path, cuts: int) -> list[tuple[int, int]]:
    """Return how often a path contains the transfer of an activation and a gradient at each cut."""
    found = [[0, 0] for _ in range(cuts)]
    for edge, count in path.transfers:
        if edge.payload is not Payload.TARGET:
            found[min(edge.source, edge.target)][edge.payload is Payload.GRADIENT] += count
    return [(activations, gradients) for activations, gradients in found]


def _value(counts: Counts, seconds: Seconds, mode: str) -> float:
    forward, first, others, backward, inputs, weights = counts
    if mode != "never":
        forward += others + (first if mode == "always" else 0)
    return (
        forward * seconds.forward
        + (backward + weights) * seconds.backward
        + (inputs - weights) * seconds.backward_input
    )


def moves(cuts: int, *, wide: bool) -> Iterable[tuple[range, int]]:
    """Yield which neighbouring cuts are moved together, and by how many layers.

    One cut is moved by up to 32 layers. With `wide`, two and more cuts are moved instead.
    """
    widths = [1 << n for n in range(1, cuts.bit_length())] if wide else [1]
    sizes = (1, 2) if wide else (1, 2, 4, 8, 16, 32)
    for width in widths:
        for first in range(cuts - width + 1):
            for size in sizes:
                yield range(first, first + width), size
                yield range(first, first + width), -size
