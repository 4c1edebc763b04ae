"""A worker that has loaded its job: a job file, or the functions that a script passed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from pipeworker.environment import timings
from pipeworker.errors import RecordError, UsageError
from pipeworker.facts.position import Phase
from pipeworker.job import file as job_file
from pipeworker.job.file import JobFile
from pipeworker.job.options import Options
from pipeworker.plan.placement import Placement
from pipeworker.record.rundir import RunDir
from pipeworker.timings import STALL_FACTOR
from pipeworker.wire import interfaces
from pipeworker.wire.messages.checkpoint import Restore
from pipeworker.wire.messages.plan import Plan
from pipeworker.wire.messages.presence import Welcome
from pipeworker.wire.messages.step import Upcoming
from pipeworker.worker import kernel_cache
from pipeworker.worker.blame import user_code
from pipeworker.worker.console import capture_exit_message, redirect_output
from pipeworker.worker.control import Control
from pipeworker.worker.data.evaluation_sets import read_sets
from pipeworker.worker.data.reader import MicroBatches, Reader, reader_options
from pipeworker.worker.data.reader_requests import Setup
from pipeworker.worker.data.remote_reader import RemoteReader, end_reading
from pipeworker.worker.device import numerics
from pipeworker.worker.device.accelerator import Accelerator, accelerator_for
from pipeworker.worker.device.device import device_for, used_memory
from pipeworker.worker.model import survey
from pipeworker.worker.settings import Role, Settings
from pipeworker.worker.stage import rng
from pipeworker.worker.transport.connect import check_backend
from pipeworker.worker.transport.handshake import Membership
from pipeworker.worker.transport.network import CoordinatorStore, Network


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """A worker that has loaded the job.

    Attributes:
        restore: the state that the worker starts from; None at the start of a run.
        accelerator: streams of the device; None for the CPU.
        path: path of the job file; None for a script.
        modules: returns the modules with the user's code that are imported by now.
        reader: reader of the job's data, used on the first stage.
    """

    settings: Settings
    control: Control
    role: Role
    run_dir: RunDir
    restore: Restore | None
    device: torch.device
    accelerator: Accelerator | None
    job: JobFile
    path: Path | None
    modules: Callable[[], Sequence[ModuleType]]
    reader: Reader

    @staticmethod
    def load(settings: Settings, control: Control, welcome: Welcome) -> LoadedWorker:
        """Choose the device and load the job."""
        kernel_cache.keep_private()  # before the job file imports more of torch
        try:
            run_dir = RunDir.open(Path(welcome.run_dir))
        except OSError as error:  # it was moved at this moment, or this host does not see it
            raise RecordError(welcome.run_dir, error) from None
        placement = Placement(welcome.stages, welcome.replicas)
        if settings.to_log:
            redirect_output(run_dir.worker_log(settings.rank))
        options = Options.from_json(welcome.options)
        role = Role(settings.rank, placement, options)
        control.name = placement.names(settings.rank)
        control.silence_timeout = options.worker_timeout
        if options.is_planned and settings.survey is not None:
            settings.survey.begin(Path(settings.job_file or options.job_file), options)
        if options.interface is not None:
            interfaces.address_of(options.interface)  # fails before anything that takes long
        torch.set_num_threads(options.threads)
        if options.deterministic:
            numerics.before_start()
        device = device_for(options.device, settings.local_rank)
        accelerator = accelerator_for(device)
        control.memory = partial(used_memory, device)
        check_backend(options.backend, device, accelerator)
        code = job, _, _ = _load(settings, options, device)
        every = f"--evaluate-every {options.evaluate_every}" if options.evaluate_every else ""
        first = "--evaluate-first" if options.evaluate_first else ""
        option = "evaluate" if options.evaluate_only else every or first
        if option and job.evaluation is None:
            advice = "define it, or leave this out"
            if options.evaluate_only:  # with the job file that the run has recorded
                advice = "define it, resume the run with the new file and more --steps, and retry"
            raise UsageError(f"{option}: {job.where} has no evaluation(); {advice}")
        if options.deterministic:  # whatever the job file has set
            numerics.enable_deterministic()
        reader = _reader(settings, role, job, welcome, rng.accelerator_generator(device))
        known = settings, control, role, run_dir, welcome.restore, device, accelerator
        return LoadedWorker(*known, *code, reader)

    def place(self, plan: Plan) -> LoadedWorker:
        """Return the same worker with the stages that the plan gives it."""
        role, control = self.role, self.control
        role = replace(role, placement=Placement(plan.held, role.placement.replicas))
        control.name = role.placement.names(role.rank)
        return replace(self, role=role)

    def evaluation(self) -> Generator[MicroBatches, None, None]:
        """Return the mini-batches of ``evaluation()``, which are read as stage 0 takes them."""
        reader = partial(
            Reader,
            microbatches=self.role.options.microbatches,
            seed=self.role.options.seed,
            epochs=1,
            seed_of=rng.evaluation_data_seed,
            accelerator=rng.accelerator_generator(self.device),
        )
        return read_sets(self.job.evaluation, reader)

    def access(self) -> tuple[CoordinatorStore, Network, Membership]:
        """Return what is needed to reach other hosts; each store has a deadline of its own."""
        options, settings = self.role.options, self.settings
        return (
            CoordinatorStore(self.control.request),
            Network(settings.endpoint, options.backend, options.interface),
            Membership(settings.token, settings.generation),
        )

    def announce(self, microbatches: int) -> None:
        """Report a mini-batch with another number of micro-batches to the coordinator."""
        if self.role.replica == 0:  # all replicas read the same
            self.control.send(Upcoming(self.role.rank, microbatches))


def _reader(
    settings: Settings,
    role: Role,
    job: JobFile,
    welcome: Welcome,
    accelerator: rng.Generator | None,
) -> Reader:
    """Return the reader of the job's data; a process of the agent's may read for it."""
    options, every = role.options, role.every_replica_reads
    replica, replicas = (role.replica, role.placement.replicas) if every else (0, 1)
    found = reader_options(job, options, replica, replicas) | {"accelerator": accelerator}
    link = settings.reader
    if link is not None and role.reads_data and not options.own_loop:
        setup = Setup(welcome.options, welcome.run_dir, settings.rank, replica, replicas)
        patience = timings().patience(options.worker_timeout)
        return RemoteReader(job.data, link, setup, STALL_FACTOR * patience, patience, **found)
    if link is not None:
        end_reading(link)  # an earlier worker of the rank may have had the first stage
    return Reader(job.data, **found)


def _load(
    settings: Settings, options: Options, device: torch.device
) -> tuple[JobFile, Path | None, Callable[[], Sequence[ModuleType]]]:
    """Load the job file, unless a script passed the job."""
    if settings.job is not None:
        return settings.job, None, survey.modules_of_the_user
    path = Path(settings.job_file or options.job_file)
    settings.tracker.set(Phase.LOADING)
    rng.seed_all(options.seed, rng.accelerator_generator(device))
    with (
        capture_exit_message(to_log=settings.to_log),
        user_code(f"the job file {path.name}", early=True),
    ):
        job = job_file.load(path, options.arguments)
    return job, path, job_file.modules
