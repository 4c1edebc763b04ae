"""Who is in the job, what is known of each, and who has been silent too long. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeworker.plan.placement import Placement
from pipeworker.timings import Timings
from pipeworker.wire.lines import WorkerExited
from pipeworker.wire.messages.failure import Cause, Failure
from pipeworker.wire.messages.plan import Described, Ready
from pipeworker.wire.messages.position import Position
from pipeworker.wire.messages.presence import Heartbeat, Hello
from pipeworker.wire.messages.step import StepDone

JOIN_FACTOR = 5
"""Workers may take this many worker timeouts to join."""
STALL_FACTOR = 30
"""And a layer, or ``data()``, this many: the user's code that takes longer is taken to be stuck."""


@dataclass(slots=True)
class Member:
    """What is known of one rank.

    Attributes:
        name: how it is called by what it holds.
        waits: for others, at its position, `since` when.
    """

    peer: bytes
    hello: Hello
    name: str
    heard: float
    unreachable: float | None = None
    position: Position = field(default_factory=Position)
    waits: bool = False
    since: float = 0.0
    described: Described | None = None
    ready: Ready | None = None
    done: StepDone | None = None
    peak_memory: int = 0

    def class_at(self, position: Position) -> str:
        """The class of the layer at a position; empty where it is not known."""
        for built in self.ready.stages if self.ready else ():
            offset = position.layer - built.first
            if position.layer >= 0 and 0 <= offset < len(built.layers):
                return built.layers[offset]
        return ""

    def beats(self, beat: Heartbeat, now: float) -> None:
        """It is alive, and says where."""
        if (beat.position, beat.waits) != (self.position, self.waits):
            self.position, self.waits, self.since = beat.position, beat.waits, now

    def failure(self, cause: Cause, what: str, position: Position | None = None) -> Failure:
        """Something happened to it, where it was last heard of or at `position`."""
        at = self.position if position is None else position
        return Failure(
            cause, what, rank=self.hello.rank, position=at, layer_class=self.class_at(at)
        )

    def gone(self) -> Failure:
        """It ended without a word."""
        where = f"(pid {self.hello.pid} on {self.hello.host})"
        return self.failure(Cause.LOST, f"the worker of {self.name} {where} is gone")


@dataclass(slots=True)
class Roster:
    """The members of a job, by rank and by peer.

    Args:
        started: when the generation did.
    """

    placement: Placement
    started: float
    timings: Timings
    members: dict[int, Member] = field(default_factory=dict)
    _rank_of: dict[bytes, int] = field(default_factory=dict)

    @property
    def peers(self) -> list[bytes]:
        return list(self._rank_of)

    @property
    def missing(self) -> list[int]:
        """The ranks that have not joined."""
        return [rank for rank in range(self.placement.ranks) if rank not in self.members]

    def member(self, peer: bytes) -> Member | None:
        """The one whose transport identity this is."""
        return self.members.get(self._rank_of.get(peer, -1))

    def knows(self, peer: bytes) -> bool:
        return peer in self._rank_of

    def admit(self, peer: bytes, hello: Hello, now: float) -> bool:
        """A rank joins, if there is such a one and it is free. Members stay in order of rank."""
        if hello.rank not in self.missing:
            return False
        name = self.placement.names(hello.rank)
        self.members[hello.rank] = Member(peer, hello, name, now, since=now)
        self.members = dict(sorted(self.members.items()))
        self._rank_of[peer] = hello.rank
        return True

    def sender(self, peer: bytes, rank: int) -> Member | None:
        """The member of a rank, if `peer` may speak for it."""
        return self.members.get(rank) if self._rank_of.get(peer) == rank else None

    def unreachable(self, peer: bytes, now: float) -> None:
        """The connection of `peer` is closed; it may come back."""
        if peer in self._rank_of:
            member = self.members[self._rank_of[peer]]
            member.unreachable = member.unreachable or now

    def stopped(self, seconds: float, now: float) -> None:
        """Nobody heard what was said for so long before now: it counts as no silence."""
        self.started = min(now, self.started + seconds)
        for member in self.members.values():
            member.heard = min(now, member.heard + seconds)
            member.since = min(now, member.since + seconds)
            if member.unreachable is not None:
                member.unreachable = min(now, member.unreachable + seconds)

    def exited(self, report: WorkerExited) -> Failure:
        """The process of a rank, which may not have joined, ended."""
        how = (
            f"was killed by signal {-report.code}"
            if report.code < 0
            else f"exited with status {report.code}"
        )
        text = f"the worker of {self.placement.names(report.rank)} {how}"
        member = self.members.get(report.rank)
        if member is None:
            return Failure(Cause.LOST, text, rank=report.rank, position=report.position)
        return member.failure(Cause.LOST, text, report.position)

    def overdue(self, now: float, patience: float) -> Failure | None:
        """Who has been unreachable, silent or missing for too long.

        Args:
            patience: seconds a worker may be silent.
        """
        for member in self.members.values():
            if member.unreachable is not None and now - member.unreachable > self.timings.echo:
                return member.gone()
            if now - member.heard > patience:
                who = f"{member.name} (pid {member.hello.pid} on {member.hello.host})"
                return member.failure(Cause.HUNG, f"{who} has not answered for {patience:g} s")
        if self.missing and now - self.started > JOIN_FACTOR * patience:
            ranks = ", ".join(map(str, self.missing))
            text = f"rank {ranks} did not join within {JOIN_FACTOR * patience:g} s"
            return Failure(Cause.LOST, text)
        return None

    def stuck(self, ranks: Iterable[int], now: float, patience: float) -> Failure | None:
        """All of these wait, none has moved for so long: what they wait for never comes."""
        members = [self.members[rank] for rank in sorted(ranks) if rank in self.members]
        if not members or not all(m.waits and now - m.since > patience for m in members):
            return None
        names = " and ".join(member.name for member in members)
        who = f"{names} wait{'s' if len(members) == 1 else ''} for what does not come"
        text = f"{who}: nothing has moved for {patience:g} s"
        return members[0].failure(Cause.HUNG, text)

    def stalled(self, now: float, patience: float) -> Failure | None:
        """Nobody has moved for so long that who computes is taken to be stuck."""
        limit = STALL_FACTOR * patience
        busy = [member for member in self.members.values() if not member.waits]
        if not busy or not self.still(now, limit):
            return None
        member = busy[0]
        who = f"{member.name} (pid {member.hello.pid} on {member.hello.host})"
        return member.failure(Cause.HUNG, f"{who} has not moved for {limit:g} s")

    def still(self, now: float, patience: float) -> bool:
        """Whether nobody has moved for so long."""
        return all(now - member.since > patience for member in self.members.values())

    def silent(self, now: float) -> list[int]:
        """Who has fallen silent, so that it may be gone."""
        return [rank for rank, m in self.members.items() if now - m.heard > self.timings.silent]

    def peak_memory(self) -> tuple[int, ...]:
        """Bytes, by rank; 0 where nothing is known."""
        return tuple(
            self.members[rank].peak_memory if rank in self.members else 0
            for rank in range(self.placement.ranks)
        )
