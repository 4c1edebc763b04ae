"""The stages of one worker, each with its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.exact_sum import partials
from pipeworker.facts.connections import Borrowed, Cached, Existing
from pipeworker.facts.criterion import Criterion
from pipeworker.facts.layer_names import LayerNames
from pipeworker.facts.limits import LONGEST_NAME, MOST_NOTES
from pipeworker.facts.position import Phase
from pipeworker.host import streams
from pipeworker.job.signatures import takes_steps
from pipeworker.plan.recompute import OFFLOAD
from pipeworker.record.checkpoint.stage_state import StageState, buffer_infos, parameter_strides
from pipeworker.record.checkpoint.tensor_file import TensorInfo
from pipeworker.record.weights.initial_weights import InitialWeights
from pipeworker.wire.messages.plan import Built, Plan
from pipeworker.wire.messages.step import EpochEnded, Evaluated, Update
from pipeworker.worker.blame import kind_of, user_code
from pipeworker.worker.loaded_worker import LoadedWorker
from pipeworker.worker.model.model import Model
from pipeworker.worker.stage.batchnorm import count_batch_norms
from pipeworker.worker.stage.borrowed import Borrowing
from pipeworker.worker.stage.layers import StageConfig, reporting_compilation
from pipeworker.worker.stage.offload import Copies, StreamCopies
from pipeworker.worker.stage.skips import StageSkips
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.step.first_sample import check_figures
from pipeworker.worker.step.wiring import Wiring
from pipeworker.worker.update.independence import note_of, note_on_draws, note_on_implementation
from pipeworker.worker.update.optimizers import StageOptimizers
from pipeworker.worker.update.ties import Ties
from pipeworker.worker.update.update import Updater


@dataclass(frozen=True, slots=True)
class LocalStages:
    """The stages of a worker, as they are built.

    Attributes:
        names: names of all layers of the model in the user's module.
        ties: ties by stage, of the stages that have places of tied weights.
        aliases: the first name of a tied weight in the user's module, by each further name.
        existing: the parameters that layers train, and that existed before a callable built them.
        cached: functions of the job that keep parameters which were built with these layers.
        borrowing: has found uses of parameters that no layer of this worker has.
        is_part: whether other workers, or other stages of this one, update other parameters.
        unmatched: number of names of ``--init-from`` without a counterpart.
        adapters: what makes peft's own folder of the model's weights, if it has adapters.
        built_buffers: the buffers of each stage's layers as their constructors left them.
        built_strides: the strides of their parameters, in the same way.
        resources: closes the stages, which restores the modules' settings.
    """

    names: LayerNames
    stages: dict[int, Stage]
    updaters: dict[int, Updater]
    ties: dict[int, Ties]
    aliases: dict[str, str]
    existing: tuple[Existing, ...]
    cached: tuple[Cached, ...]
    borrowing: Borrowing
    is_part: bool
    unmatched: int
    adapters: Mapping[str, Any] | None
    built_buffers: dict[int, list[Mapping[str, TensorInfo]]]
    built_strides: dict[int, list[Mapping[str, tuple[int, ...]]]]
    resources: ExitStack

    @property
    def optimizers(self) -> StageOptimizers:
        """The optimizers of the first stage that has one."""
        every = [updater.optimizers for updater in self.updaters.values()]
        return next((made for made in every if made.all), every[0])

    @property
    def learning_rate(self) -> tuple[float, tuple[int, int]]:
        """The learning rate of the first parameter that is trained here, and its place."""
        trains = [updater for updater in self.updaters.values() if updater.optimizers.all]
        first = min(trains, key=lambda updater: updater.leading_place, default=None)
        return (first.optimizers.learning_rate, first.leading_place) if first else (nan, (0, 0))

    @property
    def elsewhere(self) -> set[int]:
        """The ids of parameters whose optimizer state another stage writes."""
        return set().union(*(ties.elsewhere for ties in self.ties.values()))

    @property
    def built(self) -> tuple[Built, ...]:
        """The report of what was built."""
        return tuple(
            Built(
                index,
                stage.first,
                tuple(map(kind_of, stage.layers)),
                sum(parameter.numel() for parameter in self.updaters[index].parameters),
                count_batch_norms(stage.layers),
            )
            for index, stage in self.stages.items()
        )

    def stage_of(self, layer: int) -> Stage | None:
        """Return the stage that has a layer; None if no stage of this worker has it."""
        return next((stage for stage in self.stages.values() if stage.class_of(layer)), None)

    def apply(self, update: Update) -> None:
        """Apply the gradients to the weights of all stages."""
        for index, updater in self.updaters.items():
            is_first = updater.draws is None and self.is_part
            if is_first and not update.overflow:
                device = self.stages[index].device
                found = [note_on_implementation(one, device) for one in updater.optimizers.all]
                self.borrowing.notes += filter(None, found)
            updater.apply(update)
            if updater.draws and is_first:
                self.borrowing.notes.append(note_on_draws(updater.optimizers.all))

    def share_weights(self, wiring: Wiring) -> None:
        """Exchange the updated weights with the other replicas, each of which updates a part."""
        wiring.share_weights({index: u.shards for index, u in self.updaters.items()})

    def step_schedulers(self, event: Evaluated | EpochEnded) -> None:
        """Step the learning-rate schedulers that an evaluation, or the end of an epoch, steps."""
        for updater in self.updaters.values():
            if isinstance(event, Evaluated):
                updater.optimizers.report_evaluation(event.loss, event.best)
            else:
                updater.end_epoch(event.step)

    def squares(self) -> tuple[float, ...]:
        """Return terms whose exact sum is the squared 2-norm of the stages' gradients."""
        updaters = self.updaters.values()
        return partials(square for updater in updaters for square in updater.squares())

    def drop_gradients(self) -> None:
        """Drop the gradients that a loop of the user's own has left on parameters."""
        for updater in self.updaters.values():
            updater.clear()

    def take_borrowed(self) -> tuple[tuple[Borrowed, ...], tuple[str, ...]]:
        """Return the uses of parameters, and the notes, that were found since the last call."""
        found, self.borrowing.found = self.borrowing.found, []
        notes, self.borrowing.notes = self.borrowing.notes, []
        return tuple(found), tuple([note[:LONGEST_NAME] for note in notes[:MOST_NOTES]])

    def part(self, index: int, *, keeps_weights: bool = True) -> StageState:
        """Return the state of a stage, for a checkpoint."""
        stage, updater = self.stages[index], self.updaters[index]
        optimizers = updater.optimizers
        return StageState(
            self.names,
            stage.layers,
            stage.state_dicts(),
            updater.states,
            keeps_weights,
            stage.first,
            updater.steps,
            optimizers.restart_schedulers,
            self.adapters if index == 0 and keeps_weights else None,
            self.built_buffers[index],
            self.built_strides[index],
        )


def build_stages(loaded: LoadedWorker, model: Model, plan: Plan) -> LocalStages:
    """Build the stages of a worker."""
    role, job, accelerator = loaded.role, loaded.job, loaded.accelerator
    tracker = loaded.settings.tracker
    options, names = role.options, model.names
    initial = None
    if options.init_from is not None and loaded.restore is None:
        tracker.set(Phase.RESTORING)
        places = [tuple(map(names.of_numbered, tie.names)) for tie in plan.ties]
        initial = InitialWeights(Path(options.init_from), names, places, model.conversion)
    stages: dict[int, Stage] = {}
    updaters: dict[int, Updater] = {}
    ties: dict[int, Ties] = {}
    built_buffers: dict[int, list[Mapping[str, TensorInfo]]] = {}
    built_strides: dict[int, list[Mapping[str, tuple[int, ...]]]] = {}
    config = StageConfig.of(options, loaded.device)
    copies = Copies() if accelerator is None else StreamCopies(accelerator)
    is_part = role.placement.stages > 1 or role.shards
    with ExitStack() as resources:
        if options.compile:
            resources.enter_context(reporting_compilation(tracker))
        model.hold(plan.ranges)
        for part in plan.ranges:
            tied = [tie for tie in plan.ties if part.stage in tie.stages]
            layers, ties_of = model.build(part, tied, role.stages)
            stage = stages[part.stage] = Stage(
                layers,
                replace(
                    config,
                    index=part.stage,
                    first=part.first,
                    class_before=model.class_of(part.first - 1),
                    skips=StageSkips.of(plan.skips, part.stage),
                    borrowing=model.borrowing,
                    shared_buffers=model.shared_buffers(part),
                ),
                tracker,
                loss=job.loss if part.stage == role.placement.stages - 1 else None,
                copies=copies if part.recompute == OFFLOAD else None,
            )
            if part.stage == role.placement.stages - 1:
                stage.before_loss = _check_of(loaded)
            built_buffers[part.stage] = [*map(buffer_infos, layers)]
            built_strides[part.stage] = [*map(parameter_strides, layers)]
            resources.callback(stage.deferred.restore_modules)
            if ties_of is not None:
                ties[part.stage] = ties_of
            if initial is not None:  # before the optimizer, which may copy weights when it is built
                tracker.set(Phase.RESTORING)
                state = StageState(names, layers, stage.state_dicts(), first=stage.first)
                initial.load(state, user_code)
            made = updaters[part.stage] = _updater(stage, loaded, ties_of, plan.steps)
            if is_part:
                model.borrowing.notes += filter(None, map(note_of, made.optimizers.all))
        tracker.set(Phase.BUILDING)
        aliases = {
            names.of_numbered(name): names.of_numbered(tie.names[0])
            for tie in plan.ties
            for name in tie.names[1:]
        }
        unmatched = 0
        if initial is not None:
            unmatched = initial.check_complete(
                strict=options.init_strict, first_worker=0 in role.stages
            )
            if unmatched:
                streams.note(f"warning: --init-from {options.init_from}: {initial.diff.summary()}")
        return LocalStages(
            *(names, stages, updaters, ties, aliases, tuple(model.existing), model.cached),
            *(model.borrowing, is_part, unmatched),
            model.adapters() if 0 in stages else None,
            built_buffers,
            built_strides,
            resources.pop_all(),
        )


def _check_of(loaded: LoadedWorker) -> Callable[[Any, Any], None] | None:
    """Return what checks the figures of evaluations before the first loss; None if there are none.

    In a loop of the user's own a mistake ends nothing, so the first evaluation shows it.
    """
    options = loaded.role.options
    evaluates = options.trains and options.evaluate_every and not loaded.role.replica
    return check_figures(loaded.job.metrics, options.best) if evaluates else None


def _updater(stage: Stage, loaded: LoadedWorker, ties: Ties | None, steps: int) -> Updater:
    role, options = loaded.role, loaded.role.options
    if not steps and takes_steps(loaded.job.scheduler):
        how = "data() has no length, so the number of steps is unknown; give --steps"
        if options.own_loop:
            how = "the script's own loop decides the number of steps; pass a scheduler(optimizer)"
        raise UsageError(f"scheduler(optimizer, steps): {how}")
    stage.tracker.set(Phase.UPDATE)
    updater = Updater(
        stage.layers,
        stage.first,
        loaded.job,
        seed=options.seed,
        clip_value=options.clip_grad_value,
        ties=ties,
        replica=role.replica if role.shards else 0,
        replicas=role.placement.replicas if role.shards else 1,
        steps=steps,
        tracker=stage.tracker,
    )
    updater.clear()  # gradients that the user's code may have left on modules of its own
    if updater.optimizers.wants_metric and not (options.evaluate_every or options.own_loop):
        raise UsageError(
            "ReduceLROnPlateau: needs evaluations; give --evaluate-every and define "
            "evaluation() in the job file"
        )
    if updater.optimizers.wants_more and not Criterion.parse(options.best).more:
        raise UsageError(
            "ReduceLROnPlateau: its mode is 'max', and it is stepped with the evaluation loss, of "
            "which less is better; make it mode='min', or give --best max:NAME, whose figure it "
            "then uses"
        )
    return updater
