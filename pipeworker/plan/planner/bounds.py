"""Lower bounds of the step times of balances, from paths through the step of others.

A path that was the longest for one balance is a path for every balance, with other costs. So its
duration bounds the step's from below. Between two balances that differ in few cuts only a few
stages of a path differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from pipeworker.plan.actions import Payload
from pipeworker.plan.partition import ranges
from pipeworker.plan.planner.costs import Seconds
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
    """The bounds of the neighbours of the balance `origin`, which fits into memory.

    The paths lead through the step of every balance with the origin's recompute modes.
    """

    def __init__(self, divisions: Divisions, origin: Judged, paths: Sequence[Path]) -> None:
        self._divisions = divisions
        self._modes = origin.modes
        self._ranges = ranges(origin.balance)
        self._cuts = tuple(accumulate(origin.balance))
        places = {cut: place for place, cut in enumerate(divisions.cuts)}
        self._places = [places[cut] for cut in self._cuts[:-1]]
        self._frozen = divisions.frozen(self._ranges)
        self._known = [self._know(path, origin) for path in paths]

    def moved(self, cuts: range, step: int) -> tuple[int, ...] | None:
        """Return the balance with some neighbouring cuts moved over so many places for a cut.

        Cut n is behind stage n. None if a stage would have no layer.
        """
        known, end = self._places, len(self._divisions.cuts)
        before = known[cuts.start - 1] if cuts.start else -1
        after = known[cuts.stop] if cuts.stop < len(known) else end
        if known[cuts.start] + step <= before or known[cuts.stop - 1] + step >= after:
            return None
        places = [place + step * (cut in cuts) for cut, place in enumerate(known)]
        found = [0, *(self._divisions.cuts[place] for place in places), self._divisions.layers]
        return tuple(b - a for a, b in pairwise(found))

    def at_least(self, cuts: range, balance: tuple[int, ...]) -> float:
        """Return a bound of a balance in which some cuts are moved; infinite if it does not fit.

        It is 0 if a recompute mode changes, or the stages that are frozen: the actions may then be
        others.
        """
        divisions, placement = self._divisions, self._divisions.placement
        divided = ranges(balance)
        if divisions.frozen(divided) != self._frozen:
            return 0.0
        changed: list[tuple[int, Seconds, str]] = []
        update = 0.0
        for worker in dict.fromkeys(placement.owners[cuts.start : cuts.stop + 1]):
            held = placement.held[worker]
            layers = [divided[stage] for stage in held]
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
                    total += self._transfers(known.crossings[cut], divided[cut][1])
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
    """Yield which neighbouring cuts are moved together, and over how many places.

    One cut is moved by up to 32 layers. With `wide`, two and more cuts are moved instead.
    """
    widths = [1 << n for n in range(1, cuts.bit_length())] if wide else [1]
    sizes = (1, 2) if wide else (1, 2, 4, 8, 16, 32)
    for width in widths:
        for first in range(cuts - width + 1):
            for size in sizes:
                yield range(first, first + width), size
                yield range(first, first + width), -size
