"""Which worker of which replica holds which stages.

Words: a *worker* is a process, numbered by its *rank*; a *stage* is a run of layers; a *replica* is
one copy of the pipeline. Ranks count through the workers of replica 0, then of replica 1, ...
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Placement:
    """The one place that knows where stages are.

    Attributes:
        held: by worker of a replica, the stages it holds, ascending.
        replicas: copies of the pipeline; all are placed alike.
        owners: by stage, the worker of a replica that holds it.
    """

    held: tuple[tuple[int, ...], ...]
    replicas: int = 1
    owners: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        owner = {stage: worker for worker, held in enumerate(self.held) for stage in held}
        # Found once: what asks for it is often asked itself.
        object.__setattr__(self, "owners", tuple(owner[stage] for stage in range(len(owner))))

    @staticmethod
    def identity(stages: int, replicas: int = 1) -> Placement:
        """One stage a worker."""
        return Placement(tuple((stage,) for stage in range(stages)), replicas)

    def copies(self, replicas: int) -> Placement:
        """The same with so many replicas."""
        return Placement(self.held, replicas)

    @staticmethod
    def looped(workers: int, rounds: int) -> Placement:
        """Several stages a worker, dealt out in turn: neighbours are on neighbouring workers.

        As in the interleaved schedule of Megatron-LM (Narayanan et al. 2021, section 2.2).
        """
        return Placement(
            tuple(tuple(w + r * workers for r in range(rounds)) for w in range(workers))
        )

    @property
    def workers(self) -> int:
        """Of one replica."""
        return len(self.held)

    @property
    def stages(self) -> int:
        """Of one replica."""
        return len(self.owners)

    @property
    def ranks(self) -> int:
        """Workers of all replicas."""
        return self.workers * self.replicas

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """What a rank holds, ascending."""
        return self.held[rank % self.workers]

    def worker_of(self, rank: int) -> int:
        """Its number within its replica."""
        return rank % self.workers

    def replica_of(self, rank: int) -> int:
        return rank // self.workers

    def rank_of(self, stage: int, replica: int = 0) -> int:
        return replica * self.workers + self.owners[stage]

    def ranks_of(self, stage: int) -> list[int]:
        """Of a stage in each replica."""
        return [self.rank_of(stage, replica) for replica in range(self.replicas)]

    def names(self, rank: int) -> str:
        """``stage 1``, ``stages 1, 3`` or ``stage 1 of replica 0``: how a rank is called."""
        held = self.stages_of(rank)
        text = f"stage{'s' if len(held) > 1 else ''} {', '.join(map(str, held))}"
        return text if self.replicas == 1 else f"{text} of replica {self.replica_of(rank)}"

    def __str__(self) -> str:
        """``0,2/1,3``: the stages of each worker of a replica."""
        return "/".join(",".join(map(str, held)) for held in self.held)
