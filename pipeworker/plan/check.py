"""Shows, before anything runs, that a schedule can run, and what it keeps.

A schedule passes when it is *complete* (every micro-batch forward and backward once on every
stage), *ordered* (each action's needs are met by earlier actions; gradients of weights accumulate
in micro-batch order; each channel is received in the order it is sent) and *free of deadlock* when
a channel holds at most `capacity` frames. Workers that block on reading an empty channel and on
writing a full one form a bounded Kahn network: whether it deadlocks does not depend on timing, so
one run decides it.

The actions of one kind and stage are a column: their micro-batches, and their places in the tuple.
Laws compare whole columns, so that half a million actions take half a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import lt

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import COMPUTE, REPLICAS, WEIGHTS, Action, Kind
from pipeworker.plan.columns import NONE, Column, Columns, columns_of, joined
from pipeworker.plan.kept import keeps, leaves
from pipeworker.plan.network import CHANNEL_CAPACITY, check_channels, check_progress
from pipeworker.plan.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Kept:
    """What each stage keeps at most at once, in micro-batches.

    Attributes:
        activations: whose graph is kept: from forward, or recompute, to the end of backward; but
            for the time that what it saved is in the host's memory.
        inputs: whose input is kept: from forward to the end of backward.
        deferred: whose backward is half done: for the input, but not yet for the weights.
    """

    activations: tuple[int, ...]
    inputs: tuple[int, ...]
    deferred: tuple[int, ...]


def check(schedule: Schedule, *, capacity: int = CHANNEL_CAPACITY) -> Kept:
    """What a legal schedule keeps.

    Raises:
        ScheduleError: it is incomplete, out of order or deadlocks; the message names the worker,
            the action and the reason.
    """
    for source, target in schedule.skips:
        if not 0 <= source < target < schedule.placement.stages:
            raise ScheduleError(f"skip {source}>{target} does not lead to a later stage")
    for source, target in schedule.ties:
        if (target, source) not in schedule.ties:
            raise ScheduleError(f"tie {source}>{target} has no {target}>{source}")
        if not 0 <= source < schedule.placement.stages:
            raise ScheduleError(f"tie {source}>{target} is not of the stages")
    workers = [columns_of(actions) for actions in schedule.workers]
    kept: list[tuple[int, int, int]] = []
    for stage, worker in enumerate(schedule.placement.owners):
        kept.append(_Stage(schedule, worker, stage, workers[worker]).check())
    for worker, (actions, columns) in enumerate(zip(schedule.workers, workers, strict=True)):
        for (_, stage, _), column in columns.items():
            if stage not in schedule.placement.held[worker]:
                action = actions[column.places[0]]
                raise ScheduleError(f"worker {worker}: {action} is of a stage it does not hold")
        _check_phases(worker, actions, columns)
    check_channels(workers)
    check_progress(schedule, workers, capacity)
    activations, inputs, deferred = zip(*kept, strict=True)
    return Kept(activations, inputs, deferred)


_PHASES = {
    Kind.SUM: 1,
    Kind.GATHER: 2,
    **dict.fromkeys((Kind.SEND_TIED, Kind.RECEIVE_TIED, Kind.REDUCE_TIED), 3),
}
"""What waits for other replicas, by what it waits for: of an earlier phase, and so on its way."""


def _check_phases(worker: int, actions: Sequence[Action], columns: Columns) -> None:
    """Nobody waits for another replica before all is done that it may wait for in turn.

    Sends between replicas wait for nobody. So the stages of a replica come to the end of the first
    phase by themselves, and to that of each next one when all replicas have come to the one before.
    """
    if not any(kind in REPLICAS for kind, _, _ in columns):
        return
    ended, last = 0, -1
    for place, action in enumerate(actions):
        phase = _PHASES.get(action.kind, 0)
        if phase < ended:
            raise ScheduleError(f"worker {worker}: {action} comes behind {actions[last]}")
        ended, last = phase, place


_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""What gives the gradient of a stage's input."""
_ONCE = {Kind.LOAD, *REPLICAS, *_PHASES}
"""What a step has one of, as if it were of micro-batch 0."""
_End = tuple[Kind, int]
"""A kind, and the stage at the other end or -1."""


class _Stage:
    """The laws of one stage on the worker that holds it."""

    def __init__(self, schedule: Schedule, worker: int, stage: int, columns: Columns) -> None:
        self._schedule = schedule
        self._worker = worker
        self._stage = stage
        self._columns = columns
        self._count = schedule.microbatches
        self._actions = schedule.workers[worker]
        self._last = schedule.placement.stages - 1
        self._reduces = schedule.placement.replicas > 1 and not schedule.forward_only
        self._owners = schedule.placement.owners
        skips = schedule.skips
        self._sources = [a for a, b in skips if b == stage and self._away(a)]
        self._targets = [b for a, b in skips if a == stage and self._away(b)]
        self._tied = [b for a, b in schedule.ties if a == stage]

    def check(self) -> tuple[int, int, int]:
        """Raise what is wrong; returns what is kept: activations, inputs, deferred."""
        mine = {key: column for key, column in self._columns.items() if key[1] == self._stage}
        for (kind, _, _), column in self._columns.items():  # and the stages beside it
            self._check_numbers(column, max(self._count, kind in _ONCE))
        self._check_needs()
        self._check_replicas()
        self._check_accumulation()
        self._check_complete()
        self._check_foreign(mine)
        return keeps(self._columns, self._stage, len(self._actions))

    def _away(self, stage: int) -> bool:
        """Whether a stage is on another worker."""
        return self._owners[stage] != self._worker

    def _column(self, kind: Kind, peer: int = -1, stage: int | None = None) -> Column:
        key = kind, self._stage if stage is None else stage, peer
        return self._columns.get(key, NONE)

    def _fail(self, what: str) -> ScheduleError:
        return ScheduleError(f"worker {self._worker}: {what}")

    def _check_numbers(self, column: Column, count: int) -> None:
        actions, found = self._actions, column.microbatches
        if len(set(found)) < len(found):
            seen: set[int] = set()
            for m, place in zip(found, column.places, strict=True):
                if m in seen:
                    raise self._fail(f"{actions[place]} appears twice")
                seen.add(m)
        if min(found) < 0 or max(found) >= count:
            place = next(p for m, p in zip(found, column.places, strict=True) if not 0 <= m < count)
            raise self._fail(f"{actions[place]} is not one of the micro-batches")

    def _check_needs(self) -> None:
        stage, last = self._stage, self._last
        forward: list[tuple[_End, int]] = []  # what it needs, and of which stage
        if stage > 0:
            before = (Kind.RECEIVE_ACTIVATION, stage), (Kind.FORWARD, stage - 1)
            kind, of = before[0] if self._away(stage - 1) else before[1]
            forward.append(((kind, -1), of))
        if stage == last and self._away(0):
            forward.append(((Kind.RECEIVE_TARGET, 0), stage))
        forward += [((Kind.RECEIVE_SKIP, peer), stage) for peer in self._sources]
        for (kind, peer), of in forward:
            self._need(self._column(Kind.FORWARD), self._column(kind, peer, of), kind, of, peer)

        forwards = self._column(Kind.FORWARD)
        recomputes = self._column(Kind.RECOMPUTE)
        self._need(recomputes, forwards, Kind.FORWARD, stage)
        self._check_fetches()
        for kind in _BACKWARDS:
            backward = self._column(kind)
            self._need(backward, forwards, Kind.FORWARD, stage)
            for ahead in (Kind.RECOMPUTE, Kind.FETCH):
                column = self._column(ahead)
                self._need(_of(backward, column), column, ahead, stage)
            if stage < last:
                if self._away(stage + 1):
                    gradients = self._column(Kind.RECEIVE_GRADIENT)
                    self._need(backward, gradients, Kind.RECEIVE_GRADIENT, stage)
                else:
                    self._need(
                        backward, self._either(_BACKWARDS, stage + 1), Kind.BACKWARD, stage + 1
                    )
            for peer in self._targets:
                column = self._column(Kind.RECEIVE_SKIP_GRADIENT, peer)
                self._need(backward, column, Kind.RECEIVE_SKIP_GRADIENT, stage, peer)
        inputs = self._column(Kind.BACKWARD_INPUT)
        self._need(self._column(Kind.BACKWARD_WEIGHT), inputs, Kind.BACKWARD_INPUT, stage)
        backwards = self._either(_BACKWARDS)
        for end in ((Kind.SEND_ACTIVATION, -1), (Kind.SEND_TARGET, last)):
            self._need(self._column(*end), forwards, Kind.FORWARD, stage)
        for peer in self._targets:
            self._need(self._column(Kind.SEND_SKIP, peer), forwards, Kind.FORWARD, stage)
        self._need(self._column(Kind.SEND_GRADIENT), backwards, Kind.BACKWARD, stage)
        for peer in self._sources:
            column = self._column(Kind.SEND_SKIP_GRADIENT, peer)
            self._need(column, backwards, Kind.BACKWARD, stage)
        self._check_reduction()

    def _check_fetches(self) -> None:
        """What is fetched has left before, and is not made again."""
        fetches, again = self._column(Kind.FETCH), {*self._column(Kind.RECOMPUTE).microbatches}
        left = leaves(self._columns, self._stage)
        for m, place in zip(fetches.microbatches, fetches.places, strict=True):
            action = self._actions[place]
            if m in again:
                raise self._fail(f"{action} comes beside {Action(Kind.RECOMPUTE, self._stage, m)}")
            if left.get(m, place) >= place:
                raise self._fail(
                    f"{action} comes before another action of its stage has run behind its "
                    f"{Action(Kind.FORWARD, self._stage, m)}"
                )

    def _either(self, kinds: Sequence[Kind], stage: int | None = None) -> Column:
        """The actions of some kinds together, in the order of the tuple."""
        return joined([self._column(kind, stage=stage) for kind in kinds])

    def _need(self, column: Column, needed: Column, kind: Kind, stage: int, peer: int = -1) -> None:
        """Each action of `column` comes after the one of `needed` for the same micro-batch."""
        if not column.places:
            return
        there = needed.by_microbatch(max(1, self._count))  # what there is one of is of 0
        if len(column.places) == self._count and all(
            map(lt, there, column.by_microbatch(self._count))
        ):
            return
        for m, place in zip(column.microbatches, column.places, strict=True):
            if there[m] > place:
                action = self._actions[place]
                raise self._fail(f"{action} comes before its {Action(kind, stage, m, peer)}")

    def _check_reduction(self) -> None:
        """Tied gradients leave after the last backward, and are added when all are in."""
        stage = self._stage
        for peer in self._tied:
            done = max(self._either(WEIGHTS, peer).places, default=-1)
            for what, of in ((Kind.SEND_TIED, peer), (Kind.REDUCE_TIED, -1)):
                mine = max(self._either(WEIGHTS).places, default=-1)
                for place in self._column(what, of).places:
                    if place < max(mine, -1 if self._away(peer) else done):
                        raise self._fail(f"{self._actions[place]} comes before the last backward")
            if self._away(peer):
                received = self._column(Kind.RECEIVE_TIED, peer)
                reductions = self._column(Kind.REDUCE_TIED)
                self._need(reductions, received, Kind.RECEIVE_TIED, stage, peer)

    def _check_replicas(self) -> None:
        """Gradients leave for other replicas when they are whole, and come back as sums."""
        before = max(self._either(WEIGHTS).places, default=-1)
        what = "the last backward"
        for kind in REPLICAS:
            for place in self._column(kind).places:
                if place < before:
                    raise self._fail(f"{self._actions[place]} comes before {what}")
                before = place
            what = f"its {Action(kind, self._stage, 0)}"

    def _check_accumulation(self) -> None:
        order = self._either(WEIGHTS)
        ascending = sorted(order.microbatches)
        if order.microbatches != ascending:
            wrong = next(i for i, m in enumerate(order.microbatches) if m != ascending[i])
            action = self._actions[order.places[wrong]]
            raise self._fail(
                f"{action} is out of order; gradients accumulate in micro-batch order, so that of "
                f"micro-batch {ascending[wrong]} comes first"
            )

    def _expected(self) -> list[_End]:
        stage, last = self._stage, self._last
        training = not self._schedule.forward_only
        expected: list[_End] = [(Kind.FORWARD, -1)]
        if stage > 0 and self._away(stage - 1):
            expected.append((Kind.RECEIVE_ACTIVATION, -1))
            expected += [(Kind.SEND_GRADIENT, -1)] * training
        if stage < last and self._away(stage + 1):
            expected.append((Kind.SEND_ACTIVATION, -1))
            expected += [(Kind.RECEIVE_GRADIENT, -1)] * training
        if stage == 0 and self._away(last):
            expected.append((Kind.SEND_TARGET, last))
        if stage == last and self._away(0):
            expected.append((Kind.RECEIVE_TARGET, 0))
        for peer in self._sources:
            expected.append((Kind.RECEIVE_SKIP, peer))
            expected += [(Kind.SEND_SKIP_GRADIENT, peer)] * training
        for peer in self._targets:
            expected.append((Kind.SEND_SKIP, peer))
            expected += [(Kind.RECEIVE_SKIP_GRADIENT, peer)] * training
        return expected

    def _ends(self) -> list[_End]:
        """What is there once, at the end of a step or between fill and drain."""
        found: list[_End] = []
        if self._stage == 0 and not self._schedule.forward_only:
            found.append((Kind.LOAD, -1))
        for peer in self._tied:
            if self._away(peer):
                found += [(Kind.SEND_TIED, peer), (Kind.RECEIVE_TIED, peer)]
        if self._tied:
            found.append((Kind.REDUCE_TIED, -1))
        if self._reduces:
            found += [(kind, -1) for kind in REPLICAS]
        return found

    def _check_complete(self) -> None:
        stage = self._stage
        for kind, peer in self._expected():
            self._whole(self._column(kind, peer), kind, peer)
        if not self._schedule.forward_only:
            inputs = self._column(Kind.BACKWARD_INPUT)
            weights = set(self._column(Kind.BACKWARD_WEIGHT).microbatches)
            for m in inputs.microbatches:
                if m not in weights:
                    action = Action(Kind.BACKWARD_WEIGHT, stage, m)
                    raise self._fail(f"{action} is missing")
            both = self._either(_BACKWARDS)
            if len(set(both.microbatches)) < len(both.microbatches):
                m = next(m for m in inputs.microbatches if both.microbatches.count(m) > 1)
                raise self._fail(
                    f"{Action(Kind.BACKWARD_INPUT, stage, m)} comes beside a whole one"
                )
            self._whole(both, Kind.BACKWARD, -1)
        for kind, peer in self._ends():
            if not self._column(kind, peer).places:
                raise self._fail(f"{Action(kind, stage, 0, peer)} is missing")

    def _whole(self, column: Column, kind: Kind, peer: int) -> None:
        if len(column.places) < self._count:
            there = set(column.microbatches)
            m = next(m for m in range(self._count) if m not in there)
            raise self._fail(f"{Action(kind, self._stage, m, peer)} is missing")

    def _check_foreign(self, mine: Columns) -> None:
        """Nothing is there that leads nowhere."""
        expected, once = {*self._expected()}, {*self._ends()}
        compute = {Kind.FORWARD}
        if not self._schedule.forward_only:
            compute |= {Kind.FETCH, *COMPUTE}
        for (kind, _, peer), column in mine.items():
            if (kind, peer) in once and column.microbatches != [0]:
                place = next(
                    p for m, p in zip(column.microbatches, column.places, strict=True) if m
                )
                raise self._fail(f"{self._actions[place]}: a step has one, of 0")
            if (kind, peer) in expected or (kind, peer) in once or (kind in compute and peer < 0):
                continue
            action = self._actions[column.places[0]]
            if kind is Kind.LOAD and not self._schedule.forward_only:
                raise self._fail(f"{action}: only stage 0 reads data")
            raise self._fail(f"{action} has nothing at its other end")


def _of(column: Column, others: Column) -> Column:
    """Its actions for the micro-batches that others are for."""
    if not others.places:
        return NONE
    wanted = {*others.microbatches}
    pairs = zip(column.microbatches, column.places, strict=True)
    chosen = [(m, place) for m, place in pairs if m in wanted]
    return Column([m for m, _ in chosen], [place for _, place in chosen])
