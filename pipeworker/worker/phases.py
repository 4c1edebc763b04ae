"""The phases of a worker between loading and running; each type has all that its phase knows.

Modelled, planned (the stages are built), connected.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pipeworker.environment import timings
from pipeworker.errors import ProtocolError
from pipeworker.facts.connections import SharedBuffer, Skip
from pipeworker.facts.layer_names import LayerNames
from pipeworker.facts.outline import Outline
from pipeworker.facts.position import Phase
from pipeworker.host import streams
from pipeworker.host.task_thread import TaskThread
from pipeworker.job import file as job_file
from pipeworker.job.file import HOOKS
from pipeworker.job.hooks import called_with_records, hooks_of
from pipeworker.job.signatures import takes_steps
from pipeworker.plan.actions import Action, Edge, parse_actions
from pipeworker.record.checkpoint.worker_content import check_savable
from pipeworker.record.files.located import located
from pipeworker.trace.recorder import Recorder, record_unfinished_in, start_row
from pipeworker.trace.ring import Ring
from pipeworker.wire.keys import derive_secret
from pipeworker.wire.messages.plan import Described, Plan, Source
from pipeworker.worker.blame import user_code
from pipeworker.worker.device import numerics
from pipeworker.worker.loaded_worker import LoadedWorker
from pipeworker.worker.local_stages import LocalStages
from pipeworker.worker.measuring import machine_of, outline_of, surroundings_of
from pipeworker.worker.model import survey
from pipeworker.worker.model.model import Model, shared_buffers
from pipeworker.worker.state.snapshot_writer import Position
from pipeworker.worker.state.state import State
from pipeworker.worker.step.batch_feed import BatchFeed
from pipeworker.worker.step.executor import Executor
from pipeworker.worker.step.wiring import Wiring
from pipeworker.worker.transport.connect import connect
from pipeworker.worker.transport.structure import TypeRegistry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelledWorker:
    """A worker that has the model, whose layers it has not built, and the user's classes by name.

    Attributes:
        types: the classes that may pass between stages.
    """

    loaded: LoadedWorker
    model: Model
    types: dict[str, type]

    def describe(self) -> Described:
        """Describe the model, as the coordinator needs it for a plan."""
        loaded, model = self.loaded, self.model
        role, options = loaded.role, loaded.role.options
        reads_first = role.rank == role.placement.rank_of(0)
        length = 0
        if (
            reads_first
            and takes_steps(loaded.job.scheduler)
            and options.steps is None
            and not options.own_loop
        ):
            loaded.settings.tracker.set(Phase.READING)
            length = loaded.reader.measure()
        surveyed = self._survey() if reads_first else _Surveyed()
        if loaded.settings.survey is not None:
            loaded.settings.survey.close()
        with user_code("model()", early=True):
            ties = model.ties()
            digest = model.digest()
        numbered = model.names == LayerNames.numbered(len(model.names))
        sources = job_file.source_digests(loaded.path, loaded.modules()) if loaded.path else ()
        return Described(
            role.rank,
            model.classes,
            surveyed.skips,
            ties,
            digest,
            tuple(self.types),
            () if numbered else model.names.prefixes,
            tuple(Source(*pair) for pair in sources),
            (*job_file.notes(loaded.job, options), *model.notes()),
            numerics.settings(),
            length,
            _hooks(loaded),
            surveyed.outline,
            machine_of(loaded.device, model.entries) if options.is_planned else None,
            model.frozen(),
            surveyed.buffers,
            surveyed.problem,
        )

    def _survey(self) -> _Surveyed:
        """Survey the model, if its plan needs it; this worker reads the data."""
        loaded, model = self.loaded, self.model
        options, settings = loaded.role.options, loaded.settings
        buffers = shared_buffers(model.entries)
        uses_skips = (settings.sample is not None and model.cut is None) or (
            not options.own_loop and survey.mentions_skips(loaded.modules())
        )
        skips = model.cut.plan.skips() if model.cut is not None else ()
        has_input = settings.sample is not None or not options.own_loop
        if not (uses_skips or options.is_planned or (buffers and has_input)):
            return _Surveyed(skips, buffers)
        settings.tracker.set(Phase.READING)
        value = settings.sample if options.own_loop else loaded.reader.peek().inputs[0]
        found: survey.Found = {"error": "a script is surveyed in its own process"}
        settings.tracker.set(Phase.SURVEY)
        if settings.survey is not None and loaded.path is not None:
            wanted = surroundings_of(loaded) if options.is_planned else ""
            found = settings.survey.survey(loaded.path, options, value, wanted)
        outline, problem = outline_of(found, loaded) if options.is_planned else (None, "")
        if "error" in found and (uses_skips or buffers):
            log.info("the survey needs real tensors: %s", found["error"])
            pass_over = survey.Survey(model.entries, options.seed, loaded.device, options.precision)
            found = pass_over.on_real_tensors(value, settings.tracker)
        if uses_skips:
            skips = survey.skips_of(found)
        buffers = shared_buffers(model.entries, found.get("changing", ()))
        return _Surveyed(skips, buffers, outline, problem)


@dataclass(frozen=True, slots=True)
class _Surveyed:
    """The findings of a survey of a model; without one, any shared buffer may change."""

    skips: tuple[Skip, ...] = ()
    buffers: tuple[SharedBuffer, ...] = ()
    outline: Outline | None = None
    problem: str = ""


def _hooks(loaded: LoadedWorker) -> tuple[str, ...]:
    """Return the kinds of records that a process of hooks is for; a script calls its own hooks."""
    options = loaded.role.options
    if options.loggers and not options.evaluate_only:
        return HOOKS
    if not loaded.path or options.evaluate_only:
        return ()
    return tuple(hooks_of(called_with_records(loaded.job)))


def _ring(loaded: LoadedWorker) -> Ring:
    """Return the ring of a worker, which others record if the worker cannot.

    Without an agent it is in a file, where an earlier worker may have left something.
    """
    ring, run_dir, rank = loaded.settings.ring, loaded.run_dir, loaded.role.rank
    if ring is None:
        path = run_dir.worker_ring(rank)
        record_unfinished_in(path)
        try:
            path.parent.mkdir(exist_ok=True)
            ring = Ring.new_file(path)
        except OSError as error:
            streams.note(f"what this worker does last is lost if it is killed: {error}")
            ring = Ring()
    ring.path = located(run_dir.worker_timeline(rank))
    return ring


def _recorder(loaded: LoadedWorker) -> Recorder:
    """Return the recorder of a worker."""
    role, settings, control = loaded.role, loaded.settings, loaded.control
    path = loaded.run_dir.worker_timeline(role.rank)
    # No two attempts have the same: torchrun's may have a token in common, but not the step.
    secret = derive_secret(settings.token, b"timeline").hex()[:8]
    attempt = f"{secret}-{role.options.resume_step}"
    start = start_row(role.rank, role.replica, role.stages, attempt, settings.generation)
    return Recorder(path, start, streams.note, control.clock.take, control.suspended)


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """A worker that has built its stages."""

    loaded: LoadedWorker
    stages: LocalStages
    state: State


@dataclass(frozen=True, slots=True)
class ConnectedWorker(PlannedWorker):
    """A worker that is connected to its neighbours and can run steps.

    Attributes:
        evaluation: actions of the worker for one micro-batch of an evaluation pass.
        recorder: what the worker does is recorded there.
    """

    wiring: Wiring
    executor: Executor
    evaluation: tuple[Action, ...]
    recorder: Recorder

    @staticmethod
    def connect(planned: PlannedWorker, plan: Plan, types: dict[str, type]) -> ConnectedWorker:
        """Connect to the neighbours; `types` has the classes that this worker described."""
        loaded, stages, state = planned.loaded, planned.stages, planned.state
        role, accelerator = loaded.role, loaded.accelerator
        loaded.settings.tracker.wait(phase=Phase.CONNECTING)
        state.snapshots.start_mirror()
        edges = [Edge.parse(edge) for edge in plan.edges]
        limit = timings().connect_limit(role.options.worker_timeout)
        links = connect(edges, role.rank, role.placement, *loaded.access(), accelerator, limit)
        if not {*plan.types} <= {*types}:
            raise ProtocolError("the plan has a type that this worker did not name")
        registry = TypeRegistry(types[name] for name in plan.types)
        wiring = Wiring(
            role.placement,
            stages.stages,
            links,
            TaskThread("send"),
            stages.ties,
            registry,
            role.replica,
            accelerator,
        )
        feed = BatchFeed(
            loaded.settings.tracker,
            wiring.scatter,
            loaded.reader if role.reads_data else None,
            reads_ahead=role.options.trains,
            moves_targets=role.placement.stages - 1 in role.stages,
            accelerator=accelerator,
            announce=loaded.announce,
        )
        loaded.reader.lends = feed.copied
        executor = Executor(wiring, role.placement, feed, _ring(loaded))
        loaded.control.held = lambda: executor.held
        evaluation = parse_actions(plan.evaluation)
        recorder = _recorder(loaded)
        return ConnectedWorker(loaded, stages, state, wiring, executor, evaluation, recorder)

    def begin(self, steps: int, *, has_state: bool) -> None:
        """Transfer state between replicas if it is necessary, and read the first mini-batch.

        The job has so many `steps`, 0 if unknown.
        """
        role, source = self.loaded.role, self.loaded.restore
        if source and not source.path and role.placement.replicas > 1 and not role.shards:
            reductions = self.wiring.reductions
            self.state.transfer(source.step, reductions, self.position, present=has_state)
        if role.options.trains:
            self.loaded.reader.expect(self._batches_left(steps))
            self.executor.feed.load()
            check_savable((), (), self.position)
        self.loaded.settings.tracker.wait()

    def _batches_left(self, steps: int) -> int | None:
        """Return the most mini-batches that are read from now on; None if unknown."""
        done = self.loaded.restore.step if self.loaded.restore else 0
        each = self.loaded.role.options.accumulate
        return (steps - done) * each + self.loaded.job.steps_by_epoch if steps else None

    @property
    def position(self) -> Position:
        """The position in the data, before the next mini-batch; None if it is not read here."""
        if not self.loaded.role.reads_data:
            return None
        return self.loaded.reader.position(prefetched=self.executor.feed.next_batch is not None)
