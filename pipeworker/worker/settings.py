"""The settings with which a worker starts, and its role in the job, which the coordinator sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeworker.host.data_readers import ReaderLink
from pipeworker.host.position import Tracker
from pipeworker.job.file import JobFile
from pipeworker.job.options import Options
from pipeworker.plan.placement import Placement
from pipeworker.record.checkpoint.snapshot_memory import SnapshotMemory
from pipeworker.trace.ring import Ring

if TYPE_CHECKING:
    from pipeworker.worker.model.survey_process import SurveyProcess


@dataclass(frozen=True, slots=True)
class Settings:
    """A worker's settings.

    Attributes:
        endpoint: address of the coordinator.
        token: secret of the job.
        local_rank: index of the worker's accelerator on this host.
        ring: has the times of what the worker does; None without an agent that would read it.
        to_log: whether output goes to the worker's log in the run directory.
        memories: the snapshot memories of all workers of this host, by rank; empty if they would
            not outlive the worker.
        mirrors: ranks of other hosts whose snapshots this worker stores on this host as well.
        mirrored: whether another host stores this worker's snapshots as well.
        job_file: its path on this host, if the options do not have it.
        job: the job of a script; None for a job file.
        sample: an input of the model, for a job without data whose layers stash and pop.
        survey: the process that surveys the model of a job file, where it was forked.
        reader: connections to processes that may read the data; None if none may.
    """

    rank: int
    endpoint: str
    token: str
    local_rank: int
    generation: int = 1
    tracker: Tracker = field(default_factory=Tracker)
    ring: Ring | None = None
    to_log: bool = True
    memories: Mapping[int, Sequence[SnapshotMemory]] = field(default_factory=dict)
    mirrors: tuple[int, ...] = ()
    mirrored: bool = False
    job_file: str = ""
    job: JobFile | None = None
    sample: Any = None
    survey: SurveyProcess | None = None
    reader: ReaderLink | None = None

    def __repr__(self) -> str:  # never the token
        return f"Settings(rank={self.rank}, endpoint={self.endpoint!r})"


@dataclass(frozen=True, slots=True)
class Role:
    """A rank in a placement, under the job's options."""

    rank: int
    placement: Placement
    options: Options

    @property
    def replica(self) -> int:
        """The number of the worker's replica."""
        return self.placement.replica_of(self.rank)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of the worker."""
        return self.placement.stages_of(self.rank)

    @property
    def shards(self) -> bool:
        """Whether each replica updates a part of the weights."""
        return self.options.shard_optimizer and self.placement.replicas > 1

    @property
    def writes_checkpoint(self) -> bool:
        """Whether the worker writes a part of a checkpoint: without shards, replica 0 has all."""
        return self.shards or not self.replica

    @property
    def every_replica_reads(self) -> bool:
        """Whether each replica reads the data, rather than the first one for all."""
        return self.options.data_reader == "every"

    @property
    def has_batches(self) -> bool:
        """Whether the worker has stage 0 of a replica that receives mini-batches, or reads them."""
        return 0 in self.stages and (self.every_replica_reads or not self.replica)

    @property
    def reads_data(self) -> bool:
        """Whether the worker reads the job's data; a user's own loop passes mini-batches."""
        return self.has_batches and self.options.trains
