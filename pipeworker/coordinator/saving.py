"""When a generation saves, and into which memory slots its workers copy their state. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeworker.coordinator.lifecycle import Lifecycle
from pipeworker.job.interval import Interval
from pipeworker.wire.messages.checkpoint import Copy


@dataclass(slots=True)
class Saving(Lifecycle):
    """The part of a generation that decides about checkpoints and snapshots."""

    _step: int = field(init=False, default=0)

    @property
    def writers(self) -> int:
        """The number of ranks, from rank 0 on, that hold the whole state together.

        That is one replica, unless each replica holds a part of the optimizer's state.
        """
        placement = self.placement
        return placement.ranks if self.options.shard_optimizer else placement.workers

    @property
    def save_blocks(self) -> bool:
        """Whether training waits for a checkpoint that is due.

        It always does with a loop of the user's own, which may change weights between two calls.
        """
        busy = bool(self.snapshots.writing) and self.options.checkpoint_busy == "wait"
        return busy or self.options.own_loop

    def save_is_due(self, now: float) -> bool:
        """Return whether a checkpoint was requested, or it is time for the next one."""
        if self.progress.save_requested:
            return True
        every, since = self.options.checkpoint_every, now - self.progress.saved_at
        return Interval.parse(every).due(self.progress.steps, since)

    def begin_copy(self, now: float, *, save: bool) -> Copy | None:
        """Begin to copy the state while the next step runs, if a copy is due and a slot is free.

        With `save` the copy is also written, as a checkpoint.
        """
        snapshots, state = self.snapshots, self.progress.job_state
        due = snapshots.is_due(state.step, self.progress.seconds)
        slot = snapshots.checkpoint_slot if save else snapshots.free_slot if due else None
        if slot is None:
            return None
        snapshots.begin_copy(state, slot)
        if save:
            self.begin_write(slot, now)
        return Copy(state.step, slot, save)

    def begin_write(self, slot: int, now: float) -> None:
        self.progress.save_requested, self.progress.saved_at = False, now
        self.snapshots.begin_write(self.progress.job_state, slot, self.writers)
