"""What a worker is started with; all else the coordinator tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeworker.host.position import Tracker
from pipeworker.job.file import Job
from pipeworker.record.memory import Memory


@dataclass(frozen=True, slots=True)
class Settings:
    """See the module.

    Attributes:
        local_rank: which accelerator of this host is the worker's.
        to_log: send what is printed to the stage's log in the run directory.
        memories: by rank, for copies of a worker's state, of all workers of the host; none where
            they would not outlive it.
        keeps: ranks of other hosts whose copies are kept there as well, by this worker.
        kept: whether another host keeps this worker's.
        job_file: where it is on this host, if the job does not know.
        job: what a script gave; None for a job file.
        sample: with a job that has no data, an input of the model, if its layers stash and pop.
    """

    rank: int
    endpoint: str
    token: str
    local_rank: int
    generation: int = 1
    tracker: Tracker = field(default_factory=Tracker)
    to_log: bool = True
    memories: Mapping[int, Sequence[Memory]] = field(default_factory=dict)
    keeps: tuple[int, ...] = ()
    kept: bool = False
    job_file: str = ""
    job: Job | None = None
    sample: Any = None

    def __repr__(self) -> str:  # never the token
        return f"Settings(rank={self.rank}, endpoint={self.endpoint!r})"
