"""Failures that only the passing of time reveals. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pipeworker.coordinator.roster import Roster
from pipeworker.coordinator.states import State
from pipeworker.facts.failure import Cause, Failure

JOIN_FACTOR = 5
"""Worker timeouts within which all workers must join."""
STALL_FACTOR = 30
"""Worker timeouts that one layer, or ``data()``, may take before it counts as hung."""


@dataclass(slots=True)
class Timeouts:
    """The limits on silence and on standing still of a generation.

    Args:
        roster: the members.
        limit: seconds that a worker may be silent (``--worker-timeout``).
        own_loop: whether the user's own loop makes the calls.
        launched: whether a launcher started the workers; if not, a worker may stand in a debugger,
            so one that makes no progress is not ended.
    """

    roster: Roster
    limit: float
    own_loop: bool
    launched: bool

    def expired(self, state: State, awaited: Collection[int], now: float) -> Failure | None:
        """Return the failure of the first limit that is exceeded, or None."""
        failure = self._silence(now)
        if failure is None and state is not State.CALLING:
            failure = self._deadlock(awaited, now)
        if failure is None and self.launched and state is State.STEPPING:
            failure = self._stall(now)
        return failure

    def interrupt_expired(self, state: State, since: float, now: float) -> bool:
        """Return whether a job interrupted at `since` does not reach the end of its step.

        A loop of the user's own may never make another call. Checkpoints are always completed.
        """
        if state in (State.SAVING, State.COMMITTING):
            return False
        if self.own_loop:
            return now - since > self.roster.timings.interrupt
        return now - since > self.limit and self._nobody_moved(now, self.limit)

    def _silence(self, now: float) -> Failure | None:
        """Return the failure of a worker that is unreachable, silent or missing for too long."""
        roster = self.roster
        for member in roster.members.values():
            since = member.unreachable_since
            if since is not None and now - since > roster.timings.grace:
                return member.gone()
            if now - member.last_heard > self.limit:
                text = f"{member.full_name} has not answered for {self.limit:g} s"
                return member.failure(Cause.HUNG, text)
        if roster.missing and now - roster.started > JOIN_FACTOR * self.limit:
            ranks = ", ".join(map(str, roster.missing))
            text = f"rank {ranks} did not join within {JOIN_FACTOR * self.limit:g} s"
            return Failure(Cause.LOST, text)
        return None

    def _deadlock(self, awaited: Collection[int], now: float) -> Failure | None:
        """Return a failure if all awaited workers wait, and none has moved for too long."""
        found = self.roster.members
        members = [found[rank] for rank in sorted(awaited) if rank in found]
        if not members or not all(m.waits and now - m.moved_at > self.limit for m in members):
            return None
        names = " and ".join(member.name for member in members)
        have = "has" if len(members) == 1 else "have"
        text = f"{names} {have} waited {self.limit:g} s without progress (deadlock?)"
        return members[0].failure(Cause.HUNG, text)

    def _stall(self, now: float) -> Failure | None:
        """Return a failure if no worker has moved for so long that one must be hung."""
        limit = STALL_FACTOR * self.limit
        busy = [member for member in self.roster.members.values() if not member.waits]
        if not busy or not self._nobody_moved(now, limit):
            return None
        text = f"{busy[0].full_name} has made no progress for {limit:g} s"
        return busy[0].failure(Cause.HUNG, text)

    def _nobody_moved(self, now: float, seconds: float) -> bool:
        return all(now - member.moved_at > seconds for member in self.roster.members.values())
