"""A worker's state: what it begins with, copies of it, and its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeworker.host.position import Tracker
from pipeworker.record import checkpoint
from pipeworker.record.checkpoint import Checkpoint, Part
from pipeworker.record.manifest import Shard
from pipeworker.record.restore import position, restore
from pipeworker.record.rundir import RunDir
from pipeworker.wire.messages.checkpoint import Copy, Restore, Save, Saved
from pipeworker.wire.messages.plan import Plan
from pipeworker.wire.messages.position import Phase
from pipeworker.worker.blame import users
from pipeworker.worker.held import Held
from pipeworker.worker.internals import loads_itself
from pipeworker.worker.role import Role
from pipeworker.worker.settings import Settings
from pipeworker.worker.state import heirs
from pipeworker.worker.state.keeper import Keeper
from pipeworker.worker.state.remembered import Remembered, Where, needed
from pipeworker.worker.step.data import Reader
from pipeworker.worker.step.others import Others

Place = Mapping[str, Any] | None
"""Where the data is; None where none is read."""


class State:
    """See the module.

    Args:
        held: is built.
        reader: of the job's data, whose place is part of the state where it is read.
        send: tells the coordinator of parts that are written while steps run.
        where: how other hosts are reached; asked for as soon as they matter.
        place: where the data is, once the worker is connected.

    Attributes:
        saved: the step of the last checkpoint.
    """

    def __init__(
        self,
        settings: Settings,
        role: Role,
        held: Held,
        run_dir: RunDir,
        reader: Callable[[], Reader],
        send: Callable[[Saved], None],
        where: Callable[[], Where],
        place: Callable[[], Place],
    ) -> None:
        self.saved = -1
        self._role, self._held, self._run_dir = role, held, run_dir
        self._reader, self._send, self._place = reader, send, place
        self._tracker: Tracker = settings.tracker
        self._memories = settings.memories.get(role.rank, ())
        self._remembered = Remembered(
            settings.memories,
            keeps=settings.keeps,
            kept=settings.kept,
            first=not settings.local_rank,
            where=where,
        )
        self._inherits = False
        self._keepers: list[Keeper] = []  # one, once there is something to keep

    @property
    def copied(self) -> tuple[int, float]:
        """The last step whose state is copied as a whole, and the seconds of work that took."""
        return self._keepers[0].whole if self._keepers else (-1, 0.0)

    def begin(self, told: Restore, plan: Plan) -> None:
        """Begin with what a checkpoint, or workers before this one, left behind.

        Raises:
            UsageError: it is of another model, or damaged.
            PipeworkerError: nobody has it.
            Raised: what the user's code raised.
        """
        role = self._role
        self._tracker.set(Phase.RESTORING)
        if told.path:
            found = Checkpoint(Path(told.path)).shards()
        else:
            ranks = needed(told, plan, role.placement, role.rank, self._held.stages)
            found = self._remembered.shards(told, ranks, here=role.options.redundant)
        self._inherits = not found
        if self._inherits:  # from another replica, once it is connected
            return
        self.restore(found)
        if role.reads:
            self._reader().restore(position(found))
        self._remembered.restored()

    def connected(self, told: Restore | None, others: Others) -> None:
        """With replicas alike, take the state of a living one, or give it.

        Args:
            told: what the worker began with.

        Raises:
            PipeworkerError: no replica has it.
        """
        role = self._role
        if told is None or told.path or role.placement.replicas < 2 or role.shards:
            return
        step = told.step

        def files(stage: int) -> heirs.Files:
            return heirs.files_of(self._held.part(stage), step, None if stage else self._place())

        given = heirs.exchange(others.reductions, None if self._inherits else files)
        for index, found in given.items():
            with heirs.shard_of(found) as shard:
                restore([shard], [self._held.part(index)], {}, users, loads_itself)
                if not index and role.reads:
                    self._reader().restore(position([shard]))

    def restore(self, shards: Sequence[Shard]) -> None:
        """Put back what workers wrote, whatever stages they held.

        Raises:
            UsageError: it is of another model, or damaged.
            Raised: what the user's code raised.
        """
        restore(shards, self._parts(), self._held.aliases, users, loads_itself)

    def check(self) -> None:
        """Refuse at once what could not be saved later.

        Raises:
            UsageError: a stage holds something else than tensors and plain values.
        """
        checkpoint.check(self._parts(), self._held.elsewhere)

    def keep(self) -> None:
        """Keep the copies of other hosts from now on, if this worker is to."""
        self._remembered.keep()

    def built(self) -> None:
        """All workers are: nobody needs any more what those before them left in memory."""
        self._remembered.built()

    def settle(self) -> None:
        """Wait until what is being copied is whole: weights are about to change."""
        for keeper in self._keepers:
            keeper.settle()

    def copy(self, copy: Copy) -> None:
        """Begin a copy, which is made while the next step runs."""
        if not self._role.writes:
            copy = replace(copy, save=False)
        self._keeper.copy(copy, self._parts(), self._held.elsewhere, self._place())

    def save(self, save: Save) -> Saved | None:
        """Write this worker's part of a checkpoint, if it has one."""
        self._tracker.set(Phase.SAVING, save.step)
        self.saved = save.step
        if not self._role.writes:
            self._tracker.wait()
            return None
        return self._keeper.save(
            save.step, save.slot, self._parts(), self._held.elsewhere, self._place()
        )

    def close(self) -> None:
        """Let go of threads, and of what passes between hosts."""
        self._remembered.close()
        while self._keepers:
            self._keepers.pop().close()

    @property
    def _keeper(self) -> Keeper:
        if not self._keepers:
            role, placement = self._role, self._role.placement
            number, workers = role.rank, placement.ranks
            if not role.shards:  # the first replica has all there is to write
                number, workers = placement.worker_of(role.rank), placement.workers
            mirror = self._remembered.mirror(role.rank)
            folder = self._run_dir.partial_checkpoint
            keeper = Keeper(
                number, workers, self._memories, folder, self._send, placement.ranks, mirror
            )
            self._keepers.append(keeper)
        return self._keepers[0]

    def _parts(self) -> list[Part]:
        """What its stages hold, and is kept of them."""
        whole = not (self._role.shards and self._role.replica)
        return [replace(part, keeps_weights=whole) for part in self._held.parts()]
