"""When the state is copied and written, and what a checkpoint consists of. Pure.

A checkpoint is usually written beside steps: each worker copies its state while the next step runs
(:mod:`pipeworker.coordinator.steps.snapshots`) and writes the copy. At the end of a job, and where
training must wait for the disk, nothing runs until the checkpoint is complete.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.coordinator.blueprint import Blueprint
from pipeworker.coordinator.effects import Commit
from pipeworker.coordinator.steps.progress import Progress
from pipeworker.coordinator.steps.snapshots import Snapshots, Writing
from pipeworker.job.options import Interval, Options
from pipeworker.plan.placement import Placement
from pipeworker.wire.messages.checkpoint import Copy, Save


@dataclass(slots=True)
class Saving:
    """The decisions of a generation about checkpoints and snapshots."""

    options: Options
    placement: Placement
    progress: Progress
    snapshots: Snapshots

    @property
    def writers(self) -> int:
        """The number of ranks, from rank 0 on, that hold the whole state together.

        That is one replica, unless each replica holds a part of the optimizer's state.
        """
        placement = self.placement
        return placement.ranks if self.options.shard_optimizer else placement.workers

    @property
    def blocks_training(self) -> bool:
        """Whether training waits for a checkpoint that is due.

        It always does with a loop of the user's own, which may change weights between two calls.
        """
        busy = bool(self.snapshots.writing) and self.options.checkpoint_busy == "wait"
        return busy or self.options.own_loop

    def is_due(self, now: float) -> bool:
        """Return whether a checkpoint was requested, or it is time for the next one."""
        if self.progress.save_requested:
            return True
        every, since = self.options.checkpoint_every, now - self.progress.saved_at
        return every is not None and Interval.parse(every).due(self.progress.steps, since)

    def begin_blocking(self, now: float) -> Save:
        """Begin a checkpoint of the current step for which training waits."""
        slot = self.snapshots.blocking_slot()
        self._begin(slot, now)
        return Save(self.progress.steps, slot)

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
            self._begin(slot, now)
        return Copy(state.step, slot, save)

    def commit(self, writing: Writing, blueprint: Blueprint) -> Commit:
        """Return the effect that completes a checkpoint of which every part is written."""
        state, name = writing.state, blueprint.names.of_numbered
        return Commit(
            state.step,
            state.scaler,
            tuple(tuple(map(name, tie.names)) for tie in blueprint.ties),
            blueprint.names.prefixes,
            tuple(file for rank in sorted(writing.files) for file in writing.files[rank]),
            state.evaluation,
        )

    def _begin(self, slot: int, now: float) -> None:
        self.progress.save_requested, self.progress.saved_at = False, now
        self.snapshots.begin_write(self.progress.job_state, slot, self.writers)
