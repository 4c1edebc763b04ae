"""A worker's main thread: does what the coordinator says, and says what went wrong."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from pipeworker.errors import UsageError
from pipeworker.job import file as job_file
from pipeworker.job.options import Options
from pipeworker.plan.schedule import Edge, parse_actions
from pipeworker.plan.ties import Tie, declared, layer_of
from pipeworker.record import weights
from pipeworker.record.rundir import RunDir
from pipeworker.wire.messages import (
    Advance,
    Batch,
    Described,
    EvaluationDone,
    Failed,
    Failure,
    Finish,
    Hello,
    Phase,
    Plan,
    Ready,
    Save,
    Saved,
    SkipRoute,
    StepDone,
    TiedWeights,
    Welcome,
)
from pipeworker.worker import rng, survey
from pipeworker.worker.control import Control, Leave
from pipeworker.worker.data import Reader
from pipeworker.worker.evaluation import Averages
from pipeworker.worker.executor import Executor
from pipeworker.worker.failures import IN_LAYERS, failure_of
from pipeworker.worker.position import Tracker
from pipeworker.worker.routes import Skips
from pipeworker.worker.stage import Stage
from pipeworker.worker.structures import name_classes
from pipeworker.worker.ties import Ties, separate, shared_parameters
from pipeworker.worker.transport import distributed
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.update import Updater


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker is started with; all else the coordinator tells it.

    Attributes:
        local_rank: which accelerator of this host is the worker's.
        leave: ends the process from the control thread.
        to_log: send what is printed to the stage's log in the run directory.
    """

    rank: int
    endpoint: str
    token: str
    local_rank: int
    generation: int = 1
    tracker: Tracker = field(default_factory=Tracker)
    leave: Leave = os._exit
    to_log: bool = True

    def __repr__(self) -> str:  # never the token
        return f"Settings(rank={self.rank}, endpoint={self.endpoint!r})"


def run(settings: Settings) -> int:
    """Be one worker from Hello to the end; returns the exit status."""
    control = Control(
        endpoint=settings.endpoint,
        token=settings.token,
        rank=settings.rank,
        generation=settings.generation,
        tracker=settings.tracker,
        leave=settings.leave,
    )
    control.start()
    worker = _Worker(settings, control)
    try:
        worker.run()
    except BaseException as error:
        control.send(Failed(settings.rank, worker.explain(error)))
        # The coordinator knows the first cause; leaving before it says so would make neighbours
        # report a lost connection first. The control thread ends the process.
        while True:
            control.receive()
    control.close()
    sys.stdout.flush()
    sys.stderr.flush()
    return 0


class _Worker:
    """The states of a worker are the fields that are set: options, then stage, then a step."""

    def __init__(self, settings: Settings, control: Control) -> None:
        self._settings = settings
        self._control = control
        self._tracker = settings.tracker
        self._rank = settings.rank
        self._stage: Stage | None = None

    def run(self) -> None:
        control, rank = self._control, self._rank
        control.send(Hello(rank, socket.gethostname(), os.getpid()))
        while True:
            message = control.receive()
            match message:
                case Welcome():
                    control.send(self._describe(message))
                case Plan():
                    control.send(self._build(message))
                case Advance():
                    done = self._advance(message)
                    if done is not None:
                        control.send(done)
                case Save():
                    self._save(message)
                    control.send(Saved(rank, message.step))
                case Finish():
                    return

    def explain(self, error: BaseException) -> Failure:
        position = self._tracker.get()
        layer_class = ""
        refused = ""
        if self._stage is not None and position.layer >= 0:
            layer_class = type(self._stage.layers[position.layer - self._stage.first]).__name__
            if position.phase in IN_LAYERS and self._stage.refused:
                refused = f"its input was {self._stage.refused}"
        return failure_of(error, self._rank, position, layer_class, refused)

    def _describe(self, welcome: Welcome) -> Described:
        self._run_dir = RunDir(Path(welcome.run_dir))
        if self._settings.to_log:
            _redirect_output(self._run_dir.stage_log(self._rank))
        self._options = options = Options.from_json(welcome.options)
        torch.set_num_threads(options.threads)
        self._device = _device(options.device, self._settings.local_rank)
        self._tracker.set(Phase.LOADING)
        accelerator = rng.accelerator_generator(self._device)
        rng.seed_all(options.seed, accelerator)
        there = set(sys.modules)
        self._job = job_file.load(Path(options.job_file), options.arguments)
        if options.evaluate_every and self._job.evaluation is None:
            raise UsageError(
                f"--evaluate-every {options.evaluate_every}: job file {options.job_file} has no "
                "evaluation()"
            )
        modules = survey.new_modules(there)
        name_classes(modules)
        stashes = survey.mentions_skips(modules)
        self._tracker.set(Phase.BUILDING)
        rng.seed_all(options.seed, accelerator)
        self._entries = job_file.entries(self._job)
        return Described(
            self._rank,
            tuple(
                type(entry).__name__ if isinstance(entry, torch.nn.Module) else "?"
                for entry in self._entries
            ),
            self._survey() if stashes and self._rank == 0 else (),
            tuple(TiedWeights(tie.names, ()) for tie in self._ties()),
        )

    def _ties(self) -> tuple[Tie, ...]:
        """Parameters that are one object in several layers, and those the job file declares."""
        found = [*shared_parameters(self._entries), *self._job.tied]
        return declared(found, len(self._entries))

    def _survey(self) -> tuple[SkipRoute, ...]:
        """The skip connections of the model; only asked for when the job mentions pipeworker."""
        self._tracker.set(Phase.READING)
        first = self._reader.peek()
        assert first  # data that is empty has raised
        found = survey.Survey(
            self._entries, self._options.seed, self._device, self._options.precision
        )
        return tuple(
            SkipRoute(skip.source, skip.target, skip.name)
            for skip in found.run(first.inputs[0], self._tracker)
        )

    @cached_property
    def _reader(self) -> Reader:
        """Reads the data, on the first stage."""
        return Reader(
            self._job.data,
            microbatches=self._options.microbatches,
            seed=self._options.seed,
            repeat=self._options.steps is not None,
        )

    def _build(self, plan: Plan) -> Ready:
        options, tracker = self._options, self._tracker
        tied = [Tie(tie.names, tie.stages) for tie in plan.ties]
        later = [name for tie in tied for name in tie.names[1:]]
        layers = []
        for index in range(plan.first, plan.stop):
            names = [name for name in later if layer_of(name) == index]
            layers.append(self._build_layer(index, names).to(self._device))
        job_file.check_buffers(self._entries, plan.first, plan.stop)
        ties = None
        if tied:
            mine = dict(enumerate(layers, plan.first))
            ties = Ties(plan.stage, tied, mine, lambda index: self._build_layer(index, ()))
        _check_apart(layers, plan.first)
        self._elsewhere = ties.elsewhere if ties else set()
        self._entries = []
        self._is_first, self._is_last = plan.stage == 0, plan.stage == plan.stages - 1
        self._stage = Stage(
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
        if self._updater.wants_metric and not options.evaluate_every:
            raise UsageError(
                "ReduceLROnPlateau looks at the evaluation loss: give --evaluate-every and define "
                "evaluation() in the job file"
            )
        tracker.set(Phase.CONNECTING)
        links = distributed.connect(
            [Edge.parse(edge) for edge in plan.edges],
            plan.stage,
            distributed.CoordinatorStore(self._control.ask),
            self._settings.endpoint,
            options.backend,
        )
        reader = self._reader if self._is_first else None
        self._executor = Executor(
            self._stage, plan.stage, plan.stages, links, reader, Courier(), ties
        )
        self._executor.load_first()
        tracker.set(Phase.WAITING)
        return Ready(
            self._rank,
            tuple(type(layer).__name__ for layer in layers),
            sum(parameter.numel() for parameter in self._updater.parameters),
            str(self._device),
            self._executor.next_batch,
        )

    def _build_layer(self, index: int, tied: Sequence[str]) -> torch.nn.Module:
        """A layer, with objects of its own for the parameters of these names."""
        self._tracker.set(Phase.BUILDING, layer=index)
        entry = self._entries[index]
        if not isinstance(entry, torch.nn.Module):
            rng.seed_all(rng.build_seed(self._options.seed, index))
            return job_file.build(entry, index)
        return separate(entry, [name.partition(".")[2] for name in tied]) if tied else entry

    def _advance(self, message: Advance) -> StepDone | EvaluationDone | None:
        if message.update is not None:
            self._tracker.set(Phase.UPDATE, message.update.step)
            self._updater.apply(message.update)
        if message.evaluated is not None:
            self._updater.evaluated(message.evaluated)
        if message.evaluate is not None:
            return self._evaluate(message.evaluate.step)
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
            _peak_memory(self._device),
            next_batch,
        )

    def _evaluate(self, step: int) -> EvaluationDone:
        source = None
        if self._is_first:
            source = Reader(
                self._job.evaluation,
                microbatches=self._options.microbatches,
                seed=self._options.seed,
                repeat=False,
                name="evaluation",
                seed_of=rng.evaluation_data_seed,
            )
        averages = Averages(self._job.metrics)
        self._executor.evaluate(step, source, averages)
        loss, metrics = averages.result() if self._is_last else (0.0, {})
        names = tuple(metrics)
        return EvaluationDone(self._rank, step, loss, names, tuple(metrics.values()))

    def _save(self, message: Save) -> None:
        assert self._stage is not None
        self._tracker.set(Phase.SAVING, message.step)
        path = weights.stage_file(self._run_dir.partial_checkpoint(message.step), self._rank)
        weights.save_stage(
            path,
            self._stage.layers,
            self._stage.first,
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


def _check_apart(layers: Sequence[torch.nn.Module], first: int) -> None:
    """Callables that return one module would share it on one stage and not on two."""
    seen: dict[int, int] = {}
    for index, layer in enumerate(layers, first):
        for parameter in layer.parameters():
            if seen.setdefault(id(parameter), index) != index:
                raise UsageError(
                    f"layers {seen[id(parameter)]} and {index} were built with one parameter in "
                    "both: declare it with tied = [...] and build each layer anew"
                )


def _redirect_output(path: Path) -> None:
    """Everything the worker prints, C code included, goes to its log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _device(asked: str, local_rank: int) -> torch.device:
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise UsageError("--device cuda: torch sees no CUDA device on this host")
    if asked == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _peak_memory(device: torch.device) -> int:
    """Bytes: of the accelerator's allocator, or of the process on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
