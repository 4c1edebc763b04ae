"""One rank's part of a job: described, built, and run as the coordinator says."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from pipeworker import __version__
from pipeworker.errors import ProtocolError, UsageError
from pipeworker.exact import partials
from pipeworker.host import streams
from pipeworker.host.position import Tracker
from pipeworker.job import file as job_file
from pipeworker.job import sources
from pipeworker.job.file import Job
from pipeworker.job.options import Options
from pipeworker.plan.actions import Action, Edge, parse_actions
from pipeworker.plan.placement import Placement
from pipeworker.plan.ties import Tie
from pipeworker.record import checkpoint
from pipeworker.record.checkpoint import Checkpoint
from pipeworker.record.initial import Initial
from pipeworker.record.manifest import Shard
from pipeworker.record.memory import Memory
from pipeworker.record.restore import position, restore
from pipeworker.record.rundir import RunDir
from pipeworker.wire import interfaces
from pipeworker.wire.lines import never
from pipeworker.wire.messages.advance import Advance, Finish
from pipeworker.wire.messages.calls import Wait
from pipeworker.wire.messages.checkpoint import Restore, Save, Saved
from pipeworker.wire.messages.directions import FromWorker, ToWorker
from pipeworker.wire.messages.evaluation import Evaluate, Evaluated, Evaluation, EvaluationDone
from pipeworker.wire.messages.failure import Abort, Cause, Failure
from pipeworker.wire.messages.plan import (
    Built,
    Described,
    Plan,
    Ready,
    SkipRoute,
    Source,
    TiedWeights,
)
from pipeworker.wire.messages.position import Phase
from pipeworker.wire.messages.presence import Hello, Ping, Welcome
from pipeworker.wire.messages.step import Batch, RunStep, StepDone, Upcoming, Update
from pipeworker.wire.messages.store import StoreOperation, StoreReply
from pipeworker.worker import heirs
from pipeworker.worker.blame import Raised, failure_of, users
from pipeworker.worker.console import last_words
from pipeworker.worker.device import device_for, peak_memory, redirect_output
from pipeworker.worker.internals import loads_itself
from pipeworker.worker.keeper import Keeper
from pipeworker.worker.model import survey
from pipeworker.worker.model.model import Model
from pipeworker.worker.model.structures import classes_of
from pipeworker.worker.remembered import Remembered, needed
from pipeworker.worker.stage import rng
from pipeworker.worker.stage.compiled import KERNELS
from pipeworker.worker.stage.stage import Skips, Stage
from pipeworker.worker.step.data import MicroBatches, Reader, joined
from pipeworker.worker.step.evaluation import Averages
from pipeworker.worker.step.executor import Executor
from pipeworker.worker.transport import distributed
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.transport.proof import Membership
from pipeworker.worker.transport.structure import Kinds
from pipeworker.worker.update.ties import Ties
from pipeworker.worker.update.update import Updater


class Line(Protocol):
    """A worker's line to the coordinator, as far as its main thread uses it."""

    name: str
    patience: float | None

    def send(self, message: FromWorker) -> None:
        """Returns at once."""

    def ask(
        self,
        operation: StoreOperation,
        keys: tuple[str, ...],
        value: bytes,
        expected: bytes,
        seconds: float | None = None,
    ) -> StoreReply:
        """Perform one operation on the coordinator's store."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker is started with; all else the coordinator tells it.

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


class Worker:
    """One rank."""

    def __init__(self, settings: Settings, line: Line) -> None:
        self._settings = settings
        self._line = line
        self._tracker = settings.tracker
        self._rank = settings.rank
        self.stages: dict[int, Stage] = {}
        self._updaters: dict[int, Updater] = {}
        self.placement = Placement.identity(1)
        self._model: Model | None = None
        self._transient: tuple[type[BaseException], ...] = ()
        self._ties: dict[int, Ties] = {}
        self._ties_of: dict[str, str] = {}  # each further name of a tied weight, and the first
        self._restored: Restore | None = None
        self._inherits = False
        self._remembered = Remembered(
            settings.memories,
            keeps=settings.keeps,
            kept=settings.kept,
            first=not settings.local_rank,
            where=lambda: (self._store, self._network, self._membership),
        )
        self.saved = -1
        """The step of the last checkpoint."""
        self._classes: dict[str, type] = {}
        self._evaluation_pass: tuple[Action, ...] = ()
        self._executors: list[Executor] = []  # one, once it is connected
        self._keepers: list[Keeper] = []  # likewise

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Of the first of its stages that trains."""
        return next((u.optimizer for u in self._updaters.values() if u.optimizer), None)

    @property
    def replica(self) -> int:
        """Which one it is of."""
        return self.placement.replica_of(self._rank)

    @property
    def _shards(self) -> bool:
        """Whether each replica updates a part of the weights."""
        return self._options.shard_optimizer and self.placement.replicas > 1

    @property
    def _executor(self) -> Executor:
        return self._executors[0]

    @property
    def _keeper(self) -> Keeper:
        if not self._keepers:
            memories = self._settings.memories.get(self._rank, ())
            placement, folder = self.placement, self.run_dir.partial_checkpoint
            number, workers = self._rank, placement.ranks
            if not self._shards:  # the first replica has all there is to write
                number, workers = placement.worker_of(self._rank), placement.workers
            mirror = self._remembered.mirror(self._rank)
            keeper = Keeper(
                number, workers, memories, folder, self._line.send, placement.ranks, mirror
            )
            self._keepers.append(keeper)
        return self._keepers[0]

    def hello(self) -> Hello:
        return Hello(self._rank, socket.gethostname(), os.getpid(), _versions())

    def handle(self, message: ToWorker) -> FromWorker | None:
        """Do what the coordinator says; returns what it is told in answer."""
        match message:
            case Welcome():
                return self._describe(message)
            case Plan():
                return self._build(message)
            case Advance():
                return self._advance(message)
            case StoreReply() | Ping() | Abort():
                raise AssertionError(message)  # the control thread's
        return never(message)

    def explain(self, error: BaseException) -> Failure:
        """What was raised, and where."""
        position = self._tracker.get()
        kinds = [stage.class_of(position.layer) for stage in self.stages.values()]
        kind = "".join(kinds)
        if not kind and self._model is not None:
            kind = self._model.class_of(position.layer)
        at = [i for i, stage in self.stages.items() if stage.class_of(position.layer)]
        named = f"stage {at[0]}" if at else self._line.name
        failure = failure_of(error, self._rank, position, kind, named)
        if isinstance(error, Raised) and isinstance(error.error, self._transient):
            return replace(failure, cause=Cause.TRANSIENT)
        return failure

    def _describe(self, welcome: Welcome) -> Described:
        self.run_dir = RunDir(Path(welcome.run_dir))
        log = None
        if self._settings.to_log:
            placed = Placement(welcome.held, welcome.replicas)
            number = placed.worker_of(self._rank)
            replica = placed.replica_of(self._rank) if placed.replicas > 1 else None
            log = self.run_dir.worker_log(number, replica)
            redirect_output(log)
        self._options = options = Options.from_json(welcome.options)
        self._restored = welcome.restore
        self.placement = Placement(welcome.held, welcome.replicas)
        self._line.name = self.placement.names(self._rank)
        self._line.patience = options.worker_timeout
        if options.interface is not None:
            interfaces.address_of(options.interface)  # before anything takes long
        torch.set_num_threads(options.threads)
        self._device = device_for(options.device, self._settings.local_rank)
        if self._settings.job is None:
            self._tracker.set(Phase.LOADING)
            rng.seed_all(options.seed, rng.accelerator_generator(self._device))
            there = set(sys.modules)
            with last_words(log), users("the job file", early=True):
                self._job = job_file.load(self._job_file, options.arguments)
            modules = partial(survey.new_modules, there)
        else:
            self._job = self._settings.job
            modules = partial(survey.modules_of_the_user)
        self._transient = self._job.transient
        if options.evaluate_every and self._job.evaluation is None:
            raise UsageError(
                f"--evaluate-every {options.evaluate_every}: {self._job.where} has no evaluation()"
            )
        self._model = model = Model(self._job, options.seed, self._device, self._tracker)
        stashes = self._settings.sample is not None or (
            not options.own_loop and survey.mentions_skips(modules())
        )
        reads = self._rank == self.placement.rank_of(0)
        skips = self._survey(model) if stashes and reads else ()
        with users("model()", early=True):
            ties = tuple(TiedWeights(tie.names, ()) for tie in model.ties())
            digest = model.digest()
        self._classes = classes_of(modules())  # those that model() imported among them
        names = model.names if model.names != tuple(map(str, range(len(model.names)))) else ()
        types = tuple(self._classes)
        files = self._files(modules())
        notes = () if options.own_loop else job_file.unused(self._job, options)
        described = (model.classes, skips, ties, digest, types, names, files, notes)
        return Described(self._rank, *described)

    def _files(self, modules: Sequence[ModuleType]) -> tuple[Source, ...]:
        """The job file and what it has imported; what a script is made of is its own."""
        if self._settings.job is not None:
            return ()
        return tuple(Source(*pair) for pair in sources.digests(self._job_file, modules))

    @property
    def _job_file(self) -> Path:
        return Path(self._settings.job_file or self._options.job_file)

    def _survey(self, model: Model) -> tuple[SkipRoute, ...]:
        """The skip connections of the model; only asked for when the job mentions pipeworker."""
        self._tracker.set(Phase.READING)
        own = self._options.own_loop
        value = self._settings.sample if own else self._reader.first().inputs[0]
        found = model.skips(value, self._options.precision)
        return tuple(SkipRoute(skip.source, skip.target, skip.name) for skip in found)

    @cached_property
    def _reader(self) -> Reader:
        """Reads the data, on the first stage."""
        return Reader(
            self._job.data,
            microbatches=self._options.microbatches,
            seed=self._options.seed,
            epochs=self._options.passes,
            said="step(batch) was given" if self._options.own_loop else "data() gave",
            accelerator=rng.accelerator_generator(self._device),
            replica=self.replica if self._options.read_data == "every" else 0,
            replicas=self.placement.replicas if self._options.read_data == "every" else 1,
        )

    @property
    def _store(self) -> distributed.CoordinatorStore:
        return distributed.CoordinatorStore(self._line.ask)

    @property
    def _network(self) -> distributed.Network:
        options = self._options
        return distributed.Network(self._settings.endpoint, options.backend, options.interface)

    @property
    def _membership(self) -> Membership:
        return Membership(self._settings.token, self._settings.generation)

    @property
    def _reads(self) -> bool:
        """Whether data is read by this replica."""
        return self._options.read_data == "every" or not self.replica

    def _build(self, plan: Plan) -> Ready:
        options, tracker, placement = self._options, self._tracker, self.placement
        held = placement.stages_of(self._rank)
        assert self._model
        built = []
        initial = self._initial(plan)
        for part in plan.ranges:
            tied = [Tie(t.names, t.stages) for t in plan.ties if part.stage in t.stages]
            layers, ties = self._model.build(part.first, part.stop, part.stage, tied, held)
            is_last = part.stage == placement.stages - 1
            stage = self.stages[part.stage] = Stage(
                layers,
                part.first,
                index=part.stage,
                before=self._model.class_of(part.first - 1),
                seed=options.seed,
                device=self._device,
                tracker=tracker,
                loss=self._job.loss if is_last else None,
                skips=Skips.of(plan.skips, part.stage),
                precision=options.precision,
                deferred_batch_norm=options.deferred_batch_norm,
                compiler=KERNELS if options.compile else None,
            )
            if ties is not None:
                self._ties[part.stage] = ties
            if initial is not None:  # what an optimizer copies when it is built
                tracker.set(Phase.RESTORING)
                initial.load(self._part(stage), users)
            tracker.set(Phase.UPDATE)
            updater = self._updaters[part.stage] = Updater(
                layers,
                part.first,
                self._job,
                seed=options.seed,
                clip_value=options.clip_grad_value,
                ties=ties,
                replica=self.replica if self._shards else 0,
                replicas=placement.replicas if self._shards else 1,
            )
            updater.clear()  # what the user's code may have left on modules of its own
            if updater.wants_metric and not (options.evaluate_every or options.own_loop):
                raise UsageError(
                    "ReduceLROnPlateau looks at the evaluation loss: give --evaluate-every and "
                    "define evaluation() in the job file"
                )
            classes = tuple(type(layer).__name__ for layer in stage.layers)
            count = sum(parameter.numel() for parameter in updater.parameters)
            built.append(Built(part.stage, part.first, classes, count))
        left_out = 0 if initial is None else self._settle(initial)
        del initial  # and what it has mapped
        self._model.forget()
        self._ties_of = {
            self._named(name): self._named(tie.names[0])
            for tie in plan.ties
            for name in tie.names[1:]
        }
        if self._restored is not None:
            self._go_on_from(self._restored, plan)
        checkpoint.check(self._parts(), self._elsewhere)
        self._connect(plan)
        batch = self._executor.next_batch
        reads = 0 in self.stages and self._reads and not options.own_loop
        length = self._reader.length if reads else 0
        return Ready(self._rank, tuple(built), str(self._device), batch, left_out, length)

    def _initial(self, plan: Plan) -> Initial | None:
        """The weights to begin with, if it is the beginning."""
        assert self._model
        if self._options.init_from is None or self._restored is not None:
            return None
        self._tracker.set(Phase.RESTORING)
        ties = [tuple(map(self._named, tie.names)) for tie in plan.ties]
        return Initial(Path(self._options.init_from), self._model.names, ties)

    def _settle(self, initial: Initial) -> int:
        """Log what of the weights to begin with does not fit; returns how many names."""
        partial, first = self._options.init_partial, 0 in self.stages
        left_out = initial.settle(partial=partial, first=first)
        if left_out:
            text = f"--init-from {self._options.init_from}: {initial.misfits.listed()}"
            streams.note(f"warning: {text}")
        return left_out

    def _go_on_from(self, told: Restore, plan: Plan) -> None:
        """Begin with the state that a checkpoint, or workers before this one, left behind."""
        self._tracker.set(Phase.RESTORING)
        if told.path:
            found = Checkpoint(Path(told.path)).shards()
        else:
            ranks = needed(told, plan, self.placement, self._rank, self.stages)
            others = self.placement.replicas > 1 and not self._shards
            found = self._remembered.shards(told, ranks, here=others)
        self._inherits = not found
        if self._inherits:  # from another replica, once it is connected
            return
        self.restore(found)
        if 0 in self.stages and self._reads and not self._options.own_loop:
            self._reader.restore(position(found))
        self._remembered.restored()

    def _inherit(self, told: Restore) -> None:
        """Take the state of a living replica, or give it."""

        def files(stage: int) -> heirs.Files:
            place = None if stage else self.position()
            part = self._part(self.stages[stage], self._updaters[stage])
            return heirs.files_of(part, told.step, place)

        mine = None if self._inherits else files
        given = heirs.exchange(self._executor.others.reductions, mine)
        for index, found in given.items():
            with heirs.shard_of(found) as shard:
                part = self._part(self.stages[index], self._updaters[index])
                restore([shard], [part], {}, users, loads_itself)
                if not index and self._reads and not self._options.own_loop:
                    self._reader.restore(position([shard]))

    def restore(self, shards: Sequence[Shard]) -> None:
        """Put back what workers wrote, whatever stages they held.

        Raises:
            UsageError: it is of another model, or damaged.
            Raised: what the user's code raised.
        """
        restore(shards, self._parts(), self._ties_of, users, loads_itself)

    def _named(self, weight: str) -> str:
        """A weight, as ``3.bias``, by its name in the user's module."""
        assert self._model
        layer, _, rest = weight.partition(".")
        return f"{self._model.names[int(layer)]}.{rest}"

    def _connect(self, plan: Plan) -> None:
        """Join the neighbours, and read the first mini-batch."""
        options, placement = self._options, self.placement
        self._tracker.wait(phase=Phase.CONNECTING)
        self._remembered.keep()
        links = distributed.connect(
            [Edge.parse(edge) for edge in plan.edges],
            self._rank,
            placement,
            self._store,
            self._network,
            self._membership,
        )
        reads = 0 in self.stages and not options.own_loop and self._reads
        executor = Executor(
            self.stages,
            placement,
            links,
            self._reader if reads else None,
            Courier(),
            self._ties,
            self._announce,
            self._agreed(plan.types),
            self.replica,
            reads_ahead=not options.own_loop,
        )
        self._executors.append(executor)
        self._evaluation_pass = parse_actions(plan.evaluation)
        told = self._restored
        if told is not None and not told.path and placement.replicas > 1 and not self._shards:
            self._inherit(told)
        if not options.own_loop:
            executor.load_first()
            checkpoint.check((), (), self.position())
        self._tracker.wait()

    def _announce(self, microbatches: int) -> None:
        """A mini-batch of another size is read; all replicas read the same."""
        if self.replica == 0:
            self._line.send(Upcoming(self._rank, microbatches))

    def _agreed(self, names: Sequence[str]) -> Kinds:
        if not {*names} <= {*self._classes}:
            raise ProtocolError("the plan has a type that this worker did not name")
        return Kinds(self._classes[name] for name in names)

    def _advance(self, message: Advance) -> FromWorker | None:
        self._remembered.built()
        match message.update:
            case Update():
                self._tracker.set(Phase.UPDATE, message.update.step)
                for keeper in self._keepers:
                    keeper.settle()
                for updater in self._updaters.values():
                    updater.apply(message.update)
                if self._shards and not message.update.overflow:
                    self._tracker.wait(message.update.step)
                    shards = {index: u.shards for index, u in self._updaters.items()}
                    self._executor.others.share_weights(shards)
            case Evaluated():
                for updater in self._updaters.values():
                    updater.evaluated(message.update.loss)
        if message.copy is not None:
            copy = message.copy
            if self.replica and not self._shards:  # the first one's is written
                copy = replace(copy, save=False)
            self._keeper.copy(copy, self._parts(), self._elsewhere, self.position())
        match message.next:
            case RunStep():
                return self._run(message.next)
            case Evaluate():
                return self.evaluate(message.next.step, self._evaluation())
            case Save():
                return self._save(message.next)
            case Wait() | Finish():
                return None
        return never(message.next)

    def _run(self, run: RunStep) -> StepDone:
        by_epoch = self._job.scheduler is not None and self._job.scheduler_interval == "epoch"
        if by_epoch and run.batch.microbatches:
            # Whether the epoch ends with this step: one more mini-batch tells, and a run that goes
            # on has the same rates.
            run = dataclasses.replace(run, last=False)
        if run.actions:
            self._executor.program(parse_actions(run.actions))
        result = self._executor.run(run)
        next_batch: Batch | None = self._executor.next_batch
        updaters = self._updaters.values()
        trains = [u.learning_rate for u in updaters if u.optimizer is not None]
        return StepDone(
            self._rank,
            run.step,
            result.losses,
            result.counts,
            partials(square for updater in updaters for square in updater.squares()),
            result.busy,
            trains[0] if trains else math.nan,
            peak_memory(self._device),
            next_batch,
            *(self._keepers[0].whole if self._keepers else ()),
        )

    def _evaluation(self) -> Iterator[MicroBatches]:
        """The mini-batches of ``evaluation()``, read on the first stage of the first replica."""
        if 0 not in self.stages or self.replica:
            return iter(())
        reader = Reader(
            self._job.evaluation,
            microbatches=self._options.microbatches,
            seed=self._options.seed,
            epochs=1,
            said="evaluation() gave",
            seed_of=rng.evaluation_data_seed,
            accelerator=rng.accelerator_generator(self._device),
        )
        return reader.once()

    @property
    def _last(self) -> Stage | None:
        """The last stage, if it is here."""
        return self.stages.get(self.placement.stages - 1)

    def evaluate(self, step: int, batches: Iterator[MicroBatches]) -> EvaluationDone:
        """An evaluation pass; `batches` are looked at where stage 0 of the first replica is."""
        if self.replica:
            return EvaluationDone(self._rank, step, peak_memory(self._device), None)
        last, result = self._last, None
        averages = Averages(last.loss_of, self._job.metrics) if last else None
        sink = averages.add if averages else _nowhere
        self._executor.stream(step, self._evaluation_pass, batches, sink)
        if averages:
            loss, metrics = averages.result()
            result = Evaluation(step, loss, tuple(metrics), tuple(metrics.values()))
        return EvaluationDone(self._rank, step, peak_memory(self._device), result)

    def predict(self, step: int, batches: Iterator[MicroBatches], *, everywhere: bool) -> Any:
        """The model's output in eval mode: where the last stage is, or everywhere; else None.

        Raises:
            UsageError: an output is not a batch.
        """
        outputs: list[Any] = []
        keep = lambda output, *_: outputs.append(output)  # noqa: E731
        self._executor.stream(step, self._evaluation_pass, batches, keep)
        whole = joined(outputs) if self._last else None
        return self._executor.hand_back(whole) if everywhere else whole

    def offer(self, batch: Any) -> Batch | None:
        """Hold a mini-batch ready for the next step, where stage 0 is.

        Raises:
            UsageError: it is not a pair of tensors that agree in dim 0.
        """
        if 0 not in self.stages or not self._reads:
            return None
        return self._executor.offer(self._reader.cut(batch))

    def cut(self, batch: Any, said: str) -> MicroBatches:
        """All micro-batches of a mini-batch; `said` begins a message about what is wrong."""
        return self._reader.cut(batch, said, whole=True)

    def position(self) -> dict[str, Any] | None:
        """Where the data is, before the mini-batch that is held ready; None where none is read."""
        if 0 not in self.stages or not self._reads or self._options.own_loop:
            return None
        return self._reader.position(held=self._executor.next_batch is not None)

    def close(self) -> None:
        """Let go of channels and threads, and of the memory that channels map."""
        self._remembered.close()
        while self._keepers:
            self._keepers.pop().close()
        while self._executors:
            self._executors.pop().close()
            gc.collect()  # an executor's handlers refer to it
        for stage in self.stages.values():
            stage.close()

    def _save(self, save: Save) -> Saved | None:
        self._tracker.set(Phase.SAVING, save.step)
        self.saved = save.step
        if self.replica and not self._shards:  # the first one's state is all there is to write
            self._tracker.wait()
            return None
        return self._keeper.save(
            save.step, save.slot, self._parts(), self._elsewhere, self.position()
        )

    def _parts(self) -> list[checkpoint.Part]:
        """What its stages hold, and is kept of them."""
        whole = not (self._shards and self.replica)
        parts = [self._part(stage, self._updaters[i]) for i, stage in self.stages.items()]
        return [replace(part, keeps_weights=whole) for part in parts]

    def _part(self, stage: Stage, updater: Updater | None = None) -> checkpoint.Part:
        assert self._model
        names = self._model.names[stage.first : stage.first + len(stage.layers)]
        update = (updater.optimizer, updater.schedule, updater.scheduler) if updater else ()
        return checkpoint.Part(names, stage.layers, stage.state_dicts(), *update)

    @property
    def _elsewhere(self) -> set[int]:
        """The ids of parameters whose optimizer state another stage writes."""
        return set().union(*(ties.elsewhere for ties in self._ties.values()))


def _versions() -> tuple[str, ...]:
    """Of what must be the same on all hosts."""
    python = ".".join(platform.python_version_tuple()[:2])
    return (f"pipeworker {__version__}", f"torch {torch.__version__}", f"Python {python}")


def _nowhere(*_: Any) -> None:
    """Where there is no last stage, nothing comes out."""
