"""The job as its user brought it: a job file that is loaded here, or what a script gave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from pipeworker.errors import UsageError
from pipeworker.host.position import Tracker
from pipeworker.job import file as job_file
from pipeworker.job import sources
from pipeworker.job.file import Job
from pipeworker.job.options import Options
from pipeworker.wire.messages.plan import Source
from pipeworker.wire.messages.position import Phase
from pipeworker.worker.blame import users
from pipeworker.worker.console import last_words
from pipeworker.worker.model import survey
from pipeworker.worker.role import Role
from pipeworker.worker.settings import Settings
from pipeworker.worker.stage import rng
from pipeworker.worker.step.data import MicroBatches, Reader


@dataclass(frozen=True, slots=True)
class Brought:
    """See the module.

    Attributes:
        modules: those that the user's code is in, as far as they are imported by now.
        path: of the job file; None for a script.
    """

    job: Job
    modules: Callable[[], Sequence[ModuleType]]
    path: Path | None

    def files(self) -> tuple[Source, ...]:
        """The job file and what it has imported; what a script is made of is its own."""
        if self.path is None:
            return ()
        return tuple(Source(*pair) for pair in sources.digests(self.path, self.modules()))

    def data(self, role: Role, device: torch.device) -> Reader:
        """Reads the data, on the first stage."""
        options = role.options
        return Reader(
            self.job.data,
            microbatches=options.microbatches,
            seed=options.seed,
            epochs=options.passes,
            said="step(batch) was given" if options.own_loop else "data() gave",
            accelerator=rng.accelerator_generator(device),
            replica=role.replica if role.all_read else 0,
            replicas=role.placement.replicas if role.all_read else 1,
        )

    def evaluation(self, role: Role, device: torch.device) -> Iterator[MicroBatches]:
        """The mini-batches of ``evaluation()``, read on the first stage of the first replica."""
        if 0 not in role.stages or role.replica:
            return iter(())
        reader = Reader(
            self.job.evaluation,
            microbatches=role.options.microbatches,
            seed=role.options.seed,
            epochs=1,
            said="evaluation() gave",
            seed_of=rng.evaluation_data_seed,
            accelerator=rng.accelerator_generator(device),
        )
        return reader.once()


def bring(
    settings: Settings,
    options: Options,
    device: torch.device,
    tracker: Tracker,
    log: Path | None,
) -> Brought:
    """Load the job file, if there is one.

    Args:
        log: of this worker, if what is printed goes there.

    Raises:
        UsageError: it is not a job, or not one for these options.
        Raised: what the user's code raised.
    """
    if settings.job is None:
        path = Path(settings.job_file or options.job_file)
        tracker.set(Phase.LOADING)
        rng.seed_all(options.seed, rng.accelerator_generator(device))
        there = set(sys.modules)
        with last_words(log), users("the job file", early=True):
            job = job_file.load(path, options.arguments)
        brought = Brought(job, partial(survey.new_modules, there), path)
    else:
        brought = Brought(settings.job, survey.modules_of_the_user, None)
    if options.evaluate_every and brought.job.evaluation is None:
        raise UsageError(
            f"--evaluate-every {options.evaluate_every}: {brought.job.where} has no evaluation()"
        )
    return brought
