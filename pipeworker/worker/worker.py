"""One rank's part of a job: a state machine over the coordinator's messages."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from typing_extensions import assert_never

from pipeworker.environment import versions
from pipeworker.errors import PipeworkerError, ProtocolError
from pipeworker.facts.failure import Failure
from pipeworker.facts.position import Phase
from pipeworker.facts.step import Evaluation
from pipeworker.host import streams
from pipeworker.job.options import Options
from pipeworker.plan.actions import parse_actions
from pipeworker.trace.recorder import EVALUATION, SAVE, SNAPSHOT, UPDATE
from pipeworker.wire.messages.checkpoint import Save
from pipeworker.wire.messages.directions import Advance, Finish, FromWorker, ToWorker
from pipeworker.wire.messages.plan import Described, Plan, Ready
from pipeworker.wire.messages.presence import Hello, Welcome
from pipeworker.wire.messages.profile import Measure
from pipeworker.wire.messages.step import (
    Change,
    Evaluate,
    EvaluationDone,
    RunStep,
    StepDone,
    Update,
    Wait,
)
from pipeworker.worker import torch_check
from pipeworker.worker.blame import failure_of, is_out_of_memory
from pipeworker.worker.control import Control
from pipeworker.worker.data.reader import MicroBatches
from pipeworker.worker.data.remote_reader import ReadFailed
from pipeworker.worker.data.splitting import concatenate_outputs
from pipeworker.worker.device.device import peak_memory, unit_of, write_allocator_snapshot
from pipeworker.worker.loaded_worker import LoadedWorker
from pipeworker.worker.local_stages import build_stages
from pipeworker.worker.measuring import measure
from pipeworker.worker.model.agreed_plan import agreed_plan
from pipeworker.worker.model.classes import classes_of
from pipeworker.worker.model.model import Model
from pipeworker.worker.phases import ConnectedWorker, ModelledWorker, PlannedWorker
from pipeworker.worker.settings import Settings
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.state.state import State
from pipeworker.worker.step.averages import Averages
from pipeworker.worker.step.evaluation import EvaluationPass, Explain, PassFailed, Sink
from pipeworker.worker.step.profiler import StepProfiler


class Worker:
    """One rank.

    Attributes:
        deterministic: whether ``--deterministic`` is in force.
    """

    def __init__(self, settings: Settings, control: Control) -> None:
        self.deterministic = False
        self._settings, self._control = settings, control
        self._tracker = settings.tracker
        self._phase: LoadedWorker | ModelledWorker | PlannedWorker | None = None
        """None before the first message."""
        self._has_updated = False
        self._steps = 0
        """The number of steps of the job; 0 if unknown."""
        self._has_saved = False
        """Whether a checkpoint was written after the last step."""
        self._profiler: StepProfiler | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the job is loaded."""
        return self._phase is not None

    @property
    def loaded(self) -> LoadedWorker:
        """This worker, once the job is loaded."""
        assert self._phase is not None, "the job is not loaded yet"
        return self._phase if isinstance(self._phase, LoadedWorker) else self._phase.loaded

    @property
    def planned(self) -> PlannedWorker:
        """This worker, once its stages are built; they outlive its connections."""
        assert isinstance(self._phase, PlannedWorker), "the stages are not built yet"
        return self._phase

    @property
    def connected(self) -> ConnectedWorker:
        """This worker, while it is connected."""
        assert isinstance(self._phase, ConnectedWorker), "the worker is not connected yet"
        return self._phase

    def hello(self) -> Hello:
        """Return the message that introduces this worker, with what all hosts must have alike."""
        found = versions()
        python = ".".join(f"{found['python']}".split(".")[:2])
        own = f"pipeworker {found['pipeworker']}", f"torch {found['torch']}", f"Python {python}"
        return Hello(self._settings.rank, socket.gethostname(), os.getpid(), own)

    def handle(self, message: ToWorker) -> FromWorker | None:
        """Do what a message of the coordinator requests; return the answer, if it has one."""
        match message, self._phase:
            case Welcome(), None:
                return self._welcome(message)
            case Measure(), ModelledWorker() as modelled:
                return measure(modelled.loaded, modelled.model, modelled.types, message)
            case Plan(), ModelledWorker() as modelled:
                return self._plan(message, modelled)
            case Advance(), ConnectedWorker() as connected:
                return self._advance(message, connected)
        raise ProtocolError(f"a worker cannot handle {type(message).__name__} now")

    def explain(self, error: BaseException) -> Failure:
        """Return the report of an exception: its cause, and the position of the worker."""
        position, phase = self._tracker.get(), self._phase
        kind, name, memory = "", self._control.name, ""
        if isinstance(phase, ModelledWorker):
            kind = phase.model.class_of(position.layer)
        elif isinstance(phase, PlannedWorker):
            stage = phase.stages.stage_of(position.layer)
            if stage is not None:
                kind, name = stage.class_of(position.layer), f"stage {stage.index}"
                if isinstance(phase, ConnectedWorker):
                    memory = phase.executor.planned_memory(stage.index)
        if phase and is_out_of_memory(error):
            memory = "; ".join(filter(None, (memory, self._allocator_snapshot())))
        transient = self.loaded.job.transient if phase else ()
        modules = self.loaded.modules() if phase else ()
        rank = self._settings.rank
        if isinstance(error, ReadFailed):
            return replace(error.failure, rank=rank, position=position, stage=name)
        return failure_of(error, rank, position, kind, name, memory, transient, modules)

    def _allocator_snapshot(self) -> str:
        """Write what the device's allocator holds; say where, or "" on the CPU."""
        path = self.loaded.run_dir.memory_snapshot(self._settings.rank)
        try:
            written = write_allocator_snapshot(self.loaded.device, path)
        except (OSError, RuntimeError, MemoryError) as error:
            streams.note(f"no snapshot of the allocator: {error}")
            return ""
        where = f"{path.parent.name}/{path.name}"
        return f"{where} has what the allocator held (pytorch.org/memory_viz)" if written else ""

    def _welcome(self, welcome: Welcome) -> Described:
        options = Options.from_json(welcome.options)
        # The other workers of this host, and their replacements, have the same torch.
        first = self._settings.local_rank == 0 and self._settings.generation <= 1
        torch_check.check(compiles=options.compile, behaviours=first)
        self.deterministic = options.deterministic
        self._phase = loaded = LoadedWorker.load(self._settings, self._control, welcome)
        seed = loaded.role.options.seed
        plan_of = partial(agreed_plan, loaded)
        model = Model(loaded.job, seed, loaded.device, self._tracker, plan_of)
        self._phase = modelled = ModelledWorker(loaded, model, classes_of(loaded.modules()))
        return modelled.describe()

    def _plan(self, plan: Plan, modelled: ModelledWorker) -> Ready:
        loaded = modelled.loaded.place(plan)
        stages = build_stages(loaded, modelled.model, plan)
        modelled.model.release()  # no process holds more than its part
        self._phase = planned = PlannedWorker(loaded, stages, State(loaded, stages))
        has_state = planned.state.begin(plan)
        self._phase = connected = ConnectedWorker.connect(planned, plan, modelled.types)
        connected.begin(plan.steps, has_state=has_state)
        self._steps = plan.steps
        if steps := loaded.role.options.profiled:
            folder, executor = loaded.run_dir.profiles, connected.executor
            rank, device = self._settings.rank, loaded.device
            self._profiler = StepProfiler(folder, rank, steps, device, executor.label)
        return Ready(
            self._settings.rank,
            stages.built,
            str(loaded.device),
            connected.executor.feed.next_batch,
            stages.unmatched,
            loaded.reader.length,
            unit_of(loaded.device),
            stages.existing,
            stages.cached,
        )

    def record(self) -> None:
        """Record what the worker did because of the last message, which was answered just now."""
        if isinstance(self._phase, ConnectedWorker):
            self._phase.recorder.write()

    def _advance(self, message: Advance, worker: ConnectedWorker) -> FromWorker | None:
        recorder, command = worker.recorder, message.next
        if isinstance(command, (Wait, Finish)):
            recorder.receive_more()
        else:
            recorded = isinstance(command, RunStep) and command.recorded
            recorder.receive(command.step, recorded=recorded)
        worker.state.snapshots.stop_serving()
        updating = 0.0
        with recorder.during(UPDATE) if message.update else contextlib.nullcontext():
            updating = self._change(message.update, worker)
        if self._profiler is not None:
            self._profiler.advance(message)
        if message.copy is not None:
            self._has_saved = self._has_saved or message.copy.save
            with recorder.during(SNAPSHOT):
                worker.state.copy(message.copy, worker.position)
        match command:
            case RunStep():
                return self._run(command, worker, updating)
            case Evaluate():
                evaluation = contextlib.closing(worker.loaded.evaluation())
                guarded = worker.state.evaluating()
                with recorder.during(EVALUATION), evaluation as batches, guarded:
                    control = worker.loaded.control
                    wanted = takewhile(lambda _: control.ended_pass != command.step, batches)
                    return self.evaluate(command.step, wanted)
            case Save():
                self._has_saved = True
                with recorder.during(SAVE):
                    return worker.state.save(command, worker.position)
            case Wait() | Finish():
                self._tracker.wait(self._tracker.get().step)  # no longer saves, as it may have
                return None
        return assert_never(command)

    def _change(self, update: Change | None, worker: PlannedWorker) -> float:
        """Do what changes the state before the next command; return the seconds of an update."""
        if isinstance(update, Update):
            return self._update(update, worker)
        if update is not None:
            with worker.state.changing("a scheduler is not stepped"):
                worker.stages.step_schedulers(update)
        return 0.0

    def _update(self, update: Update, worker: PlannedWorker) -> float:
        self._tracker.set(Phase.UPDATE, update.step)
        worker.state.end_step()
        worker.state.wait_copied()
        with worker.state.changing(f"the update of step {update.step} is not complete"):
            began = time.monotonic()
            worker.stages.apply(update)
            seconds = time.monotonic() - began
            self._tracker.set(Phase.WAITING, update.step)  # a failure is not the update's now
            if not (self._has_updated or update.overflow):
                self._has_updated = True
                worker.state.check()  # an optimizer makes its state in its first step
            if worker.loaded.role.shards and not update.overflow:
                self._tracker.wait(update.step)
                worker.stages.share_weights(self.connected.wiring)
        return seconds

    def _run(self, run: RunStep, worker: ConnectedWorker, updating: float) -> StepDone:
        if worker.loaded.job.steps_by_epoch and run.batch.microbatches:
            # Read one more mini-batch, to see whether the epoch ends with this step: a run that is
            # resumed has the same learning rates.
            run = replace(run, last=False)
        if not run.first:
            worker.state.begin_step(lambda: worker.position)
            if worker.loaded.role.options.own_loop:
                worker.stages.drop_gradients()
        if run.actions:
            actions = parse_actions(run.actions)
            worker.recorder.use(worker.executor.set_actions(actions), actions)
        compares, self._has_saved = self._has_saved or run.step == self._steps, False
        output = worker.executor.run(run, compares=compares)
        worker.recorder.run(output.times)
        borrowed, notes = worker.stages.take_borrowed()
        rate, place = worker.stages.learning_rate
        return StepDone(
            self._settings.rank,
            run.step,
            output.losses,
            output.counts,
            worker.stages.squares(),
            output.busy + updating,
            rate,
            peak_memory(worker.loaded.device),
            worker.executor.feed.next_batch,
            *worker.state.copied,
            data_seconds=worker.executor.feed.read_seconds,
            borrowed=borrowed,
            notes=notes,
            leading=place,
        )

    def evaluate(
        self, step: int, batches: Iterator[MicroBatches], *, stays: bool = False
    ) -> EvaluationDone:
        """Run an evaluation pass over mini-batches, read where stage 0 of the first replica is.

        Raises:
            PassFailed: the user's code raised, and the worker `stays`: it can run the next step.
            UserCodeError: the same otherwise.
        """
        last, result = self._last_stage, None
        if not self.loaded.role.replica:
            averages = Averages(last.loss_of, self.loaded.job.metrics) if last else None
            sink = averages.add if averages else lambda *_: None
            complete = self._pass(sink, self.explain if stays else None).run(step, batches)
            result = averages.result(step) if averages and complete else None
        return self.pass_done(step, result)

    def _pass(
        self, sink: Sink, explain: Explain | None, phase: Phase = Phase.EVALUATION
    ) -> EvaluationPass:
        worker = self.connected
        placement = worker.loaded.role.placement
        return EvaluationPass(worker.wiring, placement, worker.evaluation, sink, explain, phase)

    def predict(
        self, step: int, batches: Iterator[MicroBatches], *, everywhere: bool
    ) -> tuple[EvaluationDone, Any]:
        """Return the report of a prediction, and the model's output in eval mode.

        The output, of shape ``[samples, ...]``, is where the last stage is, and None elsewhere;
        :meth:`broadcast` can send it `everywhere`. Mini-batches are read where stage 0 is.

        Raises:
            PassFailed: the user's code raised, or an output is not a batch.
        """
        outputs: list[Any] = []
        whole = None
        run = self._pass(lambda one, *_: outputs.append(one), self.explain, Phase.PREDICTION)
        if run.run(step, batches) and self._last_stage:
            try:
                whole = concatenate_outputs(outputs)
                if everywhere:
                    self.connected.wiring.check_sendable(whole)
            except PipeworkerError as error:
                raise PassFailed(error, self.explain(error)) from error
        return self.pass_done(step), whole

    def broadcast(self, value: Any) -> Any:
        """Return a value of the last stage on every worker."""
        return self.connected.executor.broadcast(value)

    def pass_done(
        self, step: int, result: Evaluation | None = None, failure: Failure | None = None
    ) -> EvaluationDone:
        """Return the report of a pass that has ended, or failed, on this worker."""
        memory = peak_memory(self.loaded.device)
        return EvaluationDone(self._settings.rank, step, memory, result, failure)

    def read(self, batch: Any) -> MicroBatches | None:
        """Split a mini-batch of the user's loop, nested ``[samples, ...]``, where stage 0 is."""
        loaded = self.loaded
        return loaded.reader.split(batch) if loaded.role.has_batches else None

    def check(self, batches: Iterable[Any], prefix: str | None = None) -> None:
        """Check mini-batches of the user's loop, where stage 0 is; errors begin with `prefix`."""
        loaded = self.loaded
        if loaded.role.has_batches:
            for batch in batches:
                loaded.reader.check(batch, prefix)

    def offer(self, batch: MicroBatches | None) -> None:
        """Make a mini-batch of the user's loop the next one, where stage 0 is."""
        if batch is not None:
            self.connected.executor.feed.offer(batch)

    def split(self, batch: Any, prefix: str) -> MicroBatches:
        """Return all micro-batches of a mini-batch; errors begin with `prefix`."""
        return self.loaded.reader.split(batch, prefix, whole=True)

    def disconnect(self) -> None:
        """Close the channels, so that no other worker waits for this one. Idempotent."""
        if isinstance(phase := self._phase, ConnectedWorker):
            with contextlib.suppress(Exception):  # of the user's data, within a step
                phase.state.at = phase.position
            phase.wiring.close()
            phase.recorder.close()
            self._phase = PlannedWorker(phase.loaded, phase.stages, phase.state)

    def finish(self, message: Advance) -> FromWorker | None:
        """Do what remains for a worker that is disconnected: a change of its state, a save.

        Return the answer, if there is one. An error is kept, as a reason not to save.
        """
        if not isinstance(worker := self._phase, PlannedWorker):
            return None
        with contextlib.suppress(Exception):
            self._change(message.update, worker)
        if isinstance(message.next, Save):
            return worker.state.save(message.next, worker.state.at)
        return None

    def has_changed(self) -> bool:
        """Return whether the state is another one than at the last save, if there was one."""
        return isinstance(self._phase, PlannedWorker) and self._phase.state.has_changed()

    def end_profile(self) -> None:
        """Write the profile of steps, if the job ends before the last of them."""
        if self._profiler is not None:
            self._profiler.end()

    def close(self) -> None:
        """Release channels and threads, the memory that channels map, and what reads the data."""
        self.end_profile()
        phase = self._phase
        if isinstance(phase, PlannedWorker):
            phase.state.close()
            self.disconnect()
            del phase
            gc.collect()  # the channels of a worker's stages refer to each other
            self.planned.stages.resources.close()
        if self.is_loaded:
            self.loaded.reader.close()

    @property
    def _last_stage(self) -> Stage | None:
        """The last stage, if it is on this worker."""
        return self.connected.stages.stages.get(self.loaded.role.placement.stages - 1)
