"""The optimizer step of a stage: gradient norms out, scaled update in."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.job.calls import signature
from pipeworker.job.file import Job
from pipeworker.plan.ties import layer_of
from pipeworker.wire.messages.step import Update
from pipeworker.worker.blame import users
from pipeworker.worker.internals import divide, multiply
from pipeworker.worker.stage import rng
from pipeworker.worker.update.condense import condensed
from pipeworker.worker.update.replicas import shards
from pipeworker.worker.update.ties import Ties

_NO_LAYER = -1


def parameters_of(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a stage, each once, in model order."""
    return list({id(p): p for layer in layers for p in layer.parameters()}.values())


class Updater:
    """The stage's optimizer and learning-rate scheduler.

    Args:
        layers: of the stage; `first` is the index of the first one.
        job: its ``optimizer`` is not called on a stage with nothing to train. One that has a
            parameter called ``named_parameters`` is given pairs of a name and a parameter; names
            are those of ``nn.Sequential(*layers).named_parameters()``.
        clip_value: bound on each element of the gradients, or None.
        ties: of weights that have a place here, or None.
        replica: which of `replicas` it updates for, where each updates a part of the weights; the
            optimizer is given those alone, and the others' come from the other replicas.

    Raises:
        UsageError: ``optimizer`` or ``scheduler`` gave something else.

    Attributes:
        shards: by replica, the weights that it updates.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int,
        job: Job,
        *,
        seed: int = 0,
        clip_value: float | None = None,
        ties: Ties | None = None,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self._all = parameters_of(layers)
        self._ties = ties
        aliases = ties.aliases if ties else ()
        self.parameters = [p for p in self._all if id(p) not in aliases]
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: Any = None
        self._by_epoch = job.scheduler_interval == "epoch"
        self._before_update = job.before_update
        self._layers = list(enumerate(layers, first))
        self._seed = seed
        self._accelerator = next((rng.accelerator_generator(p.device) for p in self._all), None)
        self._clip_value = clip_value
        self.shards = [self.parameters]
        if replicas > 1:
            trained = [p for p in self.parameters if p.requires_grad]
            self.shards = shards(trained, replicas)
        own = self.shards[replica]
        if not any(parameter.requires_grad for parameter in own):
            return
        given: Any = own
        if "named_parameters" in _arguments(job.optimizer):
            named = nn.Sequential(*layers).named_parameters()
            mine = {id(p) for p in own}
            tied = {id(p): name for name, p in ties.owners} if ties else {}
            given = [
                (tied.get(id(p)) or _shifted(name, first), p) for name, p in named if id(p) in mine
            ]
        with users("optimizer()", early=True):
            built = job.optimizer(given)
        if not isinstance(built, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer(params) returned a {type(built).__name__}: "
                "it must return a torch.optim.Optimizer"
            )
        closure = inspect.signature(built.step).parameters.get("closure")
        if isinstance(built, torch.optim.LBFGS) or (
            closure is not None and closure.default is inspect.Parameter.empty
        ):
            raise UsageError(
                f"{type(built).__name__} evaluates the model inside its step, which a pipeline "
                "cannot do"
            )
        _check_trains(built, own)
        self.optimizer = built
        if job.scheduler is not None:
            with users("scheduler()", early=True):
                self.scheduler = job.scheduler(built)
            _check_schedules(self.scheduler, built)

    @property
    def wants_metric(self) -> bool:
        """Whether the scheduler looks at the evaluation loss."""
        return isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group; NaN without an optimizer."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer else math.nan

    def squares(self) -> list[float]:
        """Their exact sum is the squared 2-norm of the gradient: each parameter's, in float64.

        Long ones are condensed.
        """
        if self._ties is None:
            found = [p.grad for p in self.parameters]
        else:
            told = self._ties.elsewhere
            found = [self._ties.total(p) for p in self.parameters if id(p) not in told]
        gradients = [gradient for gradient in found if gradient is not None]
        if not gradients:
            return []
        norms = torch.stack(
            [torch.linalg.vector_norm(_elements(g), dtype=torch.float64) for g in gradients]
        )
        return condensed(norms.square_())

    def apply(self, update: Update) -> None:
        """Scale and clip the gradients, step the optimizer and the scheduler, clear."""
        if self._ties is not None:
            self._ties.take_totals()
        if self.optimizer is None and len(self.shards) == 1:
            return
        if not update.overflow:
            self._finish_gradients(update)
        if not update.overflow and self.optimizer is not None:
            # For an optimizer that draws: what ran before, an evaluation say, must not show.
            self._seed_all(update.step, _NO_LAYER)
            with users("the optimizer"):
                self.optimizer.step()
        due = update.epoch_ended or not self._by_epoch
        if self.scheduler is not None and due and not self.wants_metric:
            with users("the scheduler"):
                self.scheduler.step()
        self.clear()

    @property
    def schedule(self) -> Any:
        """The state of the scheduler; None where there is none."""
        if not hasattr(self.scheduler, "state_dict"):
            return None
        with users("state_dict() of the scheduler"):
            return self.scheduler.state_dict()

    def evaluated(self, loss: float) -> None:
        """An evaluation pass gave this loss."""
        if self.wants_metric:
            with users("the scheduler"):
                self.scheduler.step(loss)

    def _finish_gradients(self, update: Update) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        # Divided as a loop would, not multiplied by the reciprocal: that differs in the last bit.
        if gradients and update.divisor != 1.0:
            divide(gradients, update.divisor)
        if gradients and update.scale != 1.0:
            multiply(gradients, update.scale)
        if self._clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters, self._clip_value)
        if self._before_update is None:
            return
        # By layer, and a tied weight by itself: what is drawn must not depend on the stages.
        owners = self._ties.owners if self._ties is not None else []
        for name, parameter in owners:
            if parameter.grad is not None:
                number = 1 + zlib.crc32(name.encode())
                self._seed_all(update.step, layer_of(name), number)
                self._hook([parameter])
        seen = {id(parameter) for _, parameter in owners}
        for index, layer in self._layers:
            own = [p for p in layer.parameters() if p.grad is not None and id(p) not in seen]
            seen.update(map(id, own))
            if own:
                self._seed_all(update.step, index)
                self._hook(own)

    def _seed_all(self, step: int, layer: int, tie: int = 0) -> None:
        rng.seed_all(rng.update_seed(self._seed, step, layer, tie), self._accelerator)

    def _hook(self, parameters: list[nn.Parameter]) -> None:
        assert self._before_update
        with users("before_update()"):
            self._before_update(parameters)

    def clear(self) -> None:
        for parameter in self._all:
            parameter.grad = None


def _check_trains(built: torch.optim.Optimizer, own: Sequence[nn.Parameter]) -> None:
    """That an optimizer has some of what it was given, which it may choose from.

    Raises:
        UsageError: it has none of it.
    """
    has = {id(p) for group in built.param_groups for p in group["params"]}
    if not any(id(p) in has for p in own):
        raise UsageError(
            f"optimizer(params) returned a {type(built).__name__} of other parameters than those "
            "that it was given, so this stage would not be trained: make it of params, and freeze "
            "what is not to be trained with requires_grad_(False)"
        )


def _check_schedules(scheduler: Any, built: torch.optim.Optimizer) -> None:
    """That it is a scheduler of this optimizer.

    Raises:
        UsageError: it is none, or one of another.
    """
    kind = type(scheduler).__name__
    if not hasattr(scheduler, "step"):
        raise UsageError(
            f"scheduler(optimizer) returned a {kind}: it must return a learning-rate scheduler"
        )
    of = getattr(scheduler, "optimizer", built)
    if isinstance(of, torch.optim.Optimizer) and of is not built:
        raise UsageError(
            f"scheduler(optimizer) returned a {kind} of another optimizer than the one that it was "
            "given, so this stage's learning rate would not change: make it of optimizer"
        )


def _arguments(function: Callable[..., Any]) -> Collection[str]:
    found = signature(function)
    return found.parameters if found else ()


def _shifted(name: str, first: int) -> str:
    index, _, rest = name.partition(".")
    return f"{int(index) + first}.{rest}"


def _elements(gradient: torch.Tensor) -> torch.Tensor:
    """The real numbers of a gradient that may be sparse or complex."""
    values = gradient.detach()
    if values.is_mps:  # which has no float64
        values = values.cpu()
    if values.is_sparse:
        values = values.coalesce().values()
    return torch.view_as_real(values) if values.is_complex() else values
