"""One rank's part of a job: described, built, and run as the coordinator says."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pipeworker.errors import UsageError
from pipeworker.job import file as job_file
from pipeworker.job.file import Job
from pipeworker.job.options import Options
from pipeworker.plan.schedule import Edge, parse_actions
from pipeworker.plan.ties import Tie
from pipeworker.record import weights
from pipeworker.record.rundir import RunDir
from pipeworker.wire.messages import (
    Advance,
    Batch,
    Described,
    Evaluation,
    EvaluationDone,
    Failure,
    FromWorker,
    Hello,
    Phase,
    Plan,
    Ready,
    Save,
    Saved,
    SkipRoute,
    StepDone,
    TiedWeights,
    ToWorker,
    Welcome,
)
from pipeworker.worker import rng, survey
from pipeworker.worker.data import MicroBatches, Reader, joined
from pipeworker.worker.evaluation import Averages
from pipeworker.worker.executor import Executor
from pipeworker.worker.failures import IN_LAYERS, failure_of
from pipeworker.worker.host import device_for, peak_memory, redirect_output
from pipeworker.worker.model import Model
from pipeworker.worker.position import Tracker
from pipeworker.worker.routes import Skips
from pipeworker.worker.stage import Stage
from pipeworker.worker.structures import name_classes
from pipeworker.worker.transport import distributed
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.update import Updater


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker is started with; all else the coordinator tells it.

    Attributes:
        local_rank: which accelerator of this host is the worker's.
        to_log: send what is printed to the stage's log in the run directory.
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
    job: Job | None = None
    sample: Any = None

    def __repr__(self) -> str:  # never the token
        return f"Settings(rank={self.rank}, endpoint={self.endpoint!r})"


class Worker:
    """One rank.

    Args:
        ask: performs an operation on the coordinator's store.
    """

    def __init__(self, settings: Settings, ask: distributed.Ask) -> None:
        self._settings = settings
        self._ask = ask
        self._tracker = settings.tracker
        self._rank = settings.rank
        self.stage: Stage | None = None
        self._model: Model | None = None
        self._executors: list[Executor] = []  # one, once it is connected

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._updater.optimizer

    @property
    def _executor(self) -> Executor:
        return self._executors[0]

    def hello(self) -> Hello:
        return Hello(self._rank, socket.gethostname(), os.getpid())

    def handle(self, message: ToWorker) -> FromWorker | None:
        """Do what the coordinator says; returns what it is told in answer."""
        match message:
            case Welcome():
                return self._describe(message)
            case Plan():
                return self._build(message)
            case Advance():
                return self._advance(message)
            case Save():
                self._save(message)
                return Saved(self._rank, message.step)
        raise AssertionError(message)

    def explain(self, error: BaseException) -> Failure:
        """What was raised, and where."""
        position = self._tracker.get()
        layer_class = ""
        refused = ""
        if self.stage is not None and position.layer >= 0:
            layer_class = type(self.stage.layers[position.layer - self.stage.first]).__name__
            if position.phase in IN_LAYERS and self.stage.refused:
                refused = f"its input was {self.stage.refused}"
        elif self._model is not None:
            layer_class = self._model.class_of(position.layer)
        return failure_of(error, self._rank, position, layer_class, refused)

    def _describe(self, welcome: Welcome) -> Described:
        self.run_dir = RunDir(Path(welcome.run_dir))
        if self._settings.to_log:
            redirect_output(self.run_dir.stage_log(self._rank))
        self._options = options = Options.from_json(welcome.options)
        torch.set_num_threads(options.threads)
        self._device = device_for(options.device, self._settings.local_rank)
        if self._settings.job is None:
            self._tracker.set(Phase.LOADING)
            rng.seed_all(options.seed, rng.accelerator_generator(self._device))
            there = set(sys.modules)
            self._job = job_file.load(Path(options.job_file), options.arguments)
            modules = survey.new_modules(there)
        else:
            self._job = self._settings.job
            modules = survey.modules_of_the_user()
        if options.evaluate_every and self._job.evaluation is None:
            raise UsageError(
                f"--evaluate-every {options.evaluate_every}: {self._job.where} has no evaluation()"
            )
        name_classes(modules)
        self._model = model = Model(self._job, options.seed, self._device, self._tracker)
        stashes = self._settings.sample is not None or (
            not options.own_loop and survey.mentions_skips(modules)
        )
        return Described(
            self._rank,
            model.classes,
            self._survey(model) if stashes and self._rank == 0 else (),
            tuple(TiedWeights(tie.names, ()) for tie in model.ties()),
            model.digest(),
        )

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
            repeat=self._options.steps is not None,
            said="step(batch) was given" if self._options.own_loop else "data() gave",
        )

    def _build(self, plan: Plan) -> Ready:
        options, tracker = self._options, self._tracker
        assert self._model
        tied = [Tie(tie.names, tie.stages) for tie in plan.ties]
        layers, ties = self._model.build(plan.first, plan.stop, plan.stage, tied)
        self._elsewhere = ties.elsewhere if ties else set()
        self._is_first, self._is_last = plan.stage == 0, plan.stage == plan.stages - 1
        self.stage = Stage(
            layers,
            plan.first,
            seed=options.seed,
            device=self._device,
            tracker=tracker,
            loss=self._job.loss if self._is_last else None,
            skips=_skips(plan) if plan.skips else None,
            precision=options.precision,
            deferred_batch_norm=options.deferred_batch_norm,
        )
        tracker.set(Phase.UPDATE)
        self._updater = Updater(
            layers,
            plan.first,
            self._job,
            seed=options.seed,
            clip_value=options.clip_grad_value,
            ties=ties,
        )
        self._updater.clear()  # what the user's code may have left on modules of its own
        if self._updater.wants_metric and not (options.evaluate_every or options.own_loop):
            raise UsageError(
                "ReduceLROnPlateau looks at the evaluation loss: give --evaluate-every and define "
                "evaluation() in the job file"
            )
        tracker.set(Phase.CONNECTING)
        links = distributed.connect(
            [Edge.parse(edge) for edge in plan.edges],
            plan.stage,
            distributed.CoordinatorStore(self._ask),
            self._settings.endpoint,
            options.backend,
        )
        reads = self._is_first and not options.own_loop
        executor = Executor(
            self.stage,
            plan.stage,
            plan.stages,
            links,
            self._reader if reads else None,
            Courier(),
            ties,
        )
        self._executors.append(executor)
        if not options.own_loop:
            executor.load_first()
        tracker.set(Phase.WAITING)
        return Ready(
            self._rank,
            tuple(type(layer).__name__ for layer in layers),
            sum(parameter.numel() for parameter in self._updater.parameters),
            str(self._device),
            executor.next_batch,
        )

    def _advance(self, message: Advance) -> StepDone | EvaluationDone | None:
        if message.update is not None:
            self._tracker.set(Phase.UPDATE, message.update.step)
            self._updater.apply(message.update)
        if message.evaluated is not None:
            self._updater.evaluated(message.evaluated.loss)
        if message.evaluate is not None:
            return self.evaluate(message.evaluate.step, self._evaluation())
        run = message.run
        if run is None:
            return None
        if run.actions:
            self._executor.program(parse_actions(run.actions))
        result = self._executor.run(run)
        next_batch: Batch | None = self._executor.next_batch
        return StepDone(
            self._rank,
            run.step,
            result.losses,
            result.counts,
            self._updater.squares(),
            result.busy,
            self._updater.learning_rate,
            peak_memory(self._device),
            next_batch,
        )

    def _evaluation(self) -> Iterator[MicroBatches]:
        """The mini-batches of ``evaluation()``, read on the first stage."""
        if not self._is_first:
            return iter(())
        reader = Reader(
            self._job.evaluation,
            microbatches=self._options.microbatches,
            seed=self._options.seed,
            repeat=False,
            said="evaluation() gave",
            seed_of=rng.evaluation_data_seed,
        )
        return iter(reader.read, None)

    def evaluate(self, step: int, batches: Iterator[MicroBatches]) -> EvaluationDone:
        """An evaluation pass; `batches` are used on the first stage."""
        assert self.stage
        averages = Averages(self.stage.loss_of, self._job.metrics)
        self._executor.stream(step, batches, averages.add)
        result = None
        if self._is_last:
            loss, metrics = averages.result()
            result = Evaluation(step, loss, tuple(metrics), tuple(metrics.values()))
        return EvaluationDone(self._rank, step, peak_memory(self._device), result)

    def predict(self, step: int, batches: Iterator[MicroBatches], *, everywhere: bool) -> Any:
        """The model's output in eval mode: on the last stage, or on all; None on the others.

        Raises:
            UsageError: an output is not a batch.
        """
        outputs: list[Any] = []
        self._executor.stream(step, batches, lambda output, *_: outputs.append(output))
        whole = joined(outputs) if self._is_last else None
        return self._executor.hand_back(whole) if everywhere else whole

    def offer(self, batch: Any) -> Batch | None:
        """Hold a mini-batch ready for the next step, on the first stage.

        Raises:
            UsageError: it is not a pair of tensors that agree in dim 0.
        """
        return self._executor.offer(self.cut(batch)) if self._is_first else None

    def cut(self, batch: Any, said: str | None = None) -> MicroBatches:
        """A mini-batch as micro-batches; `said` begins a message about what is wrong with it."""
        return self._reader.cut(batch, said)

    def close(self) -> None:
        """Let go of channels and threads, and of the memory that channels map."""
        while self._executors:
            self._executors.pop().close()
            gc.collect()  # an executor's handlers refer to it
        if self.stage is not None:
            self.stage.close()

    def _save(self, message: Save) -> None:
        assert self.stage is not None
        self._tracker.set(Phase.SAVING, message.step)
        path = weights.stage_file(self.run_dir.partial_checkpoint(message.step), self._rank)
        weights.save_stage(
            path,
            self.stage.layers,
            self.stage.first,
            self._updater.optimizer,
            self._elsewhere,
        )


def _skips(plan: Plan) -> Skips:
    arriving: dict[int, tuple[str, ...]] = {}
    departing: dict[int, tuple[str, ...]] = {}
    for route in sorted(plan.skips, key=lambda route: (route.source, route.target, route.name)):
        if route.source == route.target:
            continue
        if route.source == plan.stage:
            departing[route.target] = (*departing.get(route.target, ()), route.name)
        else:
            arriving[route.source] = (*arriving.get(route.source, ()), route.name)
    return Skips(arriving, departing)
