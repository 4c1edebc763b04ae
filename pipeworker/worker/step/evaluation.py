"""An evaluation pass on one stage: the layers in eval mode, and what the last stage adds up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.blame import users
from pipeworker.worker.stage.losses import parts

Metrics = Callable[[Any, Any], Any]
_TAKEN = ("step", "loss")


@contextmanager
def eval_mode(layers: Sequence[nn.Module]) -> Iterator[None]:
    """No gradients, and every module in eval mode; then each as it was."""
    training = [module for layer in layers for module in layer.modules() if module.training]
    for layer in layers:
        with users("eval()"):
            layer.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@dataclass(slots=True)
class Averages:
    """Adds up losses and metrics of micro-batches, each with its number of samples.

    Sums are exact, so that nothing depends on how mini-batches were cut. Values stay on their
    device until :meth:`result`.

    Attributes:
        loss_of: gives the loss of an output and a target: a mean over the samples, or a pair
            (sum, count).
        metrics: gives named scalars.
    """

    loss_of: Callable[[Any, Any], Any]
    metrics: Metrics | None = None
    _losses: list[torch.Tensor] = field(default_factory=list)
    _weights: list[Any] = field(default_factory=list)
    _counted: bool = False
    _values: dict[str, list[tuple[Any, int]]] = field(default_factory=dict)

    def add(self, output: Any, target: Any, samples: int) -> None:
        """One micro-batch.

        Raises:
            UsageError: ``loss`` or ``metrics`` gave something other than scalars.
        """
        loss, count = parts(self.loss_of(output, target))
        self._counted = count is not None
        self._losses.append(loss)
        self._weights.append(samples if count is None else count)
        if self.metrics is None:
            return
        with users("metrics()"):
            found = self.metrics(output, target)
        if not isinstance(found, Mapping):
            raise UsageError(
                f"metrics(output, target) returned a {type(found).__name__}: it must return a dict "
                "of scalars"
            )
        for name, value in found.items():
            if not isinstance(name, str) or name in _TAKEN:
                raise UsageError(
                    f"metrics(output, target) named a value {name!r}: names are strings other than "
                    f"{' and '.join(map(repr, _TAKEN))}"
                )
            self._values.setdefault(name, []).append((_scalar(name, value), samples))

    def result(self) -> tuple[float, dict[str, float]]:
        """The loss and the metrics over all samples; NaN over none."""
        losses = [float(loss) for loss in self._losses]
        weights = [float(weight) for weight in self._weights]
        terms = losses if self._counted else [a * b for a, b in zip(losses, weights, strict=True)]
        metrics = {
            name: _mean([float(v) * n for v, n in values], [n for _, n in values])
            for name, values in self._values.items()
        }
        return _mean(terms, weights), metrics


def _mean(terms: Sequence[float], weights: Sequence[float]) -> float:
    total = math.fsum(weights)
    if not total or not all(map(math.isfinite, terms)):
        return math.nan
    return math.fsum(terms) / total


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach()
    if isinstance(value, (bool, int, float)):
        return value
    shown = type(value).__name__
    if isinstance(value, torch.Tensor):
        shown += f" of shape {tuple(value.shape)}"
    raise UsageError(f"metrics(output, target) gave {name!r} as a {shown}: it must be a scalar")
