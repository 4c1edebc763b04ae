"""The search for the balance: which consecutive layers each stage gets.

What is proven: a network with at most ``MAX_JUDGED`` possible balances gets the best one by
simulated step time, because the step time of each is computed. For a larger network, or very many
micro-batches, the search begins with the balance whose slowest stage is the fastest, and then moves
cuts as long as that shortens the simulated step. The result is the best one among its neighbours,
and not proven to be the best of all. All bounds are counts, so that every host finds the same
balance.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import combinations, pairwise
from math import comb, inf

from pipeworker.errors import UsageError
from pipeworker.plan.figures import bytes_text
from pipeworker.plan.partition import nearest, ranges
from pipeworker.plan.placement import held_text
from pipeworker.plan.planner.bounds import Bounds, is_common, moves
from pipeworker.plan.planner.costs import Range
from pipeworker.plan.planner.stages import Divisions, Judged
from pipeworker.plan.planner.step_graph import Path

MAX_JUDGED = 2_000
"""The number of balances up to which each is judged."""
_PATHS = 8
"""Paths from which the bound of a balance is computed."""
_NODES = 2_000_000
"""Nodes of graphs of steps that a search evaluates at most: half a second."""
_LEAST = 25
"""The number of balances that a local search judges at most, even if their graphs are larger."""
_HALVINGS = 30
"""Halvings of the interval in which the time of the slowest stage is searched."""


def search_balance(divisions: Divisions, nodes: int = _NODES) -> Judged:
    """Return the best balance found, which exceeds the memory if none was found that fits.

    It is the even one if none is better. The search evaluates at most so many `nodes` of graphs of
    steps.
    """
    search = _Search(divisions, nodes)
    seeds = [divisions.even, *slowest_first(divisions)]
    judged = sorted(map(search.judge, dict.fromkeys(seeds)))
    possible = comb(len(divisions.cuts), divisions.stages - 1)
    if possible <= MAX_JUDGED and possible * divisions.nodes <= nodes:
        found = search.all(judged[0])
    else:
        found = min(map(search.improve, judged))
        if found.excess and (fitting := _any_fitting(divisions)):
            found = search.improve(search.judge(fitting))
    return min(search.judge(divisions.even), found, key=lambda one: one[:3])


_Steps = tuple[tuple[str, ...], tuple[int, ...]]
"""The recompute modes, and the frozen stages: balances that differ in them have other actions."""


class _Search:
    """A search with the paths that were the longest of the balances judged last."""

    def __init__(self, divisions: Divisions, nodes: int) -> None:
        self._divisions = divisions
        self._paths: list[tuple[_Steps, Path]] = []
        self._left = max(_LEAST, nodes // divisions.nodes)

    def judge(self, balance: tuple[int, ...]) -> Judged:
        """Judge a balance, and keep its path to bound others by."""
        found = self._divisions.judge(balance)
        if is_common(found.path):
            known = self._steps(found), found.path
            if known not in self._paths:
                self._paths = [known, *self._paths[: _PATHS - 1]]
        return found

    def _steps(self, found: Judged) -> _Steps:
        """Return what the actions of a balance's step depend on."""
        return found.modes, self._divisions.frozen(ranges(found.balance))

    def all(self, best: Judged) -> Judged:
        """Return the best of all balances."""
        divisions = self._divisions
        for cuts in combinations(divisions.cuts, divisions.stages - 1):
            balance = tuple(b - a for a, b in pairwise((0, *cuts, divisions.layers)))
            best = min(best, self.judge(balance))
        return best

    def improve(self, best: Judged) -> Judged:
        """Move cuts as long as that makes the step shorter."""
        while True:
            for wide in (False, True):
                better = self._step(best, wide=wide)
                if better is not best:
                    break
            else:
                return best
            best = better

    def _step(self, best: Judged, *, wide: bool) -> Judged:
        """Return the first better balance among the neighbours, by bound, or `best`."""
        own = self._steps(best)
        paths = [path for steps, path in self._paths if steps == own]
        bounds = Bounds(self._divisions, best, paths)
        ranked = []
        for cuts, step in moves(len(best.balance) - 1, wide=wide):
            balance = bounds.moved(cuts, step)
            if balance is not None and balance not in self._divisions.judged:
                ranked.append((0.0 if best.excess else bounds.at_least(cuts, balance), balance))
        for least, balance in sorted(ranked):
            if least >= best.seconds or self._left <= 0:
                break
            self._left -= 1
            found = self.judge(balance)
            if found < best:
                return found
        return best


def slowest_first(divisions: Divisions) -> list[tuple[int, ...]]:
    """Return balances whose slowest stage is as fast as possible.

    The time of a stage counts from the begin of the step to its end if nothing but this stage and
    the way to it takes time: M micro-batches of the stage itself, and one of all layers before it.
    The largest prefix of the layers that stays below a time is found for one stage after the other,
    and the time is halved down. A second balance leaves out the layers before.
    """
    found = []
    for lead in (1.0, 0.0):
        low, high = 0.0, 2 * _whole(divisions)
        best = None
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            balance = _greedy(divisions, middle, lead)
            if balance is None:
                low = middle
            else:
                best, high = balance, middle
        if best is not None:
            found.append(nearest(best, divisions.cuts))
    return found


def _whole(divisions: Divisions) -> float:
    """Return a time within which the slowest worker runs everything."""
    seconds = divisions.costs.seconds((0, divisions.layers), min(divisions.speeds))
    whole = 2 * seconds.forward + seconds.backward
    return (divisions.microbatches + 2) * whole * divisions.stages + seconds.update


def _greedy(divisions: Divisions, time: float, lead: float) -> tuple[int, ...] | None:
    """Return the balance of the largest stages that take at most `time`; None if there is none."""
    first, balance = 0, []
    for stage in range(divisions.stages):
        stop = divisions.layers - (divisions.stages - stage - 1)
        low, high = first, stop
        while low < high:
            middle = (low + high + 1) // 2
            if _time(divisions, stage, (first, middle), lead) <= time:
                low = middle
            else:
                high = middle - 1
        if low == first:
            return None
        balance.append(low - first)
        first = low
    return tuple(balance) if first == divisions.layers else None


def _time(divisions: Divisions, stage: int, layers: Range, lead: float) -> float:
    """Return the time of a step in which only a stage, and the way to it, takes time."""
    placement, count = divisions.placement, divisions.microbatches
    worker = placement.owners[stage]
    held = len(placement.held[worker])
    seconds, _ = divisions.stage(stage, layers)
    again = 0.0
    if held == 1:
        (mode,), _, excess = divisions.fit(worker, [layers])
        if excess:
            return inf
        again = {"always": count, "except_first": count - 1}.get(mode, 0) * seconds.forward
    costs = divisions.costs
    before = costs.forward[layers[0]] + costs.backward[layers[0]]
    own = count * (seconds.forward + seconds.backward) + again + seconds.update
    return own * held + (lead * before / max(divisions.speeds) if held == 1 else 0.0)


def _any_fitting(divisions: Divisions) -> tuple[int, ...] | None:
    """Return a balance that fits if each worker has one stage and there is any."""
    placement, layers = divisions.placement, divisions.layers
    if placement.stages != placement.workers:
        return None
    stops = [*divisions.cuts, layers]
    begins: list[dict[int, int]] = [{0: 0}]  # by stage, the ends that it may have and its first
    for worker in placement.owners:
        ends: dict[int, int] = {}
        limit = divisions.limits[worker]
        for first in sorted(begins[-1], reverse=True):
            for stop in stops[bisect_right(stops, first) :]:
                if limit is not None and divisions.bytes.state((first, stop)) > limit:
                    break
                if stop not in ends and not divisions.fit(worker, [(first, stop)])[2]:
                    ends[stop] = first
        begins.append(ends)
    stop, balance = layers, []
    for ends in reversed(begins[1:]):
        if stop not in ends:
            return None
        balance.append(stop - ends[stop])
        stop = ends[stop]
    return tuple(reversed(balance))


def lacking(divisions: Divisions, found: Judged) -> UsageError:
    """Return the error that a balance does not fit, with the worker that lacks the most."""
    peaks = divisions.peaks(found.balance)
    limits = [
        peak if limit is None else limit
        for limit, peak in zip(divisions.limits, peaks, strict=True)
    ]
    over, worker = max(
        (p - limit, -w) for w, (p, limit) in enumerate(zip(peaks, limits, strict=True))
    )
    held = divisions.placement.held[-worker]
    modes = ", ".join(dict.fromkeys(found.modes[stage] for stage in held))
    shown, base = ",".join(map(str, found.balance)), divisions.facts.base_bytes
    advice = "use more --stages, more --microbatches, so that each has fewer samples, or"
    if base >= limits[-worker]:
        advice = f"a worker needs {bytes_text(base)} without layers; use"
    return UsageError(
        f"--stages {divisions.placement.workers}: does not fit into the memory; with balance "
        f"{shown} and recompute {modes}, {held_text(held)} would need "
        f"{bytes_text(peaks[-worker])}, {bytes_text(over)} more than "
        f"{bytes_text(limits[-worker])}: {advice} a larger --memory"
    )
