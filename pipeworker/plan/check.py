"""The checker: proves before a job runs that a schedule can run, and counts what it holds.

A schedule passes if it is

- *complete*: every stage runs forward and backward of every micro-batch once;
- *ordered*: each action comes after those that it needs, forwards run and gradients of weights
  accumulate in micro-batch order, and each channel is received in the order in which it is sent;
- *free of deadlock* with channels that hold at most `capacity` frames. Workers that block while
  they read an empty channel or write to a full one form a bounded Kahn network. Whether such a
  network deadlocks does not depend on timing, so one simulated run decides it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from itertools import compress, zip_longest
from operator import lt
from typing import NamedTuple

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import (
    COMPUTE,
    INPUTS,
    RECEIVES,
    REPLICAS,
    SENDS,
    WEIGHTS,
    Action,
    Kind,
    channel,
)
from pipeworker.plan.columns import (
    NONE,
    Column,
    Columns,
    columns_of,
    joined,
    offloaded_at,
    peak_live,
)
from pipeworker.plan.schedule import CHANNEL_CAPACITY, End, Schedule, StageEnds
from pipeworker.plan.simulate import simulate


class LiveMicroBatches(NamedTuple):
    """The peak number of micro-batches of which each stage holds something, by stage.

    Attributes:
        activations: graphs on the device: from forward, or recompute, to the end of backward,
            without the time during which they are offloaded.
        inputs: inputs that are held: from forward to the end of backward.
        deferred: split backwards that have run for the input, but not yet for the weights.
    """

    activations: tuple[int, ...]
    inputs: tuple[int, ...]
    deferred: tuple[int, ...]


def check(schedule: Schedule, *, capacity: int = CHANNEL_CAPACITY) -> LiveMicroBatches:
    """Prove that a schedule can run; return how many micro-batches each stage holds at once.

    Raises:
        ScheduleError: it is incomplete, out of order or deadlocks; the message names the worker,
            the action and the reason.
    """
    for source, target in schedule.skips:
        if not 0 <= source < target < schedule.placement.stages:
            raise ScheduleError(f"skip {source}>{target} does not lead to a later stage")
    if list(schedule.frozen) != sorted({*schedule.frozen} & {*range(schedule.placement.stages)}):
        raise ScheduleError(f"frozen stages {schedule.frozen} are not of the stages, ascending")
    for source, target in schedule.ties:
        if (target, source) not in schedule.ties:
            raise ScheduleError(f"tie {source}>{target} has no {target}>{source}")
        if not 0 <= source < schedule.placement.stages:
            raise ScheduleError(f"tie {source}>{target} is not of the stages")
    workers = [columns_of(actions) for actions in schedule.workers]
    live = [
        _StageChecks(schedule, worker, stage, workers[worker]).check()
        for stage, worker in enumerate(schedule.placement.owners)
    ]
    for worker, (actions, columns) in enumerate(zip(schedule.workers, workers, strict=True)):
        for (_, stage, _), column in columns.items():
            if stage not in schedule.placement.held[worker]:
                action = actions[column.places[0]]
                raise ScheduleError(f"worker {worker}: {action} is of a stage it does not hold")
        _check_phases(worker, actions, columns)
    _check_channels(workers)
    simulate(schedule, capacity=capacity)
    return LiveMicroBatches(*zip(*live, strict=True))


_PHASES = {
    Kind.SUM: 1,
    Kind.GATHER: 2,
    **dict.fromkeys((Kind.SEND_TIED, Kind.RECEIVE_TIED, Kind.REDUCE_TIED), 3),
}
"""The actions that wait for other replicas: those of a phase need all replicas' earlier ones."""


def _check_phases(worker: int, actions: Sequence[Action], columns: Columns) -> None:
    """Check that replicas cannot wait for each other in a circle.

    A worker must not wait for another replica before it has done everything that this replica may
    wait for. Sends between replicas never block. So the stages of a replica reach the end of the
    first phase without other replicas, and the end of each further phase once all replicas have
    reached the end of the previous one.
    """
    if not any(kind in REPLICAS for kind, _, _ in columns):
        return
    ended, last = 0, -1
    for place, action in enumerate(actions):
        phase = _PHASES.get(action.kind, 0)
        if phase < ended:
            raise ScheduleError(f"worker {worker}: {action} comes behind {actions[last]}")
        ended, last = phase, place


def _check_channels(workers: Sequence[Columns]) -> None:
    """Check that each channel's micro-batches are received in the order in which they are sent."""
    sent, received = (
        {
            channel(*end): column.microbatches
            for columns in workers
            for end, column in columns.items()
            if end[0] in kinds
        }
        for kinds in (SENDS, RECEIVES)
    )
    for edge in sorted(sent.keys() | received.keys()):
        orders = sent.get(edge, []), received.get(edge, [])
        if orders[0] != orders[1]:
            sends, receives = map(reprlib.repr, orders)
            arrives, expected = next((a, b) for a, b in zip_longest(*orders) if a != b)
            raise ScheduleError(
                f"channel {edge}: sent in order {sends}, received in {receives}; stage "
                f"{edge.target} waits for micro-batch {expected} where {arrives} arrives"
            )


_ONCE = {Kind.LOAD, *REPLICAS, *_PHASES}
"""The kinds that a step has at most once per stage, written with micro-batch 0."""


class _StageChecks:
    """The checks of one stage on the worker that holds it."""

    def __init__(self, schedule: Schedule, worker: int, stage: int, columns: Columns) -> None:
        self._schedule = schedule
        self._worker, self._stage, self._columns = worker, stage, columns
        self._count, self._training = schedule.microbatches, not schedule.forward_only
        self._actions = schedule.workers[worker]
        self._owners = schedule.placement.owners
        self._trains = not schedule.forward_only and stage >= schedule.front
        """Whether the stage has a backward."""
        self._ends = StageEnds.of(schedule.placement, stage, schedule.skips, schedule.front)
        self._tied = [b for a, b in schedule.ties if a == stage]

    def check(self) -> tuple[int, int, int]:
        """Raise the first error; return the live activations, inputs and deferred backwards."""
        self._check_kinds()
        columns = self._columns.items()  # the worker's other stages are needed
        # Compute actions first: a mistake is one of theirs where the others are placed around them.
        for (kind, _, _), column in sorted(columns, key=lambda item: item[0][0] not in COMPUTE):
            self._check_numbers(column, max(self._count, kind in _ONCE))
        self._check_needs()
        self._check_reduction()
        self._check_replicas()
        self._check_order(self._column(Kind.FORWARD), "forwards change buffers")
        self._check_order(self._either(WEIGHTS), "gradients accumulate")
        self._check_complete()
        return peak_live(self._columns, self._stage, len(self._actions))

    def _is_local(self, stage: int) -> bool:
        return 0 <= stage < len(self._owners) and self._owners[stage] == self._worker

    def _column(self, kind: Kind, peer: int = -1) -> Column:
        return self._columns.get((kind, self._stage, peer), NONE)

    def _fail(self, what: str) -> ScheduleError:
        return ScheduleError(f"worker {self._worker}: {what}")

    def _check_numbers(self, column: Column, count: int) -> None:
        """Check that a column has each micro-batch at most once, and only those below `count`."""
        seen: set[int] = set()
        if len(set(column.microbatches)) < len(column.places):
            for m, place in zip(column.microbatches, column.places, strict=True):
                if m in seen:
                    raise self._fail(f"{self._actions[place]} appears twice")
                seen.add(m)
        if min(column.microbatches) < 0 or max(column.microbatches) >= count:
            place = column.place_of(lambda m: not 0 <= m < count)
            raise self._fail(f"{self._actions[place]} is not one of the micro-batches")

    def _check_kinds(self) -> None:
        """Check that no micro-batch has a whole backward and one in two parts."""
        whole, inputs = self._column(Kind.BACKWARD), self._column(Kind.BACKWARD_INPUT)
        if both := {*whole.microbatches} & {*inputs.microbatches}:
            first = min(both).__eq__
            one, other = (self._actions[some.place_of(first)] for some in (inputs, whole))
            raise self._fail(
                f"{one} comes beside {other}; the backward of a micro-batch is one action B, or I "
                "and W"
            )

    def _check_needs(self) -> None:
        """Check that each action comes after those that it needs."""
        stage, ends = self._stage, self._ends
        forwards, backwards = self._column(Kind.FORWARD), self._either(INPUTS)
        if self._is_local(stage - 1):
            before = self._columns.get((Kind.FORWARD, stage - 1, -1), NONE)
            self._need(forwards, before, Kind.FORWARD, stage - 1)
        for end in ends.before_forward:
            self._need_end(forwards, end)
        self._need(self._column(Kind.RECOMPUTE), forwards, Kind.FORWARD)
        self._check_fetches()
        for kind in INPUTS:
            backward = self._column(kind)
            self._need(backward, forwards, Kind.FORWARD)
            for ahead in (Kind.RECOMPUTE, Kind.FETCH):
                column = self._column(ahead)
                self._need(_restricted(backward, column), column, ahead)
            if self._is_local(stage + 1):
                after = self._either(INPUTS, stage + 1)
                self._need(backward, after, Kind.BACKWARD, stage + 1)
            for end in ends.before_backward:
                self._need_end(backward, end)
        inputs = self._column(Kind.BACKWARD_INPUT)
        self._need(self._column(Kind.BACKWARD_WEIGHT), inputs, Kind.BACKWARD_INPUT)
        for end in ends.after_forward:
            self._need(self._column(*end), forwards, Kind.FORWARD)
        for end in ends.after_backward:
            self._need(self._column(*end), backwards, Kind.BACKWARD)

    def _check_fetches(self) -> None:
        """Check that a fetched micro-batch has left the device before, and is not recomputed."""
        fetches = self._column(Kind.FETCH)
        recomputed = {*self._column(Kind.RECOMPUTE).microbatches}
        left = offloaded_at(self._columns, self._stage)
        for m, place in zip(fetches.microbatches, fetches.places, strict=True):
            action = self._actions[place]
            if m in recomputed:
                raise self._fail(f"{action} comes beside {Action(Kind.RECOMPUTE, self._stage, m)}")
            if left.get(m, place) >= place:
                raise self._fail(
                    f"{action} comes before another action of its stage has run behind its "
                    f"{Action(Kind.FORWARD, self._stage, m)}"
                )

    def _either(self, kinds: Sequence[Kind], stage: int | None = None) -> Column:
        """Return the actions of several kinds together, in the order of the tuple."""
        of = self._stage if stage is None else stage
        return joined([self._columns.get((kind, of, -1), NONE) for kind in kinds])

    def _need_end(self, column: Column, end: End) -> None:
        """Check that each action of `column` comes after a receive of its micro-batch."""
        self._need(column, self._column(*end), end[0], peer=end[1])

    def _need(
        self, column: Column, needed: Column, kind: Kind, stage: int | None = None, peer: int = -1
    ) -> None:
        """Check that each action of `column` comes after that of `needed` for its micro-batch.

        For the message, `kind`, `stage` (this one by default) and `peer` are those of `needed`.
        """
        if not column.places:
            return
        stage = self._stage if stage is None else stage
        there = needed.by_microbatch(max(1, self._count))  # single actions have micro-batch 0
        if len(column.places) == self._count and all(
            map(lt, there, column.by_microbatch(self._count))
        ):
            return
        for m, place in zip(column.microbatches, column.places, strict=True):
            if there[m] > place:
                action = self._actions[place]
                raise self._fail(f"{action} comes before its {Action(kind, stage, m, peer)}")

    def _check_reduction(self) -> None:
        """Check that tied gradients leave after the last backward, and are added when complete."""
        for peer in self._tied:
            local = [*self._either(WEIGHTS).places]
            local += self._either(WEIGHTS, peer).places if self._is_local(peer) else []
            for end in ((Kind.SEND_TIED, peer), (Kind.REDUCE_TIED, -1)):
                for place in self._column(*end).places:
                    if place < max(local, default=-1):
                        raise self._fail(f"{self._actions[place]} comes before the last backward")
            if not self._is_local(peer):
                self._need_end(self._column(Kind.REDUCE_TIED), (Kind.RECEIVE_TIED, peer))

    def _check_replicas(self) -> None:
        """Check that gradients are complete when they leave for other replicas."""
        before = max(self._either(WEIGHTS).places, default=-1)
        what = "the last backward"
        for kind in REPLICAS:
            for place in self._column(kind).places:
                if place < before:
                    raise self._fail(f"{self._actions[place]} comes before {what}")
                before = place
            what = f"its {Action(kind, self._stage, 0)}"

    def _check_order(self, order: Column, what: str) -> None:
        """Check that actions, which do `what`, are in micro-batch order."""
        ascending = sorted(order.microbatches)
        if order.microbatches != ascending:
            wrong = next(i for i, m in enumerate(order.microbatches) if m != ascending[i])
            action = self._actions[order.places[wrong]]
            raise self._fail(
                f"{action} is out of order; {what} in micro-batch order, so that of micro-batch "
                f"{ascending[wrong]} comes first"
            )

    def _wanted(self) -> dict[End, Sequence[int]]:
        """Return, by kind and peer, the micro-batches of which the stage must have an action."""
        ends, remote = self._ends, [peer for peer in self._tied if not self._is_local(peer)]
        every = [(Kind.FORWARD, -1), *ends.before_forward, *ends.after_forward]
        once = [(kind, peer) for peer in remote for kind in (Kind.SEND_TIED, Kind.RECEIVE_TIED)]
        once += [(Kind.REDUCE_TIED, -1)] if self._tied else []
        if self._training:
            every += [*ends.before_backward, *ends.after_backward]
            once += [(Kind.LOAD, -1)] if self._stage == 0 else []
            once += [(k, -1) for k in REPLICAS if self._schedule.placement.replicas > 1]
        return {**dict.fromkeys(every, range(self._count)), **dict.fromkeys(once, (0,))}

    def _check_complete(self) -> None:
        """Check that no action is missing, and that none is without a purpose."""
        wanted = self._wanted()
        self._check_all(self._column(Kind.FORWARD), range(self._count), Kind.FORWARD)
        if self._trains:
            inputs, both = self._column(Kind.BACKWARD_INPUT), self._either(INPUTS)
            weights = self._column(Kind.BACKWARD_WEIGHT)
            self._check_all(weights, inputs.microbatches, Kind.BACKWARD_WEIGHT)
            self._check_all(both, range(self._count), Kind.BACKWARD)
        for (kind, peer), microbatches in wanted.items():
            self._check_all(self._column(kind, peer), microbatches, kind, peer)
        known = {*wanted, *((kind, -1) for kind in (Kind.FETCH, *COMPUTE) if self._trains)}
        for (kind, stage, peer), column in self._columns.items():
            if stage != self._stage:
                continue
            action = self._actions[column.places[0]]
            if (kind, peer) not in known and self._training and kind in COMPUTE:
                raise self._fail(f"{action}: the frozen stages at the front have no backward")
            if (kind, peer) not in known and kind is Kind.LOAD and self._training:
                raise self._fail(f"{action}: only stage 0 reads data")
            if (kind, peer) not in known:
                raise self._fail(f"{action} has nothing at its other end")
            if kind in _ONCE and column.microbatches != [0]:
                place = column.place_of(bool)
                raise self._fail(f"{self._actions[place]}: a step has one, of 0")

    def _check_all(
        self, column: Column, microbatches: Sequence[int], kind: Kind, peer: int = -1
    ) -> None:
        """Check that a column has an action for each of some micro-batches."""
        if len(column.places) < len(microbatches):
            there = set(column.microbatches)
            m = next(m for m in microbatches if m not in there)
            raise self._fail(f"{Action(kind, self._stage, m, peer)} is missing")


def _restricted(column: Column, others: Column) -> Column:
    """Return the actions of `column` for the micro-batches of `others`."""
    if not others.places:
        return NONE
    wanted = {*others.microbatches}
    kept = [m in wanted for m in column.microbatches]
    return Column([*compress(column.microbatches, kept)], [*compress(column.places, kept)])
