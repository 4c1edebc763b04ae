"""Copies of the job's state: which memory of the workers' holds which step, and when to copy. Pure.

Between two updates weights and optimizer state stand still, so a worker copies them while the next
step runs. A copy is a *snapshot* once it is whole on all workers. It goes into a slot, the same on
all of them: with two, the last snapshot stays until the next is whole; what is being written to
disk stays until it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from pipeworker.coordinator.scaler import Scaler
from pipeworker.wire.messages.checkpoint import File, Restore
from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.step import StepDone

BUDGET = 0.02
"""Share of the time of steps that copying may take where the user has not said how often."""
_COSTS = 4  # of so many copies the cheapest counts: the first in a slot has its memory to make
_RARELY = 1000


@dataclass(frozen=True, slots=True)
class Mark:
    """What the coordinator itself goes back to: where the job stood after `step`.

    Attributes:
        scaler: the loss scale, with fp16.
        evaluation: of this very step, if there was one.
    """

    step: int
    scaler: Scaler | None = None
    evaluation: Evaluation | None = None


@dataclass(slots=True)
class Writing:
    """A checkpoint on its way to disk, by rank.

    Attributes:
        errors: what kept ranks from writing theirs.
    """

    mark: Mark
    slot: int
    awaited: set[int]
    files: dict[int, tuple[File, ...]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Snapshots:
    """See the module.

    Args:
        slots: that each worker has; with one there are no snapshots, only what is written to disk.
        every: steps between two snapshots; None to choose by what they cost.
        cores: of the coordinator's host, which workers are taken to share.
    """

    slots: int = 1
    every: int | None = None
    cores: int = 1
    last: tuple[Mark, Restore] | None = None
    on_disk: tuple[Mark, Restore] | None = None
    writing: dict[int, Writing] = field(default_factory=dict)
    _written: dict[int, Mark] = field(default_factory=dict)
    _copying: dict[int, Mark] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)  # the ranks that have lost the last one
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=_COSTS))

    @property
    def newest(self) -> tuple[Mark, Restore] | None:
        """What the job goes back to: the last snapshot, or a checkpoint that is newer still."""
        found = [one for one in (self.last, self.on_disk) if one]
        return max(found, key=lambda one: one[0].step, default=None)

    @property
    def free(self) -> int | None:
        """A slot for a snapshot: nothing is in it that is still wanted."""
        taken = self._written_from | self._whole | self._copying.keys()
        return next((slot for slot in range(self.slots) if slot not in taken), None)

    @property
    def room(self) -> int | None:
        """A slot for a checkpoint that is written beside steps: a snapshot on its way gives way.

        What is copied is whole on each worker before it changes, so that it can be copied over; but
        until that is known of all, the last snapshot stays.
        """
        taken = self._written_from | self._whole
        slots = [slot for slot in range(self.slots) if slot not in taken]
        return min(slots, key=self._copying.__contains__, default=None)

    def take(self) -> int:
        """A slot to copy into while nothing runs.

        What is not known to be whole goes, and what is being written a worker waits for.
        """
        slot = next(slot for slot in range(self.slots) if slot not in self._whole)
        self._copying.pop(slot, None)
        return slot

    @property
    def _written_from(self) -> set[int]:
        return {writing.slot for writing in self.writing.values()}

    @property
    def _whole(self) -> set[int]:
        return {self.last[1].slot} if self.last else set()

    def due(self, step: int, seconds: float) -> bool:
        """Whether the state after `step`, which has taken so long, is to be copied."""
        if self.slots < 2 or self.free is None:
            return False
        since = step - (self.last[0].step if self.last else 0)
        return since >= (self.every or self.rate(seconds))

    def rate(self, seconds: float) -> int:
        """After how many steps of so many seconds the next copy stays within the budget."""
        if len(self._costs) < _COSTS or not seconds > 0:
            return 1
        return min(_RARELY, max(1, math.ceil(min(self._costs) / (BUDGET * seconds))))

    def copy(self, mark: Mark, slot: int) -> None:
        """The state is copied into a slot from now on."""
        self._copying[slot] = mark

    def ran(self, done: Collection[StepDone], ranks: int | None = None) -> None:
        """All workers have run a mini-batch: a copy that is whole on all of them is a snapshot.

        It counts where all name the same: a worker that lacks memory for a copy makes none.

        Args:
            ranks: so many have the whole state together; None for all.
        """
        copied = {d.copied for d in done}
        slot = next((s for s, mark in self._copying.items() if copied == {mark.step}), None)
        if slot is None:
            return
        mark = self._copying[slot]
        self._copying = {s: later for s, later in self._copying.items() if later.step > mark.step}
        self._costs.append(max(d.copying for d in done) * max(1.0, len(done) / self.cores))
        if self.slots > 1:
            self.last = mark, Restore(mark.step, slot=slot, ranks=ranks or len(done))
            self._gone.clear()

    def write(self, mark: Mark, slot: int, ranks: int) -> None:
        """What is in a slot is written to disk by the first so many workers."""
        self.writing[mark.step] = Writing(mark, slot, set(range(ranks)))

    def wrote(self, rank: int, step: int, files: tuple[File, ...], error: str) -> Writing | None:
        """A worker has written its part, or has failed to; returns what it belongs to."""
        writing = self.writing.get(step)
        if writing is None or rank not in writing.awaited:
            return None
        writing.awaited.discard(rank)
        if error:
            writing.errors.append(error)
        else:
            writing.files[rank] = files
        if not writing.awaited:
            del self.writing[step]
            if not writing.errors:
                self._written[step] = writing.mark
        return writing

    def saved(self, step: int, path: str) -> bool:
        """The checkpoint that all have written is complete, at `path`, or cannot be, without one.

        Returns:
            Whether there is one of this step.
        """
        mark = self._written.pop(step, None)
        if mark and path:
            self.on_disk = mark, Restore(step, path)
        return mark is not None

    def forget(self, ranks: Collection[int], total: int) -> None:
        """The memory of these ranks is gone, of so many: what is copied is not whole.

        Nor is the snapshot, unless others have all of it: another replica.
        """
        self._copying.clear()
        self._gone |= {*ranks}
        size = self.last[1].ranks if self.last else total
        starts = range(0, total, size or total)
        if all(self._gone & {*range(start, start + size)} for start in starts):
            self.last = None

    def lost(self) -> list[int]:
        """The workers are gone, and what they were doing; returns the steps being written."""
        steps = list(self.writing)
        self.writing.clear()
        self._copying.clear()
        return steps
