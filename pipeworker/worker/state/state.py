"""A worker's state: where it is restored from, its snapshots, and its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeworker.errors import PipeworkerError, SnapshotLost
from pipeworker.facts.position import Phase
from pipeworker.record.checkpoint.checkpoint import Checkpoint
from pipeworker.record.checkpoint.manifest import WorkerFiles
from pipeworker.record.checkpoint.restore import check_fits, restore, restored_position
from pipeworker.record.checkpoint.snapshot_buffer import SnapshotBuffer, snapshot_files
from pipeworker.record.checkpoint.snapshot_memory import SnapshotMemory
from pipeworker.record.checkpoint.stage_state import StageState
from pipeworker.record.checkpoint.worker_content import check_savable
from pipeworker.record.files.located import located
from pipeworker.wire.messages.checkpoint import Copy, Restore, Save, Saved
from pipeworker.wire.messages.plan import Plan
from pipeworker.worker.blame import user_code
from pipeworker.worker.internals import loads_itself
from pipeworker.worker.loaded_worker import LoadedWorker
from pipeworker.worker.local_stages import LocalStages
from pipeworker.worker.settings import Role
from pipeworker.worker.stage.values import checksums
from pipeworker.worker.state.buffers import StepGuard
from pipeworker.worker.state.snapshot_writer import Position, SnapshotWriter
from pipeworker.worker.step.reduction import Files, Reduction
from pipeworker.worker.transport.snapshot_transfer import (
    MirrorClient,
    MirrorServer,
    SnapshotServer,
    fetch_snapshot,
)


@contextmanager
def readable(files: Files) -> Iterator[WorkerFiles]:
    """Make files readable by path, as those of a checkpoint are."""
    with closing(SnapshotMemory()) as memory:
        for number, data in enumerate(files):
            memory.write(number, data.cpu().numpy().tobytes())
        yield WorkerFiles(*memory.paths)


def needed_ranks(restore: Restore, plan: Plan, role: Role) -> list[int]:
    """Return the ranks of one replica whose snapshots hold what a worker needs.

    With as many workers as before, a worker needs its own snapshot and those of the first places of
    its tied weights, which hold their optimizer state. Otherwise it needs those of all ranks; so it
    does if the optimizer's state is sharded, because the ranks are then those of all replicas.
    """
    placement = role.placement
    if role.options.shard_optimizer or restore.ranks != placement.workers:
        return list(range(restore.ranks))
    firsts = {tie.stages[0] for tie in plan.ties if {*tie.stages} & {*role.stages}}
    return sorted({placement.worker_of(role.rank), *map(placement.rank_of, firsts)})


class MemorySnapshots:
    """The snapshots in this host's memory, and their transfer between hosts."""

    def __init__(self, loaded: LoadedWorker) -> None:
        self._settings, self._access = loaded.settings, loaded.access
        self._serving, self._mirroring, self._fetched = ExitStack(), ExitStack(), ExitStack()

    def mirror_client(self) -> MirrorClient | None:
        """Return the client that has another host mirror this worker's snapshots, if hosts do."""
        settings = self._settings
        return MirrorClient(settings.rank, *self._access()) if settings.mirrored else None

    def start_mirror(self) -> None:
        """Mirror the snapshots of another host from now on, if this worker is to."""
        if self._settings.mirrors:
            memories = {rank: self._settings.memories[rank] for rank in self._settings.mirrors}
            self._mirroring.callback(MirrorServer(memories, *self._access()).close)

    def find(self, restore: Restore, ranks: Sequence[int], *, local: bool) -> list[WorkerFiles]:
        """Find the snapshots of some ranks of one replica; valid until :meth:`release`.

        They are those of the first replica that is complete on this host, or else are fetched. If
        `local`, fetch nothing, and return nothing if they are not on this host.
        """
        if self._settings.mirrored and not self._settings.local_rank:  # one worker for its host
            self._serve(restore)
        for start in range(0, max(self._settings.memories, default=0) + 1, restore.ranks):
            with suppress(PipeworkerError, KeyError):
                return [self._on_this_host(start + rank, restore) for rank in ranks]
        return [] if local else [self._on_any_host(rank, restore) for rank in ranks]

    def release(self) -> None:
        """Release the snapshots that were fetched."""
        self._fetched.close()

    def stop_serving(self) -> None:
        """Stop serving snapshots: all workers are built."""
        self._serving.close()

    def close(self) -> None:
        """Stop all transfers between hosts."""
        self._serving.close()
        self._mirroring.close()
        self._fetched.close()

    def _on_this_host(self, rank: int, restore: Restore) -> WorkerFiles:
        memory = self._settings.memories[rank][restore.slot]
        return snapshot_files(memory, restore.step, restore.ranks)

    def _on_any_host(self, rank: int, restore: Restore) -> WorkerFiles:
        """Return the snapshot of a rank, fetched if necessary."""
        with suppress(PipeworkerError, KeyError):
            return self._on_this_host(rank, restore)
        if not self._settings.mirrored:
            raise SnapshotLost(f"the snapshot of step {restore.step} in memory is lost")
        fetched = fetch_snapshot(rank, restore.slot, *self._access())
        self._fetched.callback(fetched.close)
        return snapshot_files(fetched, restore.step, restore.ranks)

    def _serve(self, restore: Restore) -> None:
        """Serve the snapshots that this host has as a whole."""
        complete = {}
        for rank, slots in self._settings.memories.items():
            with suppress(PipeworkerError):
                self._on_this_host(rank, restore)
                complete[rank] = slots
        self._serving.callback(SnapshotServer(complete, *self._access()).close)


class State:
    """The state of a worker whose stages are built.

    Attributes:
        saved: step of the last checkpoint; -1 without one.
        invalid: why the state is not that of a whole step; "" if it is.
        guards: whether a step that fails leaves the state before it: in a script's process.
        at: the position in the data at which a worker was disconnected.
        snapshots: what earlier workers left in memory.
    """

    def __init__(self, loaded: LoadedWorker, stages: LocalStages) -> None:
        self.saved = -1
        self.invalid = ""
        layers = [layer for stage in stages.stages.values() for layer in stage.layers]
        self.guards = not loaded.settings.to_log
        self.at: Position = None
        self._layers = layers
        self._guard = StepGuard(layers if self.guards else ())
        self._before_step: tuple[Position] | None = None
        self._at_save: tuple[Any, ...] = ()
        self._loaded, self._role, self._stages = loaded, loaded.role, stages
        self._tracker = loaded.settings.tracker
        self.snapshots = MemorySnapshots(loaded)
        self._writer = self._new_writer()  # its threads might be refused in the middle of a step

    @property
    def copied(self) -> tuple[int, float, bool, int]:
        """The four values about snapshots that a :class:`StepDone` reports.

        They are the step of the last complete snapshot or -1, the seconds of work it took, whether
        memory was too short for a snapshot, and the last step whose snapshot is torn or -1.
        """
        return *self._writer.complete, self._writer.lacked_memory, self._writer.torn

    def begin(self, plan: Plan) -> bool:
        """Restore the state that the worker starts from, if any; check that it can be saved.

        It is in a checkpoint, or in what earlier workers left in memory.

        Returns:
            Whether the worker has its state now. If not, another replica transfers it.
        """
        source = self._loaded.restore
        has_state = source is None or self._find(source, plan)
        self.check()
        return has_state

    def _find(self, source: Restore, plan: Plan) -> bool:
        role = self._role
        self._tracker.set(Phase.RESTORING)
        if source.path:
            folder = self._loaded.run_dir.checkpoints.at(source.step)
            files = Checkpoint(Path(located(folder))).worker_files()
        else:
            ranks = needed_ranks(source, plan, role)
            files = self.snapshots.find(source, ranks, local=role.options.redundant)
        if files:
            self.restore(files)
            if role.reads_data:
                self._tracker.set(Phase.READING, source.step + 1)
                self._loaded.reader.restore(restored_position(files))
            self.snapshots.release()
        return bool(files)

    def transfer(
        self, step: int, reductions: dict[int, Reduction], at: Position, *, present: bool
    ) -> None:
        """Transfer the state from the replicas that have it to those that lack it.

        `at` is the position in the data, and `present` whether this worker has the state.
        """
        for index, reduction in reductions.items():
            self._tracker.set(Phase.RESTORING)  # a slow line is no deadlock of those that wait
            own_files = partial(self._files, index, step, None if index else at)
            received = reduction.share_state(own_files if present else None)
            if received is not None:
                with readable(received) as files:
                    restore([files], [self._stages.part(index)], {}, user_code, loads_itself)
                    if not index and self._role.reads_data:
                        self._tracker.set(Phase.READING, step + 1)
                        self._loaded.reader.restore(restored_position([files]))

    def _files(self, stage: int, step: int, at: Position) -> Files:
        """Return the files that a stage would write to disk.

        They include the optimizer state of tied weights that another stage writes to disk.
        """
        with closing(SnapshotMemory()) as memory:
            SnapshotBuffer(memory).fill(step, [self._stages.part(stage)], (), at)
            contents = [bytearray(path.read_bytes()) for path in memory.paths]
        return [torch.frombuffer(data, dtype=torch.uint8) for data in contents]

    def restore(self, files: Sequence[WorkerFiles]) -> None:
        """Restore from the files of all workers, whatever stages they had."""
        self._tracker.set(Phase.RESTORING)
        with self.changing("a checkpoint was loaded only in part"):
            restore(files, self._parts(), self._stages.aliases, user_code, loads_itself)
        self._tracker.wait()

    def check_fits(self, files: Sequence[WorkerFiles]) -> None:
        """Check that :meth:`restore` can restore from these files."""
        check_fits(files, self._parts(), self._stages.aliases, loads_itself)

    @contextmanager
    def changing(self, reason: str) -> Iterator[None]:
        """Change the state inside the context; an error there makes it invalid, for this reason."""
        self.invalid = reason
        yield
        self.invalid = ""

    def check(self) -> None:
        """Reject state that could not be saved later."""
        check_savable(self._parts(), self._stages.elsewhere)

    def begin_step(self, at: Callable[[], Position]) -> None:
        """Keep what a step changes before its update; `at` returns the position in the data."""
        if self.guards:
            self._guard.begin()
            self._before_step = (at(),)

    def end_step(self) -> None:
        """Note that the step is whole."""
        self._guard.end()
        self._before_step = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Restore the layers after an evaluation pass, also after one that is interrupted.

        Most layers do not change in eval mode, but observers of quantization do, and training must
        not depend on the passes: on how many there are, or on the replica that runs them. A pass
        that is interrupted is repeated as a whole by the run that resumes.
        """
        guard = StepGuard(self._layers, copies_all=True)
        guard.begin()
        try:
            yield
        finally:
            guard.restore()

    def wait_copied(self) -> None:
        """Wait until the snapshot in progress is copied, because weights are about to change."""
        self._writer.wait_copied()

    def copy(self, copy: Copy, at: Position) -> None:
        """Begin a snapshot, which is copied while the next step runs."""
        if not self._role.writes_checkpoint:
            copy = replace(copy, save=False)
        if at is not None:
            self._loaded.reader.note_copy(at)
        self._writer.copy(copy, self._parts(), self._stages.elsewhere, at)

    def save(self, save: Save, at: Position) -> Saved | None:
        """Write this worker's part of a checkpoint; None if it has no part."""
        self._tracker.set(Phase.SAVING, save.step)
        self.saved = save.step
        if not self._role.writes_checkpoint:
            self._tracker.wait()
            return None
        changed = self._guard.restore()  # the job may end within a step
        if self._before_step is not None:
            (at,) = self._before_step
        if reason := self.invalid or (changed and f"the step that failed has changed {changed}"):
            return Saved(self._role.rank, save.step, error=reason)
        if self._role.options.own_loop:
            self._at_save = self._fingerprint()
        return self._writer.save(save, self._parts(), self._stages.elsewhere, at)

    def has_changed(self) -> bool:
        """Return whether the state is another one than at the last save, if there was one."""
        return bool(self._at_save) and self._at_save != self._fingerprint()

    def _fingerprint(self) -> tuple[Any, ...]:
        """Return what differs if a script has changed weights, buffers or its optimizer."""
        tensors = [t for layer in self._layers for t in (*layer.parameters(), *layer.buffers())]
        found: list[Any] = [checksums(tensors)]
        for updater in self._stages.updaters.values():
            for optimizer in updater.optimizers.all:
                groups = [{**group, "params": ()} for group in optimizer.param_groups]
                found += [checksums([[*optimizer.state.values()], groups]), repr(groups)]
        return tuple(found)

    def close(self) -> None:
        """End threads and transfers between hosts."""
        self.snapshots.close()
        self._writer.close()

    def _new_writer(self) -> SnapshotWriter:
        role, placement = self._role, self._role.placement
        rank, ranks = role.rank, placement.ranks
        if not role.shards:  # the first replica writes everything
            rank, ranks = placement.worker_of(role.rank), placement.workers
        return SnapshotWriter(
            rank,
            ranks,
            self._loaded.settings.memories.get(role.rank, ()),
            self._loaded.run_dir.checkpoints.partial,
            self._loaded.run_dir.descriptors,
            self._loaded.control.send,
            placement.ranks,
            self.snapshots.mirror_client,
            self._loaded.accelerator,
        )

    def _parts(self) -> list[StageState]:
        """Return the state of all stages of the worker."""
        keeps_weights = not (self._role.shards and self._role.replica)
        stages = self._stages
        return [stages.part(index, keeps_weights=keeps_weights) for index in stages.stages]
