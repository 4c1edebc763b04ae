"""The members of a generation: the workers that have joined, and how long each is silent. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from pipeworker.errors import AGAIN
from pipeworker.facts.failure import Cause, Failure, describe_exit
from pipeworker.facts.position import Position
from pipeworker.plan.placement import Placement
from pipeworker.timings import STALL_FACTOR, Timings
from pipeworker.wire.lines import WorkerExited
from pipeworker.wire.messages.plan import Described, Ready
from pipeworker.wire.messages.presence import Heartbeat, Hello
from pipeworker.wire.messages.step import StepDone

JOIN_FACTOR = 5
"""Worker timeouts within which all workers must join."""
_LARGE_PACKETS = (
    "if ping -M do -s 1400 gets no answer between two hosts of the job, the network drops large "
    "packets: correct the MTU of their interfaces"
)
_LACKS_MEMORY = (
    " when the kernel killed a process of its host because memory was short; give the job more, or "
    "use more --microbatches or --recompute always"
)


@dataclass(slots=True)
class Member:
    """A worker that has joined.

    Attributes:
        name: the worker's name for the user, by the stages it holds.
        unreachable_since: the time at which its connection was found closed, or None.
        moved_at: the time at which its position last changed, or whether it waits, or at which a
            part of what it waits for arrived, or it answered.
        beat: its last heartbeat.
    """

    peer: bytes
    hello: Hello
    name: str
    last_heard: float
    moved_at: float
    beat: Heartbeat
    unreachable_since: float | None = None
    described: Described | None = None
    ready: Ready | None = None
    done: StepDone | None = None
    peak_memory: int = 0

    @property
    def full_name(self) -> str:
        """The name with process and host: ``stage 1 (pid 7 on a)``."""
        return f"{self.name} (pid {self.hello.pid} on {self.hello.host})"

    def class_at(self, position: Position) -> str:
        """Return the class of the layer at a position, or an empty string if it is unknown."""
        for built in self.ready.stages if self.ready else ():
            offset = position.layer - built.first
            if position.layer >= 0 and 0 <= offset < len(built.layers):
                return built.layers[offset]
        return ""

    def heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Store what a heartbeat reports."""
        if (beat.position, beat.waiting) != (self.beat.position, self.beat.waiting):
            self.moved_at = now
        self.beat = beat

    def failure(self, cause: Cause, message: str, position: Position | None = None) -> Failure:
        """Return a failure of this worker, at `position` or at its last known position."""
        at = self.beat.position if position is None else position
        return Failure(cause, message, self.hello.rank, at, self.class_at(at))

    def gone(self) -> Failure:
        """Return the failure of a worker that ended without a report."""
        return self.failure(Cause.LOST, f"the worker of {self.full_name} is gone")


@dataclass(slots=True)
class Roster:
    """The members of a generation, by rank and by peer.

    Attributes:
        limit: seconds that a worker may be silent (``--worker-timeout``).
    """

    placement: Placement
    started: float
    timings: Timings
    limit: float
    members: dict[int, Member] = field(default_factory=dict)
    _rank_of: dict[bytes, int] = field(default_factory=dict)

    @property
    def stall_limit(self) -> float:
        """The seconds that one layer, or ``data()``, may take."""
        return STALL_FACTOR * self.limit

    @property
    def peers(self) -> list[bytes]:
        """The transport identities of all members, in order of joining."""
        return list(self._rank_of)

    @property
    def missing(self) -> list[int]:
        """The ranks that have not joined."""
        return [rank for rank in range(self.placement.ranks) if rank not in self.members]

    def member(self, peer: bytes) -> Member | None:
        """Return the member with this transport identity, or None."""
        return self.members.get(self._rank_of.get(peer, -1))

    def now(self, now: float) -> list[dict[str, Any]]:
        """Return what each worker does at present, by its last heartbeat, as JSON has it."""
        return [
            {
                "worker": member.hello.rank,
                "replica": self.placement.replica_of(member.hello.rank),
                "host": member.hello.host,
                "stages": list(self.placement.stages_of(member.hello.rank)),
                "phase": member.beat.position.phase.name.lower(),
                "step": member.beat.position.step,
                "microbatch": member.beat.position.microbatch,
                "layer": member.beat.position.layer,
                "class": member.class_at(member.beat.position),
                "waits": bool(member.beat.waiting),
                "memory_bytes": member.beat.memory,
                "held": member.beat.held,
                "silent_seconds": round(max(0.0, now - member.last_heard), 1),
            }
            for member in self.members.values()
        ]

    def admit(self, peer: bytes, hello: Hello, now: float) -> bool:
        """Add a worker and return True, unless its rank is taken or not part of the job."""
        if hello.rank not in self.missing:
            return False
        name, beat = self.placement.names(hello.rank), Heartbeat(hello.rank, Position())
        self.members[hello.rank] = Member(peer, hello, name, now, now, beat)
        self.members = dict(sorted(self.members.items()))
        self._rank_of[peer] = hello.rank
        return True

    def arrange(self, placement: Placement) -> None:
        """Name the workers by the stages that they hold in another placement."""
        self.placement = placement
        for rank, member in self.members.items():
            member.name = placement.names(rank)

    def disconnected(self, peer: bytes, now: float) -> None:
        """Note that the connection of `peer` is closed; it may be reopened."""
        member = self.member(peer)
        if member is not None:
            member.unreachable_since = member.unreachable_since or now

    def suspended(self, seconds: float, now: float) -> None:
        """Exclude the time for which the coordinator was suspended from every silence."""
        self.started = min(now, self.started + seconds)
        for member in self.members.values():
            member.last_heard = min(now, member.last_heard + seconds)
            member.moved_at = min(now, member.moved_at + seconds)
            if member.unreachable_since is not None:
                member.unreachable_since = min(now, member.unreachable_since + seconds)

    def silent(self, now: float) -> list[int]:
        """Return the ranks whose heartbeats have stopped."""
        limit = self.timings.silence
        return [rank for rank, m in self.members.items() if now - m.last_heard > limit]

    def worker_exited(self, report: WorkerExited) -> Failure:
        """Return the failure of a worker process that ended; it may not have joined."""
        text = f"the worker of {self.placement.names(report.rank)} {describe_exit(report.code)}"
        if report.lacks_memory:
            text += _LACKS_MEMORY
        member = self.members.get(report.rank)
        if member is None:
            text = report.unreachable or text
            return Failure(Cause.LOST, text, rank=report.rank, position=report.position)
        if report.code == AGAIN and self.has_several_hosts:
            text = f"{member.full_name} no longer receives from the coordinator; {_LARGE_PACKETS}"
        return member.failure(Cause.LOST, text, report.position)

    @property
    def has_several_hosts(self) -> bool:
        """Whether the workers that have joined are on several hosts."""
        return len({member.hello.host for member in self.members.values()}) > 1

    def unheard(self, now: float) -> Failure | None:
        """Return the failure of a worker that is unreachable, silent or missing for too long."""
        for member in self.members.values():
            since = member.unreachable_since
            if since is not None and now - since > self.timings.grace:
                return member.gone()
            if now - member.last_heard > self.limit:
                text = f"{member.full_name} has not answered for {self.limit:g} s"
                return member.failure(Cause.HUNG, text)
        if self.missing and now - self.started > JOIN_FACTOR * self.limit:
            return self.absent(JOIN_FACTOR * self.limit)
        return None

    def absent(self, limit: float) -> Failure:
        """Return the failure of the ranks that have not joined within `limit` seconds."""
        ranks = ", ".join(map(str, self.missing))
        return Failure(Cause.LOST, f"rank {ranks} did not join within {limit:g} s")

    def deadlocked(self, awaited: Collection[int]) -> Failure | None:
        """Return a failure if all awaited workers have reported for too long that they wait.

        What they wait for may have come from a worker that has moved since, and is not awaited.
        Between hosts they may wait for a connection that is silent for some time after an outage.
        """
        members = [member for rank, member in self.members.items() if rank in awaited]
        moved_at = max((member.moved_at for member in self.members.values()), default=0.0)
        waited = [m.last_heard - moved_at for m in members if m.beat.waiting]
        limit = self.limit
        if self.has_several_hosts:
            limit = self.timings.network_patience(limit)
        if not members or len(waited) < len(members) or min(waited) <= limit:
            return None
        return self.deadlock(awaited, limit)

    def deadlock(self, awaited: Collection[int], limit: float) -> Failure:
        """Return the failure of awaited workers that have waited for `limit` seconds."""
        members = [member for rank, member in self.members.items() if rank in awaited]
        several_hosts = self.has_several_hosts
        names = " and ".join(m.full_name if several_hosts else m.name for m in members)
        have = "has" if len(members) == 1 else "have"
        text = f"{names} {have} waited {limit:g} s without progress (deadlock?)"
        if several_hosts:
            text += f"; {_LARGE_PACKETS}"
        return members[0].failure(Cause.HUNG, text)

    def stalled(self, now: float, limit: float) -> Failure | None:
        """Return a failure if no worker has moved for `limit` seconds, so that one must be hung."""
        member = self.standing(limit, now)
        if member is None:
            return None
        text = f"{member.full_name} has made no progress for {limit:g} s"
        return replace(member.failure(Cause.HUNG, text), traceback=member.beat.stack)

    def standing(self, seconds: float, now: float) -> Member | None:
        """Return the first worker that computes, if none has moved for more than `seconds`."""
        busy = (member for member in self.members.values() if not member.beat.waiting)
        return next(busy, None) if self.none_moved(seconds, now) else None

    def none_moved(self, seconds: float, now: float) -> bool:
        """Return whether no worker has moved for more than `seconds`."""
        return all(now - member.moved_at > seconds for member in self.members.values())

    def memory(self) -> tuple[int, ...]:
        """Return the present memory of each rank in whole MiB, as bytes; () if none is known."""
        found = tuple(
            self.members[rank].beat.memory >> 20 << 20 if rank in self.members else 0
            for rank in range(self.placement.ranks)
        )
        return found if any(found) else ()

    def peak_memory(self) -> tuple[int, ...]:
        """Return the peak memory of each rank in bytes, 0 where it is unknown."""
        members = map(self.members.get, range(self.placement.ranks))
        return tuple(member.peak_memory if member else 0 for member in members)
