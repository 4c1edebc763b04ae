"""The state that workers before this one left in memory, on this host and on others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from pipeworker.errors import PipeworkerError
from pipeworker.plan.placement import Placement
from pipeworker.record import checkpoint
from pipeworker.record.manifest import Shard
from pipeworker.record.memory import Memory
from pipeworker.wire.messages.checkpoint import Restore
from pipeworker.wire.messages.plan import Plan
from pipeworker.worker.transport.memories import Lender, Mirror, Pantry, borrow
from pipeworker.worker.transport.network import CoordinatorStore, Network
from pipeworker.worker.transport.proof import Membership

Where = tuple[CoordinatorStore, Network, Membership]
"""How other hosts are reached."""


def needed(
    told: Restore, plan: Plan, placement: Placement, rank: int, stages: Collection[int]
) -> list[int]:
    """The ranks of one replica whose copies have what a worker needs.

    With the stages of before these are its own, and those of the first places of its tied weights,
    where their optimizer's state is.
    """
    if told.ranks != placement.workers:
        return list(range(told.ranks))
    firsts = {tie.stages[0] for tie in plan.ties if {*tie.stages} & {*stages}}
    return sorted({placement.worker_of(rank), *map(placement.rank_of, firsts)})


class Remembered:
    """What this host's memory has, and what passes between it and other hosts'.

    Args:
        memories: of this host, by rank.
        keeps: ranks of other hosts whose copies are kept in them.
        kept: whether hosts keep each other's copies.
        first: whether this worker speaks for its host.
        where: asked for as soon as other hosts matter.
    """

    def __init__(
        self,
        memories: Mapping[int, Sequence[Memory]],
        *,
        keeps: Collection[int],
        kept: bool,
        first: bool,
        where: Callable[[], Where],
    ) -> None:
        self._memories, self._where = memories, where
        self._keeps, self._kept, self._first = keeps, kept, first
        self._lenders: list[Lender] = []  # one, until all have what they need of it
        self._pantries: list[Pantry] = []  # one, where other hosts' copies are kept
        self._borrowed: list[Memory] = []

    def mirror(self, rank: int) -> Mirror | None:
        """Who has another host keep this worker's copies, if they do."""
        return Mirror(rank, *self._where()) if self._kept else None

    def keep(self) -> None:
        """Keep the copies of other hosts from now on, if this worker is to."""
        if self._keeps:
            memories = {rank: self._memories[rank] for rank in self._keeps}
            self._pantries.append(Pantry(memories, *self._where()))

    def shards(self, told: Restore, ranks: Sequence[int], *, here: bool) -> list[Shard]:
        """What the workers of these ranks left in memory, until :meth:`restored`.

        It is that of the first replica which is whole on this host, or else what other hosts have.

        Args:
            here: nothing is taken from other hosts; what is not here is not returned.

        Raises:
            PipeworkerError: nobody has it.
        """
        if self._kept and self._first:
            self._lend(told)
        for start in range(0, max(self._memories, default=0) + 1, told.ranks):
            with suppress(PipeworkerError, KeyError):
                return [self._own(start + rank, told) for rank in ranks]
        return [] if here else [self._found(rank, told) for rank in ranks]

    def restored(self) -> None:
        """What was borrowed is needed no more."""
        while self._borrowed:
            self._borrowed.pop().close()

    def built(self) -> None:
        """All workers are: nobody borrows any more."""
        while self._lenders:
            self._lenders.pop().close()

    def close(self) -> None:
        """Let go of all that passes between hosts."""
        self.built()
        while self._pantries:
            self._pantries.pop().close()
        self.restored()

    def _own(self, rank: int, told: Restore) -> Shard:
        """What this host's memory has of a rank.

        Raises:
            KeyError: nothing.
            PipeworkerError: not that step.
        """
        return checkpoint.remembered([self._memories[rank][told.slot]], told.step)[0]

    def _found(self, rank: int, told: Restore) -> Shard:
        """What there is of a rank, wherever it is.

        Raises:
            PipeworkerError: nothing.
        """
        with suppress(PipeworkerError, KeyError):
            return self._own(rank, told)
        if not self._kept:
            text = f"the copy of step {told.step} in memory is gone: go on from disk, by --resume"
            raise PipeworkerError(text)
        self._borrowed.append(borrow(rank, told.slot, *self._where()))
        return checkpoint.remembered(self._borrowed[-1:], told.step)[0]

    def _lend(self, told: Restore) -> None:
        """Let other hosts have what this one's memory has."""
        whole = []
        for rank in self._memories:
            with suppress(PipeworkerError):
                self._own(rank, told)
                whole.append(rank)
        self._lenders.append(Lender(self._memories, whole, *self._where()))
