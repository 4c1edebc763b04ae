"""One round of calls of the user's own loop: every rank makes the same one. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pipeworker.plan.placement import Placement
from pipeworker.wire.messages.calls import Call, CallKind
from pipeworker.wire.messages.step import Batch


@dataclass(slots=True)
class Calls:
    """The calls of a round as they arrive, from every rank.

    Args:
        deals: what the first stage of replica 0 is given is for all replicas.
    """

    placement: Placement
    deals: bool = False
    _by_rank: dict[int, Call] = field(default_factory=dict)

    def add(self, call: Call) -> str:
        """A rank has called, in a new round where the last is complete.

        Returns:
            What is wrong with it, or nothing.
        """
        if self.complete:
            self._by_rank.clear()
        self._by_rank[call.rank] = call
        other = next(iter(self._by_rank.values()))
        if replace(call, rank=0, batch=None) != replace(other, rank=0, batch=None):
            return (
                f"{self._name(other)} called {_shown(other)} while {self._name(call)} called "
                f"{_shown(call)}: every rank makes the same calls in the same order"
            )
        if self.complete and call.kind is CallKind.STEP and self.batch is None:
            return "step() was given no mini-batch on the first stage"
        if self.complete and call.kind is CallKind.STEP and not self.deals:
            return self._unlike()
        return ""

    def _unlike(self) -> str:
        """What the mini-batches of the replicas do not have in common, if anything."""
        batches = [self._by_rank[rank].batch for rank in self.placement.ranks_of(0)]
        for replica, batch in enumerate(batches):
            if batch is None:
                return f"step() was given no mini-batch on the first stage of replica {replica}"
            if batches[0] and replace(batch, signature=batches[0].signature) != batches[0]:
                return (
                    f"step() was given another mini-batch on replica {replica} than on replica "
                    "0: each is given the whole mini-batch, and takes its part of it"
                )
        return ""

    @property
    def complete(self) -> bool:
        """Whether all ranks have called."""
        return len(self._by_rank) == self.placement.ranks

    @property
    def batch(self) -> Batch | None:
        """The mini-batch that the first stage was given."""
        return self._by_rank[self.placement.rank_of(0)].batch

    @property
    def last(self) -> bool:
        """Of a step: whether it is complete with this mini-batch."""
        return next(iter(self._by_rank.values())).last

    def _name(self, call: Call) -> str:
        return self.placement.names(call.rank)


def _shown(call: Call) -> str:
    """As the user wrote it."""
    if call.loaded is not None:
        return f"load(a checkpoint of step {call.loaded.step})"
    if call.kind in (CallKind.SAVE, CallKind.CLOSE):
        return f"{call.kind.value}()"
    more = ", everywhere=True" if call.everywhere else "" if call.last else ", of several"
    return f"{call.kind.value}(batch{more})"
