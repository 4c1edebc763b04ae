"""Placements: which worker of which replica holds which stages.

Ranks number the workers of replica 0 first, then those of replica 1, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def held_text(stages: Sequence[int]) -> str:
    """Return how messages call the stages of a worker: ``stage 1``, or ``stages 1, 3``."""
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


@dataclass(frozen=True, slots=True)
class Placement:
    """The stages of each worker of a replica, ascending; the only source of that knowledge.

    `owners` has the worker that holds each stage. All replicas are placed alike.
    """

    held: tuple[tuple[int, ...], ...]
    replicas: int = 1
    owners: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        owner = {stage: worker for worker, held in enumerate(self.held) for stage in held}
        # Computed once, because callers look owners up in loops over actions.
        object.__setattr__(self, "owners", tuple(owner[stage] for stage in range(len(owner))))

    @staticmethod
    def identity(stages: int, replicas: int = 1) -> Placement:
        """Return the placement of one stage per worker."""
        return Placement(tuple((stage,) for stage in range(stages)), replicas)

    def copies(self, replicas: int) -> Placement:
        """Return the same placement with another number of replicas."""
        return Placement(self.held, replicas)

    @staticmethod
    def looped(workers: int, virtual_stages: int) -> Placement:
        """Return a placement of several stages per worker, dealt out in turn.

        Neighbouring stages are on neighbouring workers, as in the interleaved schedule of
        Megatron-LM (Narayanan et al. 2021, section 2.2).
        """
        return Placement(
            tuple(tuple(w + r * workers for r in range(virtual_stages)) for w in range(workers))
        )

    @staticmethod
    def v_shaped(workers: int, virtual_stages: int = 2) -> Placement:
        """Return a placement of two stages per worker, dealt out to the last worker and back.

        Worker w holds the stages w and 2K - 1 - w, so the first worker holds the last stage too
        (ZB-V, Qi et al. 2023, section 6).

        Raises:
            ValueError: `virtual_stages` is not 2.
        """
        if virtual_stages != 2:
            raise ValueError(f"a V has two stages per worker, not {virtual_stages}")
        return Placement(tuple((w, 2 * workers - 1 - w) for w in range(workers)))

    @property
    def workers(self) -> int:
        """The number of workers of a replica."""
        return len(self.held)

    @property
    def stages(self) -> int:
        """The number of stages of one replica."""
        return len(self.owners)

    @property
    def ranks(self) -> int:
        """The number of workers of all replicas."""
        return self.workers * self.replicas

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, ascending."""
        return self.held[rank % self.workers]

    def worker_of(self, rank: int) -> int:
        """Return the number of a rank's worker within its replica."""
        return rank % self.workers

    def replica_of(self, rank: int) -> int:
        """Return the replica of a rank."""
        return rank // self.workers

    def rank_of(self, stage: int, replica: int = 0) -> int:
        """Return the rank that holds a stage of a replica."""
        return replica * self.workers + self.owners[stage]

    def ranks_of(self, stage: int) -> list[int]:
        """Return the ranks that hold a stage, by replica."""
        return [self.rank_of(stage, replica) for replica in range(self.replicas)]

    def names(self, rank: int) -> str:
        """Return how messages call a rank: ``stages 1, 3``, or ``stage 1 of replica 0``."""
        text = held_text(self.stages_of(rank))
        return text if self.replicas == 1 else f"{text} of replica {self.replica_of(rank)}"

    def __str__(self) -> str:
        """Return the stages of each worker of a replica as text: ``0,2/1,3``."""
        return "/".join(",".join(map(str, held)) for held in self.held)
