"""The peak memory of each worker, predicted from the facts of layers and the order of its actions.

A worker holds, all the time: its process, and of each of its stages the parameters, gradients,
optimizer state, the snapshots of both that are in the same memory, and buffers of channels. With
the order of its actions change

- *inputs*: from the forward of a micro-batch to the end of its backward. Their buffers are used
  again, and not freed;
- *graphs*: what a forward keeps for the backward. Without recompute they are held as long as the
  input. With recompute from the second forward to the end of the backward, and for the time of the
  first forward, which builds a graph too. A split backward ends with its second part.

The exchange of gradients between replicas, and then the update of the weights, take memory too,
when there are no graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from operator import ge
from typing import NamedTuple

from pipeworker.facts.layer_facts import LayerFacts, NetworkFacts
from pipeworker.plan.actions import WEIGHTS, Action, Kind
from pipeworker.plan.partition import pieces
from pipeworker.plan.planner.costs import Range
from pipeworker.plan.recompute import OFFLOAD
from pipeworker.plan.schedule import CHANNEL_CAPACITY, Schedule

_ELEMENT = 4
"""Bytes of an element of a gradient."""
_BATCHES = 2
"""Mini-batches that the worker with stage 0 holds: the present one, and the next."""


class Held(NamedTuple):
    """The number of micro-batches of which a stage holds something at one time.

    It holds graphs by recompute mode, and what split backwards have `deferred` to a second part.
    """

    inputs: int
    never: int
    always: int
    except_first: int
    deferred: int = 0

    def graphs(self, mode: str) -> int:
        """Return the number of graphs in a recompute mode; offload has three on the device."""
        if mode == OFFLOAD:
            return min(self.never, _OFFLOADED)
        return self.never if mode == "never" else self.always if mode == "always" else self[3]


_OFFLOADED = 3
"""Micro-batches on the device with offload: one is computed, one leaves and one returns."""


_UNBOUNDED = 1 << 62


class StageBytes(NamedTuple):
    """The bytes of a stage.

    Attributes:
        fixed: bytes that it has all the time.
        input: bytes of each input that it receives.
        gradient: bytes of each gradient that it receives.
        graph: bytes of each graph.
        working: bytes that a forward or backward takes for a time.
        update: bytes that the update of its weights takes for a time.
        deferred: bytes that a split backward keeps between its two parts.
        ahead: inputs for which there are buffers ahead of need.
        gradients_ahead: gradients for which there are buffers ahead of need.
        most: the most inputs, and the most gradients, for which there are buffers.
    """

    fixed: int
    input: int
    graph: int
    working: int
    gradient: int = 0
    update: int = 0
    deferred: int = 0
    ahead: int = 0
    gradients_ahead: int = 0
    most: int = _UNBOUNDED

    def lasting(self, inputs: int, deferred: int = 0) -> int:
        """Return the bytes that are there all the time; the counts are the most that it holds."""
        gradients = max(1, deferred) + self.gradients_ahead
        return (
            self.fixed
            + min(inputs + self.ahead, self.most) * self.input
            + min(gradients, self.most) * self.gradient
        )

    def passing(self, held: Held, mode: str) -> int:
        """Return the bytes of graphs, and of what split backwards keep."""
        return held.graphs(mode) * self.graph + held.deferred * self.deferred


class Ends(NamedTuple):
    """The connections of a stage to others.

    Attributes:
        receives: whether its input comes from another worker.
        sends: whether its output goes to another worker.
        receives_target: whether its target comes from another worker.
        sent: inputs for which the next stage has buffers.
        sent_targets: targets for which the last stage has buffers, on the first one.
        returned: gradients for which the stage before has buffers.
        has_backward: False for the frozen stages at the front, which keep nothing of a forward.
    """

    receives: bool = True
    sends: bool = True
    receives_target: bool = True
    sent: int = 0
    sent_targets: int = 0
    returned: int = 0
    has_backward: bool = True


_ENDS = Ends()


class LayerBytes:
    """Sums of bytes over ranges of layers."""

    def __init__(self, facts: NetworkFacts, microbatches: int) -> None:
        self.facts, self._microbatches = facts, microbatches
        layers, kept = facts.layers, 1 + facts.copies
        shards = facts.replicas if facts.shards_optimizer else 1
        self._state = _sums(
            layers,
            lambda x: kept * (x.parameter_bytes + x.optimizer_bytes // shards) + x.gradient_bytes,
        )
        self._gradients = _sums(layers, lambda layer: layer.gradient_bytes)
        self._update = _sums(layers, lambda layer: layer.update_bytes)
        self._deferred = _sums(layers, lambda layer: layer.deferred_bytes)
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
        """Return the bytes of parameters, gradients, optimizer state and snapshots."""
        return self._state[layers[1]] - self._state[layers[0]]

    def graph(self, layers: Range) -> int:
        """Return the bytes that the graph of a micro-batch keeps.

        The last stage keeps its output if the loss does; each other stage keeps it in any case.
        """
        first, stop = layers
        inner = self._between[stop] - self._between[first + 1]
        last, facts = self.facts.layers[stop - 1], self.facts
        if stop == len(facts.layers):
            output = max(last.saved_output_bytes, facts.loss_saved_input_bytes)
            output += facts.loss_saved_bytes
        else:
            output = max(last.output_bytes, last.saved_output_bytes)
        return self._saved[stop] - self._saved[first] + inner + output

    def stage(self, layers: Range, ends: Ends = _ENDS) -> StageBytes:
        """Return the bytes of a stage.

        A stage receives into a buffer for each input that it holds, and into CHANNEL_CAPACITY more
        ahead of need. A gradient is held for one action, or to the second part of a split backward.
        Where both ends map the buffers, they are in the sender's memory too.
        """
        first, stop = layers
        facts, count = self.facts, self._microbatches
        is_first, is_last = first == 0, stop == len(facts.layers)
        ahead, mapped = min(CHANNEL_CAPACITY, count), facts.maps_frames
        value, fixed, held, gradient = self.input(first), self.state(layers), 0, 0
        if is_first:
            # All micro-batches are parts of the mini-batch.
            fixed += _BATCHES * count * (value + facts.target_bytes)
            fixed += mapped * ends.sent_targets * facts.target_bytes
        else:
            held += value
            if ends.receives and mapped:
                fixed += ends.returned * value * facts.layers[first - 1].passes_gradient
        if is_last and not is_first and ends.receives_target:
            held += facts.target_bytes
        if not is_last:
            output = facts.layers[stop - 1]
            gradient = output.output_bytes * output.passes_gradient
            if ends.sends and mapped:
                fixed += ends.sent * output.output_bytes
        for skip in facts.skips:
            if first <= skip.target < stop and skip.source < first:
                held += skip.bytes
            elif mapped and first <= skip.source < stop <= skip.target:
                fixed += ends.sent * skip.bytes
        for tie in facts.ties:
            if (first <= tie.source < stop) is not (first <= tie.target < stop):
                fixed += tie.bytes
        fixed += self._exchanged(layers)
        working = max([layer.working_bytes for layer in facts.layers[first:stop]])
        if is_last:
            working = max(working, facts.loss_working_bytes)
        if not ends.has_backward:
            working += max([layer.output_bytes for layer in facts.layers[first:stop]])
            most = min(CHANNEL_CAPACITY + 1, count)
            return StageBytes(
                fixed, held, 0, working, ahead=ahead if ends.receives else 0, most=most
            )
        return StageBytes(
            fixed,
            held,
            self.graph(layers),
            working,
            gradient,
            self._updating(layers),
            self._deferred[stop] - self._deferred[first],
            ahead if ends.receives else 0,
            ahead if ends.sends else 0,
            count,
        )

    def _updating(self, layers: Range) -> int:
        """Return the bytes that the update of a stage's weights takes for a time.

        A replica adds up its part of the gradients into memory of its own.
        """
        first, stop = layers
        replicas, size = self.facts.replicas, self._gradients[stop] - self._gradients[first]
        sums = -(-size // replicas) if replicas > 1 else 0
        if self.facts.updates_at_once:
            return max(sums, self._update[stop] - self._update[first])
        return max(sums, *[layer.update_bytes for layer in self.facts.layers[first:stop]])

    def _exchanged(self, layers: Range) -> int:
        """Return the bytes of the buffers by which replicas exchange gradients.

        Each other replica sends pieces of the part that this one adds up: one is in use, and others
        arrive. Where both ends map the buffers, those of what this one sends are here too.
        """
        first, stop = layers
        others, size = self.facts.replicas - 1, self._gradients[stop] - self._gradients[first]
        if not size:
            return 0
        part = -(-size // (_ELEMENT * (others + 1)))
        count = pieces(part)
        buffers = min(count, CHANNEL_CAPACITY + 1) * (1 + self.facts.maps_frames)
        return others * buffers * -(-part // count) * _ELEMENT


Moments = tuple[tuple[Held, ...], ...]
"""For each moment at which a worker may hold most, what it holds of each of its stages."""


def moments(schedule: Schedule) -> list[Moments]:
    """Return, by worker, what it holds at the moments at which it may hold most.

    A moment at which it holds no more of anything than at another is left out. If the schedule
    recomputes every micro-batch, and splits no backward, the result is for any recompute mode; else
    only for ``always``, which then stands for the schedule as it is.
    """
    return [*map(moments_of, schedule.workers, schedule.placement.held)]


def moments_of(actions: Sequence[Action], held: Sequence[int]) -> Moments:
    """Return the same for the actions of one worker, which holds some stages."""
    again = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.RECOMPUTE}
    now = {stage: [0, 0, 0, 0, 0] for stage in held}
    found: dict[tuple[tuple[int, ...], ...], None] = {}
    grown = False

    def note() -> None:  # before something is released: until then it holds ever more
        found[tuple(tuple(now[stage]) for stage in held)] = None

    for kind, stage, m, _ in actions:
        counts = now[stage]
        if kind is Kind.FORWARD:
            counts[0] += 1
            counts[1] += 1
            counts[2] += 1
            counts[3] += 1
            grown = True
            if (stage, m) in again:
                note()
                grown = False
                counts[2] -= 1
                counts[3] -= m != 0
        elif kind is Kind.RECOMPUTE:
            counts[2] += 1
            counts[3] += m != 0
            grown = True
        elif kind is Kind.BACKWARD_INPUT:
            counts[4] += 1
            grown = True
        elif kind in WEIGHTS:
            if grown:
                note()
                grown = False
            for at in range(4):
                counts[at] -= 1
            counts[4] -= kind is Kind.BACKWARD_WEIGHT
    return tuple(tuple(Held(*counts) for counts in moment) for moment in _most(found))


def _most(moments: Iterable[tuple[tuple[int, ...], ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Return the moments that no other one exceeds in everything."""
    flat = sorted({sum(moment, ()): moment for moment in moments}.items(), reverse=True)
    kept: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = []
    for numbers, moment in flat:
        if not any(all(map(ge, k, numbers)) for k, _ in kept):
            kept.append((numbers, moment))
    return [moment for _, moment in kept]


def peak(base: int, moments: Moments, stages: Sequence[StageBytes], modes: Sequence[str]) -> int:
    """Return the peak bytes of a worker, of which the process without layers takes `base`."""
    columns = zip(*moments, strict=True)
    most = [(max(h.inputs for h in c), max(h.deferred for h in c)) for c in columns]
    lasting = sum([stage.lasting(*counts) for stage, counts in zip(stages, most, strict=True)])
    passing = 0
    for moment in moments:
        held = zip(stages, moment, modes, strict=True)
        passing = max(passing, sum([stage.passing(counts, mode) for stage, counts, mode in held]))
    working = max([stage.working for stage in stages])
    updating = sum([stage.update for stage in stages])
    return base + lasting + max(passing + working, updating)


def _sums(layers: Sequence[LayerFacts], value: Callable[[LayerFacts], int]) -> tuple[int, ...]:
    return tuple(accumulate(map(value, layers), initial=0))
