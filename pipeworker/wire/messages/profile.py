"""Messages about the facts of layers, which are measured before the plan is drawn."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from pipeworker.facts.layer_facts import LayerFacts
from pipeworker.facts.limits import LONGEST_TEXT, check, check_names
from pipeworker.facts.outline import LayerKind, Outline


@dataclass(frozen=True, slots=True)
class Measure:
    """A command to measure kinds of layers, each by itself.

    Attributes:
        types: as in :class:`Outline`.
        in_order: whether to run the whole network on real tensors, one layer after the other, and
            to measure its kinds on these; it has no other kinds then. Only the worker that reads
            the data can.
        reference: whether to time a fixed work too, by which workers are compared.
    """

    kinds: tuple[LayerKind, ...] = ()
    types: tuple[str, ...] = ()
    in_order: bool = False
    reference: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """The facts that a worker measured.

    Attributes:
        digests: those of the kinds that could be measured.
        facts: their facts.
        outline: of the network, if it was run in order.
        problem: why a kind could not be measured, or why there is no outline.
        reference: seconds of the fixed work; 0 if it was not timed.
    """

    rank: int
    digests: tuple[str, ...] = ()
    facts: tuple[LayerFacts, ...] = ()
    outline: Outline | None = None
    problem: str = ""
    reference: float = 0.0

    def __post_init__(self) -> None:
        check_names(self.digests, "digests")
        check(len(self.digests) == len(self.facts), f"{len(self.digests)} digests for other facts")
        check(len(self.problem) <= LONGEST_TEXT, "too long a problem")
        values = [value for one in self.facts for value in dataclasses.astuple(one)]
        numbers = [value for value in values if not isinstance(value, str)]
        possible = all(0 <= number < math.inf for number in (*numbers, self.reference))
        check(possible, "negative or unbounded facts")
