"""The facts of a network: its kinds of layers dealt out to be measured, and put together. Pure.

Alike layers are of one kind, which is measured once. Kinds whose facts are known from an earlier
job are not measured. The worker that reads the data gets the first layer and the loss, because it
has the real input and target; it runs the whole network if there is no outline of it, or if a kind
cannot be measured on a made-up input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipeworker.facts.connections import SharedBuffer
from pipeworker.facts.layer_facts import LayerFacts, NetworkFacts
from pipeworker.facts.outline import LayerKind, Machine, Outline
from pipeworker.plan.placement import Placement
from pipeworker.wire.messages.profile import Measure, Measured

_LOCAL = (60e-6, 1 / 4e9)
_REMOTE = (150e-6, 1 / 1e9)
"""Latency in seconds and seconds per byte of a transfer on one host, and to another one."""
_HANDLING = 100e-6
"""Seconds of a send or a receive on a worker that computes on the CPU: an ordinary one, between
layers that leave nothing of it in the caches."""
_ALIKE = 0.1
"""The relative difference up to which two unlike devices count as equally fast."""


@dataclass(slots=True)
class Measuring:
    """The facts of a network while they are found.

    Attributes:
        machines: what each rank computes on.
        outline: that of the network; None if it could not be drawn on fake tensors.
        known: facts of the outline's kinds by digest; at first those of earlier jobs.
        counted: whether facts are counts, and nothing is measured.
        slots: snapshots of each worker's state that its host keeps.
        frozen: the layers that have nothing to train, as all workers know.
        shared_buffers: buffers that are in several layers and may change in a forward.
        fresh: the facts that this job has measured, by digest.
        problem: why a kind could not be measured, or the network not be run; of several the last.
    """

    placement: Placement
    machines: Sequence[Machine]
    hosts: Sequence[str]
    outline: Outline | None
    known: dict[str, LayerFacts]
    counted: bool = False
    slots: int = 0
    frozen: tuple[int, ...] = ()
    shared_buffers: tuple[SharedBuffer, ...] = ()
    fresh: dict[str, LayerFacts] = field(default_factory=dict)
    problem: str = ""
    _ran_in_order: bool = False
    _references: dict[int, float] = field(default_factory=dict)
    _measured: list[Measured] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.counted and self.outline is None:
            why = f": {self.problem}" if self.problem else ""
            self.problem = f"they cannot be run on fake tensors{why}"
        kinds = self.outline.kinds if self.outline else ()
        self.known = {k.digest: self.known[k.digest] for k in kinds if k.digest in self.known}
        if self.outline and self.counted:
            self.known = {k.digest: k.counted for k in kinds if k.counted}
            if loss := self._loss_digest:  # a few operations for each element of the last output
                last = self.known.get(kinds[self.outline.of_layer[-1]].digest)
                size = last.output_bytes if last else 0
                self.known[loss] = LayerFacts(
                    "loss", saved_bytes=size, saved_input_bytes=size, working_bytes=size
                )

    def requests(self) -> dict[int, Measure]:
        """Return what to ask of workers, by rank; nothing once all is known."""
        if self.counted:
            return {}
        unlike = len({machine.name for machine in self.machines}) > 1
        compares = unlike and not self._references
        if self.outline is None:
            return {} if self._ran_in_order else self._in_order(compares=compares)
        missing = [kind for kind in self.outline.kinds if kind.digest not in self.known]
        if self._measured and missing:  # some could not be measured by themselves
            return {} if self._ran_in_order else self._in_order(compares=False)
        dealt = deal(missing, len(self.outline.of_layer), self.placement)
        return {
            rank: Measure(tuple(kinds), self.outline.types, reference=compares)
            for rank, kinds in dealt.items()
            if kinds or compares
        }

    def _in_order(self, *, compares: bool) -> dict[int, Measure]:
        self._ran_in_order = True
        first = self.placement.rank_of(0)
        asked = {first: Measure(in_order=True, reference=compares)}
        if compares:
            others = set(range(self.placement.ranks)) - {first}
            asked.update({rank: Measure(reference=True) for rank in others})
        return asked

    def add(self, answer: Measured) -> None:
        """Add what a worker has measured."""
        self._measured.append(answer)
        if answer.reference:
            self._references[answer.rank] = answer.reference
        self.problem = answer.problem or self.problem
        if answer.outline is not None:
            self.outline = answer.outline

    def close_round(self) -> None:
        """Take in what was measured, in seconds of the worker that reads the data."""
        for answer in self._measured:
            speed = self._speed(answer.rank)
            for digest, facts in zip(answer.digests, answer.facts, strict=True):
                self.fresh[digest] = self.known[digest] = _scaled(facts, speed)

    def facts(self) -> NetworkFacts | None:
        """Return the facts of the network; None if some are missing."""
        outline = self.outline
        if outline is None:
            return None
        found = [self.known.get(outline.kinds[number].digest) for number in outline.of_layer]
        layers = tuple(one for one in found if one is not None)
        if len(layers) < len(found):
            return None
        loss = self._loss or LayerFacts("loss")
        ranks = [self.placement.rank_of(stages[0]) for stages in self.placement.held]
        on_host = not any(machine.unit for machine in self.machines)
        one_host = len(set(self.hosts)) == 1
        latency, seconds_per_byte = _LOCAL if one_host else _REMOTE
        names = {self.machines[rank].name for rank in ranks}
        return NetworkFacts(
            layers,
            outline.input_bytes,
            outline.target_bytes,
            loss.forward,
            outline.skips,
            outline.ties,
            outline.samples,
            tuple(self._speed(rank) for rank in ranks),
            tuple(self._limit(rank) for rank in ranks),
            max(self.machines[rank].base_bytes for rank in ranks),
            latency,
            seconds_per_byte,
            _HANDLING if on_host else 0.0,
            not self.counted,
            loss.saved_bytes,
            loss.saved_input_bytes,
            loss.working_bytes,
            copies=self.slots if on_host else 0,
            maps_frames=on_host and one_host,
            updates_at_once=not on_host,
            frozen=self.frozen,
            shared_buffers=self.shared_buffers,
            device=names.pop() if len(names) == 1 else "",
            batch_samples=outline.batch_samples,
        )

    @property
    def _loss(self) -> LayerFacts | None:
        """The facts of the loss, if they are known."""
        return self.known.get(self._loss_digest)

    @property
    def _loss_digest(self) -> str:
        """The digest of the loss, as a kind of layer; "" if the outline has none."""
        outline = self.outline
        return outline.kinds[outline.loss].digest if outline and outline.loss >= 0 else ""

    @property
    def warning(self) -> str:
        """The text of a warning if the facts lack those of the loss; else ""."""
        if self._loss is not None or self.facts() is None:
            return ""
        return f"loss() cannot be measured, and the plan counts it as 0 s: {self.problem}"

    def summary(self, seconds: float) -> str:
        """Return what was done, for the log."""
        if self.outline is None or self.facts() is None:
            done = "counted" if self.counted else "measured"
            return f"layers cannot be {done}: {self.problem}; they are divided evenly"
        layers, kinds = len(self.outline.of_layer), len(set(self.outline.of_layer))
        if self.counted:
            return f"counted the operations of {kinds} unlike layers of {layers}"
        if not self.fresh:
            return f"the facts of all {layers} layers are known from an earlier job"
        count = len(self.fresh) - (self._loss_digest in self.fresh)
        return f"measured {count} unlike layers of {layers} in {seconds:.2f} s"

    def _speed(self, rank: int) -> float:
        """Return how fast a rank computes, against the one that reads the data."""
        first = self.placement.rank_of(0)
        if self.machines[rank].name == self.machines[first].name:
            return 1.0
        own, other = self._references.get(rank), self._references.get(first)
        if not own or not other or abs(other / own - 1.0) < _ALIKE:
            return 1.0
        return other / own

    def _limit(self, rank: int) -> int | None:
        """Return the memory of a rank: its part of that of a device, or a host, which it shares."""
        places = Counter(
            (host, machine.unit) for host, machine in zip(self.hosts, self.machines, strict=True)
        )
        machine = self.machines[rank]
        return machine.limit // places[self.hosts[rank], machine.unit] or None


def deal(
    kinds: Sequence[LayerKind], layers: int, placement: Placement
) -> dict[int, list[LayerKind]]:
    """Return the kinds that each rank measures: as many each, the first and the loss where data is.

    `layers` is the number of layers, which the kind of the loss has as its layer.
    """
    first = placement.rank_of(0)
    dealt = {first: [kind for kind in kinds if kind.layer in (0, layers)]}
    dealt.update({rank: [] for rank in range(placement.ranks) if rank != first})
    for kind in kinds:
        if kind.layer not in (0, layers):
            least = min(dealt, key=lambda rank: (len(dealt[rank]), rank == first))
            dealt[least].append(kind)
    return dealt


def _scaled(facts: LayerFacts, speed: float) -> LayerFacts:
    """Return facts with the seconds that they take on a worker of speed 1."""
    if speed == 1.0:
        return facts
    names = ("forward", "backward", "backward_input", "update")
    return replace(facts, **{name: speed * getattr(facts, name) for name in names})
