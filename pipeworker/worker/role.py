"""What a worker is in its job: which rank, of which placement, under which options."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.job.options import Options
from pipeworker.plan.placement import Placement


@dataclass(frozen=True, slots=True)
class Role:
    """See the module."""

    rank: int
    placement: Placement
    options: Options

    @property
    def replica(self) -> int:
        """Which one it is of."""
        return self.placement.replica_of(self.rank)

    @property
    def stages(self) -> tuple[int, ...]:
        """Those it holds."""
        return self.placement.stages_of(self.rank)

    @property
    def shards(self) -> bool:
        """Whether each replica updates a part of the weights."""
        return self.options.shard_optimizer and self.placement.replicas > 1

    @property
    def writes(self) -> bool:
        """Whether some of a checkpoint is its own; without shards the first replica has it all."""
        return self.shards or not self.replica

    @property
    def all_read(self) -> bool:
        """Whether each replica reads the data, rather than the first one for all."""
        return self.options.read_data == "every"

    @property
    def takes(self) -> bool:
        """Whether mini-batches come in here: it has stage 0, of a replica that is given them."""
        return 0 in self.stages and (self.all_read or not self.replica)

    @property
    def reads(self) -> bool:
        """Whether it reads the job's data; a loop of the user's own gives mini-batches instead."""
        return self.takes and not self.options.own_loop
