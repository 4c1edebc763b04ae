"""Copies of the job's state: which memory slot holds which step, and when to copy. Pure.

Between two updates weights and optimizer state do not change, so a worker copies them while the
next step runs. A copy is a *snapshot* once it is complete on all workers. It goes into a slot, the
same one on all workers: with two slots, the last snapshot stays until the next one is complete. A
slot that is being written to disk is not overwritten either, nor the last snapshot that the
coordinator's parent knows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from pipeworker.coordinator.effects import JobState
from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.wire import lines
from pipeworker.wire.messages.checkpoint import Restore, Saved
from pipeworker.wire.messages.step import StepDone

BUDGET = 0.01
"""Share of the time of steps that copying may take where the user has not chosen an interval."""
_LEAST_SECONDS = 1.0
"""Seconds of steps between two copies at least: a restart takes longer, so more copies gain little
and cost more than the seconds that workers measure, because they wake threads on busy cores."""
_COSTS = 4
"""Copies of which the cheapest counts: the first copy into a slot also allocates its memory."""
_MAX_INTERVAL = 1000
LACKED_MEMORY = (
    "snapshots: too little memory is available for them; use more memory, or a shorter "
    "--checkpoint-every, because a loss repeats the steps since the last checkpoint"
)


@dataclass(slots=True)
class Writing:
    """A checkpoint that is being written to disk, and the ranks whose parts are awaited.

    Attributes:
        beside: whether it is written beside the steps; otherwise training waits for it.
    """

    state: JobState
    slot: int
    awaited: set[int]
    beside: bool
    files: dict[int, tuple[CheckpointFile, ...]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Snapshots:
    """The slots of the workers, and the checkpoints that are written from them.

    Args:
        slots: slots of each worker; with one there are no snapshots, only checkpoints.
        every: steps between two snapshots; None to choose by their cost.
        cores: cores of the coordinator's host, which the workers are assumed to share.

    Attributes:
        last: the last snapshot.
        on_disk: the last checkpoint.
        writing: the checkpoints being written, by step.
    """

    slots: int = 1
    every: int | None = None
    cores: int = 1
    last: tuple[JobState, Restore] | None = None
    on_disk: tuple[JobState, Restore] | None = None
    writing: dict[int, Writing] = field(default_factory=dict)
    _written: dict[int, JobState] = field(default_factory=dict)
    _copying: dict[int, JobState] = field(default_factory=dict)
    _known: int | None = None  # the slot that the parent knows, -1 if none, while it does not read
    _warned: bool = False
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=_COSTS))

    @property
    def newest(self) -> tuple[JobState, Restore] | None:
        """The state to resume from: the last snapshot, or a checkpoint that is newer."""
        found = [one for one in (self.last, self.on_disk) if one]
        return max(found, key=lambda one: one[0].step, default=None)

    @property
    def free_slot(self) -> int | None:
        """A slot for a snapshot, whose content is no longer needed; None if there is none."""
        return next((slot for slot in self._unwritten if slot not in self._copying), None)

    @property
    def checkpoint_slot(self) -> int | None:
        """A slot for a checkpoint that is written beside steps; None if there is none.

        It may be the slot of a copy in progress: each worker completes that copy before its state
        changes, so it can be overwritten. Until the new copy is known to be complete on all
        workers, the last snapshot stays.
        """
        return min(self._unwritten, key=self._copying.__contains__, default=None)

    def blocking_slot(self) -> int:
        """Return a slot for a checkpoint that is copied while nothing runs.

        A copy that is not known to be complete is abandoned. A worker waits for the end of a write
        from the same slot.
        """
        slot = self._replaceable[0]
        self._copying.pop(slot, None)
        return slot

    @property
    def _replaceable(self) -> list[int]:
        """The slots without the last snapshot."""
        kept = self.last[1].slot if self.last else -1
        return [slot for slot in range(self.slots) if slot != kept]

    @property
    def _unwritten(self) -> list[int]:
        """The replaceable slots that are not being written to disk, and not the `_known` one."""
        kept = {self._known, *(writing.slot for writing in self.writing.values())}
        return [slot for slot in self._replaceable if slot not in kept]

    def parent_reads(self, reads: bool) -> None:
        """Keep the snapshot that the parent knows until it reads again.

        If the coordinator is lost, the parent starts another one with the last snapshot of which it
        has read. A checkpoint for which training waits may overwrite it.
        """
        known = self.last[1].slot if self.last else -1
        self._known = None if reads else known

    def is_due(self, step: int, seconds: float) -> bool:
        """Return whether the state after `step`, which took `seconds`, is to be copied."""
        if self.slots < 2:
            return False
        since = step - (self.last[0].step if self.last else 0)
        return since >= (self.every or self.interval(seconds))

    def interval(self, seconds: float) -> int:
        """Return the steps of so many seconds after which another copy is worth its cost."""
        if len(self._costs) < _COSTS or not seconds > 0:
            return 1
        apart = max(_LEAST_SECONDS, min(self._costs) / BUDGET)
        return min(_MAX_INTERVAL, math.ceil(apart / seconds))

    def begin_copy(self, state: JobState, slot: int) -> None:
        """Note that the workers begin to copy their state into a slot."""
        self._copying[slot] = state

    def step_done(self, done: Collection[StepDone], ranks: int | None = None) -> list[str]:
        """Take a copy that is complete on all workers as the last snapshot; return new warnings.

        All of them must report the same step: a worker that lacks memory for a copy makes none. A
        copy that is torn on any worker is given up. The first `ranks` workers, or all, hold the
        whole state together.
        """
        warnings: list[str] = []
        if not self._warned and any(d.snapshot_lacked_memory for d in done):
            self._warned, warnings = True, [LACKED_MEMORY]
        torn = {d.snapshot_torn for d in done}
        self._copying = {s: state for s, state in self._copying.items() if state.step not in torn}
        copied = {d.snapshot_step for d in done}
        slot = next((s for s, state in self._copying.items() if copied == {state.step}), None)
        if slot is None:
            return warnings
        state = self._copying[slot]
        self._copying = {s: later for s, later in self._copying.items() if later.step > state.step}
        self._costs.append(max(d.snapshot_seconds for d in done) * max(1.0, len(done) / self.cores))
        if self.slots > 1:
            self.last = state, Restore(state.step, slot=slot, ranks=ranks or len(done))
            self._known = slot if self._known == -1 else self._known
        return warnings

    def begin_write(self, state: JobState, slot: int, ranks: int, *, beside: bool = True) -> None:
        """Note that the ranks below `ranks` begin to write a slot to disk, `beside` the steps."""
        self.writing[state.step] = Writing(state, slot, set(range(ranks)), beside)

    def part_written(self, part: Saved) -> Writing | None:
        """Record a part that a rank has written or not; return its checkpoint if it is awaited.

        A part written beside the steps is not that of a checkpoint of the same step for which
        training waits: the rank is about to write its files again.
        """
        writing = self.writing.get(part.step)
        if writing is None or part.rank not in writing.awaited:
            return None
        if part.beside and not writing.beside:
            return None
        writing.awaited.discard(part.rank)
        if part.error:
            writing.errors.append(part.error)
        else:
            writing.files[part.rank] = part.files
        if not writing.awaited:
            del self.writing[part.step]
            if not writing.errors:
                self._written[part.step] = writing.state
        return writing

    def is_completing(self, step: int) -> bool:
        """Return whether all parts of a checkpoint are written, and it is not yet complete."""
        return step in self._written

    def checkpoint_ended(self, step: int, path: str) -> bool:
        """Record that a checkpoint is complete at `path`, or failed if that is empty.

        Returns:
            Whether a checkpoint of this step was to be completed.
        """
        state = self._written.pop(step, None)
        if state and path:
            self.on_disk = state, Restore(step, path)
        return state is not None

    def host_lost(self, *, survives: bool) -> None:
        """Discard the last snapshot unless it `survives` elsewhere."""
        if not survives:
            self.last = None

    def workers_lost(self) -> list[int]:
        """Discard copies and writes in progress; return the steps of the unfinished checkpoints."""
        steps = list(self.writing)
        self.writing.clear()
        self._copying.clear()
        return steps


def snapshot_line(state: JobState, restore: Restore) -> lines.Snapshot:
    """Return what another coordinator needs to continue from a snapshot."""
    scaler = state.scaler or LossScaler(0.0)
    return lines.Snapshot(state.step, restore.slot, restore.ranks, scaler.scale, scaler.good_steps)
