"""The optimizer step of a stage: gradient norms out, scaled update in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError


def parameters_of(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a stage, each once, in model order."""
    return list({id(p): p for layer in layers for p in layer.parameters()}.values())


class Updater:
    """The stage's optimizer and learning-rate scheduler.

    Args:
        optimizer: the job file's function; not called on a stage without parameters.
        scheduler: the job file's function, or None; stepped once a step.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        optimizer: Callable[[Any], Any],
        scheduler: Callable[[Any], Any] | None,
    ) -> None:
        self.parameters = parameters_of(layers)
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: Any = None
        if not self.parameters:
            return
        built = optimizer(self.parameters)
        if not isinstance(built, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer(params) returned a {type(built).__name__}: "
                "it must return a torch.optim.Optimizer"
            )
        if isinstance(built, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS evaluates the model inside its step, which a pipeline cannot do"
            )
        self.optimizer = built
        if scheduler is not None:
            self.scheduler = scheduler(built)
            if not hasattr(self.scheduler, "step"):
                raise UsageError(
                    f"scheduler(optimizer) returned a {type(self.scheduler).__name__}: "
                    "it must return a learning-rate scheduler"
                )

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group; NaN without an optimizer."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer else math.nan

    def squares(self) -> tuple[float, ...]:
        """The squared 2-norm of each parameter's gradient, in float64, in model order."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            return ()
        norms = torch.stack(
            [torch.linalg.vector_norm(_elements(g), dtype=torch.float64) for g in gradients]
        )
        return tuple(norms.square_().tolist())

    def apply(self, scale: float) -> None:
        """Multiply the gradients by `scale`, step the optimizer and the scheduler, clear."""
        if self.optimizer is None:
            return
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if gradients and scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.clear()

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _elements(gradient: torch.Tensor) -> torch.Tensor:
    """The real numbers of a gradient that may be sparse or complex."""
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    return torch.view_as_real(values) if values.is_complex() else values
