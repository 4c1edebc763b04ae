"""What a worker holds: its stages, each with its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeworker.errors import UsageError
from pipeworker.exact import partials
from pipeworker.host import streams
from pipeworker.host.position import Tracker
from pipeworker.job.file import Job
from pipeworker.plan.schedule import OFFLOAD
from pipeworker.plan.ties import Tie
from pipeworker.record.checkpoint import Part
from pipeworker.record.initial import Initial
from pipeworker.wire.messages.plan import Built, Plan
from pipeworker.wire.messages.position import Phase
from pipeworker.wire.messages.step import Update
from pipeworker.worker.blame import users
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.device.copies import copies_for
from pipeworker.worker.model.model import Model
from pipeworker.worker.role import Role
from pipeworker.worker.stage.compiled import KERNELS, Watch
from pipeworker.worker.stage.stage import Skips, Stage
from pipeworker.worker.step.others import Others
from pipeworker.worker.update.ties import Ties
from pipeworker.worker.update.update import Updater


class Held:
    """See the module; nothing until it is built.

    Attributes:
        stages: by index, as far as they are built.
        ties: of the stages that have places of tied weights.
        aliases: each further name of a tied weight, and the first, in the user's module.
    """

    def __init__(self) -> None:
        self.stages: dict[int, Stage] = {}
        self.ties: dict[int, Ties] = {}
        self.aliases: dict[str, str] = {}
        self._updaters: dict[int, Updater] = {}
        self._names: tuple[str, ...] = ()
        self._watches: list[Watch] = []  # one, where layers are compiled

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Of the first of its stages that trains."""
        return next((u.optimizer for u in self._updaters.values() if u.optimizer), None)

    @property
    def learning_rates(self) -> list[float]:
        """Of the stages that train."""
        return [u.learning_rate for u in self._updaters.values() if u.optimizer is not None]

    @property
    def elsewhere(self) -> set[int]:
        """The ids of parameters whose optimizer state another stage writes."""
        return set().union(*(ties.elsewhere for ties in self.ties.values()))

    def class_of(self, layer: int) -> tuple[str, int | None]:
        """The class of a layer and the first stage that has it; empty and None if none has."""
        at = [i for i, stage in self.stages.items() if stage.class_of(layer)]
        kinds = [stage.class_of(layer) for stage in self.stages.values()]
        return "".join(kinds), at[0] if at else None

    def build(
        self,
        plan: Plan,
        role: Role,
        job: Job,
        model: Model,
        *,
        device: torch.device,
        tracker: Tracker,
        begins: bool,
        accelerator: Accelerator | None = None,
    ) -> tuple[tuple[Built, ...], int]:
        """Build what the plan says, with the weights of ``--init-from`` where the run begins.

        Returns what is built, and how many names of ``--init-from`` had no counterpart.

        Raises:
            UsageError: the job's layers, optimizer or weights cannot be had so.
            Raised: what the user's code raised.
        """
        options, placement = role.options, role.placement
        self._names = model.names
        if options.compile:
            self._watches.append(Watch(tracker))
        initial = None
        if options.init_from is not None and begins:
            tracker.set(Phase.RESTORING)
            ties = [tuple(map(self._named, tie.names)) for tie in plan.ties]
            initial = Initial(Path(options.init_from), self._names, ties)
        built = []
        for part in plan.ranges:
            tied = [Tie(t.names, t.stages) for t in plan.ties if part.stage in t.stages]
            layers, ties_of = model.build(part.first, part.stop, part.stage, tied, role.stages)
            is_last = part.stage == placement.stages - 1
            stage = self.stages[part.stage] = Stage(
                layers,
                part.first,
                index=part.stage,
                before=model.class_of(part.first - 1),
                seed=options.seed,
                device=device,
                tracker=tracker,
                loss=job.loss if is_last else None,
                skips=Skips.of(plan.skips, part.stage),
                precision=options.precision,
                deferred_batch_norm=options.deferred_batch_norm,
                compiler=KERNELS if options.compile else None,
                copies=copies_for(accelerator) if options.recompute == OFFLOAD else None,
            )
            if ties_of is not None:
                self.ties[part.stage] = ties_of
            if initial is not None:  # what an optimizer copies when it is built
                tracker.set(Phase.RESTORING)
                initial.load(self._part(stage), users)
            tracker.set(Phase.UPDATE)
            updater = self._updaters[part.stage] = Updater(
                layers,
                part.first,
                job,
                seed=options.seed,
                clip_value=options.clip_grad_value,
                ties=ties_of,
                replica=role.replica if role.shards else 0,
                replicas=placement.replicas if role.shards else 1,
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
        self.aliases = {
            self._named(name): self._named(tie.names[0])
            for tie in plan.ties
            for name in tie.names[1:]
        }
        return tuple(built), 0 if initial is None else _settle(initial, role)

    def apply(self, update: Update) -> None:
        """The gradients to the weights, on all stages."""
        for updater in self._updaters.values():
            updater.apply(update)

    def share(self, others: Others) -> None:
        """Tell the other replicas the weights that this one has updated, and hear of theirs."""
        others.share_weights({index: u.shards for index, u in self._updaters.items()})

    def evaluated(self, loss: float) -> None:
        """A scheduler may look at it."""
        for updater in self._updaters.values():
            updater.evaluated(loss)

    def squares(self) -> tuple[float, ...]:
        """Their exact sum is the squared 2-norm of the gradient."""
        updaters = self._updaters.values()
        return partials(square for updater in updaters for square in updater.squares())

    def part(self, index: int) -> Part:
        """What a stage holds, and is kept of it."""
        updater = self._updaters[index]
        update = (updater.optimizer, updater.schedule, updater.scheduler)
        return self._part(self.stages[index], *update)

    def parts(self) -> list[Part]:
        """Of all its stages."""
        return [self.part(index) for index in self.stages]

    def close(self) -> None:
        """Let go of what the stages hold beside their layers."""
        for stage in self.stages.values():
            stage.close()
        while self._watches:
            self._watches.pop().close()

    def _part(self, stage: Stage, *update: Any) -> Part:
        names = self._names[stage.first : stage.first + len(stage.layers)]
        return Part(names, stage.layers, stage.state_dicts(), *update)

    def _named(self, weight: str) -> str:
        """A weight, as ``3.bias``, by its name in the user's module."""
        layer, _, rest = weight.partition(".")
        return f"{self._names[int(layer)]}.{rest}"


def _settle(initial: Initial, role: Role) -> int:
    """Log what of the weights to begin with does not fit; returns how many names."""
    left_out = initial.settle(partial=role.options.init_partial, first=0 in role.stages)
    if left_out:
        text = f"--init-from {role.options.init_from}: {initial.misfits.listed()}"
        streams.note(f"warning: {text}")
    return left_out
