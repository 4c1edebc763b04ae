"""One rank's part of a job: described, built, and run as the coordinator says."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import platform
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from pipeworker import __version__
from pipeworker.errors import ProtocolError
from pipeworker.job.options import Options
from pipeworker.plan.actions import Action, Edge, parse_actions
from pipeworker.plan.placement import Placement
from pipeworker.record import checkpoint
from pipeworker.record.manifest import Shard
from pipeworker.record.rundir import RunDir
from pipeworker.wire import interfaces
from pipeworker.wire.lines import never
from pipeworker.wire.messages.advance import Advance, Finish
from pipeworker.wire.messages.calls import Wait
from pipeworker.wire.messages.checkpoint import Restore, Save
from pipeworker.wire.messages.directions import FromWorker, ToWorker
from pipeworker.wire.messages.evaluation import Evaluate, Evaluated, Evaluation, EvaluationDone
from pipeworker.wire.messages.failure import Abort, Cause, Failure
from pipeworker.wire.messages.plan import Described, Plan, Ready
from pipeworker.wire.messages.position import Phase
from pipeworker.wire.messages.presence import Hello, Ping, Welcome
from pipeworker.wire.messages.step import Batch, RunStep, StepDone, Upcoming, Update
from pipeworker.wire.messages.store import StoreOperation, StoreReply
from pipeworker.worker.blame import Raised, failure_of
from pipeworker.worker.brought import bring
from pipeworker.worker.console import redirect_output
from pipeworker.worker.description import describe
from pipeworker.worker.device import numerics
from pipeworker.worker.device.accelerator import accelerator_for
from pipeworker.worker.device.device import device_for, peak_memory, unit_of
from pipeworker.worker.device.visible import TorchAccelerators
from pipeworker.worker.held import Held
from pipeworker.worker.model.model import Model
from pipeworker.worker.role import Role
from pipeworker.worker.settings import Settings
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.state.remembered import Where
from pipeworker.worker.state.state import State
from pipeworker.worker.step.data import MicroBatches, Reader, joined
from pipeworker.worker.step.evaluation import Averages
from pipeworker.worker.step.executor import Executor
from pipeworker.worker.transport.connect import check_backend, connect
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.transport.network import CoordinatorStore, Network
from pipeworker.worker.transport.proof import Membership
from pipeworker.worker.transport.structure import Kinds


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


class Worker:
    """One rank."""

    def __init__(self, settings: Settings, line: Line) -> None:
        self.deterministic = False  # until it is told so
        self._settings = settings
        self._line = line
        self._tracker = settings.tracker
        self._rank = settings.rank
        self._held = Held()
        self._model: Model | None = None
        self._transient: tuple[type[BaseException], ...] = ()
        self._updated = False
        self._restored: Restore | None = None
        self._classes: dict[str, type] = {}
        self._evaluation_pass: tuple[Action, ...] = ()
        self._states: list[State] = []  # one, once its stages are built
        self._executors: list[Executor] = []  # one, once it is connected

    @property
    def placement(self) -> Placement:
        """Of all workers."""
        return self._role.placement

    @property
    def stages(self) -> dict[int, Stage]:
        """Its own, by index."""
        return self._held.stages

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Of the first of its stages that trains."""
        return self._held.optimizer

    @property
    def saved(self) -> int:
        """The step of the last checkpoint; -1 without one."""
        return self._state.saved

    @property
    def _executor(self) -> Executor:
        return self._executors[0]

    @property
    def _state(self) -> State:
        return self._states[0]

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
        kind, stage = self._held.class_of(position.layer)
        if not kind and self._model is not None:
            kind = self._model.class_of(position.layer)
        named = self._line.name if stage is None else f"stage {stage}"
        keeps = "" if stage is None or not self._executors else self._executor.keeps(stage)
        failure = failure_of(error, self._rank, position, kind, named, keeps)
        if isinstance(error, Raised) and isinstance(error.error, self._transient):
            return replace(failure, cause=Cause.TRANSIENT)
        return failure

    def _describe(self, welcome: Welcome) -> Described:
        self.run_dir = RunDir(Path(welcome.run_dir))
        placement = Placement(welcome.held, welcome.replicas)
        log = None
        if self._settings.to_log:
            number = placement.worker_of(self._rank)
            replica = placement.replica_of(self._rank) if placement.replicas > 1 else None
            log = self.run_dir.worker_log(number, replica)
            redirect_output(log)
        options = Options.from_json(welcome.options)
        self._role = role = Role(self._rank, placement, options)
        self._restored = welcome.restore
        self._line.name = placement.names(self._rank)
        self._line.patience = options.worker_timeout
        if options.interface is not None:
            interfaces.address_of(options.interface)  # before anything takes long
        torch.set_num_threads(options.threads)
        self.deterministic = options.deterministic
        if self.deterministic:
            numerics.before_start()
        seen = TorchAccelerators()
        self._device = device_for(options.device, self._settings.local_rank, seen)
        self._unit = unit_of(self._device, seen)
        self._accelerator = accelerator_for(self._device)
        check_backend(options.backend, self._device, self._accelerator)
        self._brought = bring(self._settings, options, self._device, self._tracker, log)
        if self.deterministic:  # whatever the job file has set
            numerics.deterministic()
        job = self._brought.job
        self._transient = job.transient
        self._model = model = Model(job, options.seed, self._device, self._tracker)
        described, self._classes = describe(
            self._brought,
            model,
            role,
            self._tracker,
            self._settings.sample,
            lambda: self._reader.first().inputs[0],
        )
        return described

    @cached_property
    def _reader(self) -> Reader:
        """Reads the data, on the first stage."""
        return self._brought.data(self._role, self._device)

    def _build(self, plan: Plan) -> Ready:
        role, told = self._role, self._restored
        assert self._model
        built, left_out = self._held.build(
            plan,
            role,
            self._brought.job,
            self._model,
            device=self._device,
            tracker=self._tracker,
            begins=told is None,
            accelerator=self._accelerator,
        )
        self._model.forget()
        state = State(
            self._settings,
            role,
            self._held,
            self.run_dir,
            lambda: self._reader,
            self._line.send,
            self._where,
            self.position,
        )
        self._states.append(state)
        if told is not None:
            state.begin(told, plan)
        state.check()
        self._connect(plan)
        batch = self._executor.next_batch
        length = self._reader.length if role.reads else 0
        return Ready(self._rank, built, str(self._device), batch, left_out, length, self._unit)

    def _where(self) -> Where:
        """How other workers are reached."""
        options, settings = self._role.options, self._settings
        return (
            CoordinatorStore(self._line.ask),
            Network(settings.endpoint, options.backend, options.interface),
            Membership(settings.token, settings.generation),
        )

    def _connect(self, plan: Plan) -> None:
        """Join the neighbours, and read the first mini-batch."""
        role = self._role
        self._tracker.wait(phase=Phase.CONNECTING)
        self._state.keep()
        edges = [Edge.parse(edge) for edge in plan.edges]
        links = connect(edges, self._rank, role.placement, *self._where(), self._accelerator)
        executor = Executor(
            self.stages,
            role.placement,
            links,
            self._reader if role.reads else None,
            Courier(),
            self._held.ties,
            self._announce,
            self._agreed(plan.types),
            role.replica,
            reads_ahead=not role.options.own_loop,
            accelerator=self._accelerator,
        )
        self._executors.append(executor)
        self._evaluation_pass = parse_actions(plan.evaluation)
        self._state.connected(self._restored, executor.others)
        if not role.options.own_loop:
            executor.load_first()
            checkpoint.check((), (), self.position())
        self._tracker.wait()

    def _announce(self, microbatches: int) -> None:
        """A mini-batch of another size is read; all replicas read the same."""
        if self._role.replica == 0:
            self._line.send(Upcoming(self._rank, microbatches))

    def _agreed(self, names: Sequence[str]) -> Kinds:
        if not {*names} <= {*self._classes}:
            raise ProtocolError("the plan has a type that this worker did not name")
        return Kinds(self._classes[name] for name in names)

    def _advance(self, message: Advance) -> FromWorker | None:
        self._state.built()
        match message.update:
            case Update():
                self._update(message.update)
            case Evaluated():
                self._held.evaluated(message.update.loss)
        if message.copy is not None:
            self._state.copy(message.copy)
        match message.next:
            case RunStep():
                return self._run(message.next)
            case Evaluate():
                batches = self._brought.evaluation(self._role, self._device)
                return self.evaluate(message.next.step, batches)
            case Save():
                return self._state.save(message.next)
            case Wait() | Finish():
                return None
        return never(message.next)

    def _update(self, update: Update) -> None:
        self._tracker.set(Phase.UPDATE, update.step)
        self._state.settle()
        self._held.apply(update)
        if not (self._updated or update.overflow):
            self._updated = True
            self._state.check()  # what an optimizer keeps is there now
        if self._role.shards and not update.overflow:
            self._tracker.wait(update.step)
            self._held.share(self._executor.others)

    def _run(self, run: RunStep) -> StepDone:
        job = self._brought.job
        by_epoch = job.scheduler is not None and job.scheduler_interval == "epoch"
        if by_epoch and run.batch.microbatches:
            # Whether the epoch ends with this step: one more mini-batch tells, and a run that goes
            # on has the same rates.
            run = dataclasses.replace(run, last=False)
        if run.actions:
            self._executor.program(parse_actions(run.actions))
        result = self._executor.run(run)
        next_batch: Batch | None = self._executor.next_batch
        rates = self._held.learning_rates
        return StepDone(
            self._rank,
            run.step,
            result.losses,
            result.counts,
            self._held.squares(),
            result.busy,
            rates[0] if rates else math.nan,
            peak_memory(self._device),
            next_batch,
            *self._state.copied,
        )

    @property
    def _last(self) -> Stage | None:
        """The last stage, if it is here."""
        return self.stages.get(self.placement.stages - 1)

    def evaluate(self, step: int, batches: Iterator[MicroBatches]) -> EvaluationDone:
        """An evaluation pass; `batches` are looked at where stage 0 of the first replica is."""
        if self._role.replica:
            return EvaluationDone(self._rank, step, peak_memory(self._device), None)
        last, result = self._last, None
        averages = Averages(last.loss_of, self._brought.job.metrics) if last else None
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
        if not self._role.takes:
            return None
        return self._executor.offer(self._reader.cut(batch))

    def cut(self, batch: Any, said: str) -> MicroBatches:
        """All micro-batches of a mini-batch; `said` begins a message about what is wrong."""
        return self._reader.cut(batch, said, whole=True)

    def restore(self, shards: Sequence[Shard]) -> None:
        """As :meth:`State.restore`."""
        self._state.restore(shards)

    def position(self) -> dict[str, Any] | None:
        """Where the data is, before the mini-batch that is held ready; None where none is read."""
        if not self._role.reads:
            return None
        return self._reader.position(held=self._executor.next_batch is not None)

    def close(self) -> None:
        """Let go of channels and threads, and of the memory that channels map."""
        for state in self._states:
            state.close()
        while self._executors:
            self._executors.pop().close()
            gc.collect()  # an executor's handlers refer to it
        self._held.close()


def _versions() -> tuple[str, ...]:
    """Of what must be the same on all hosts."""
    python = ".".join(platform.python_version_tuple()[:2])
    return (f"pipeworker {__version__}", f"torch {torch.__version__}", f"Python {python}")


def _nowhere(*_: Any) -> None:
    """Where there is no last stage, nothing comes out."""
