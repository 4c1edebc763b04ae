"""The averages of the losses and metrics of an evaluation pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from operator import mul
from typing import Any

import torch

from pipeworker.errors import UsageError, a_type
from pipeworker.exact_sum import total
from pipeworker.facts.step import Evaluation
from pipeworker.worker.blame import user_code
from pipeworker.worker.stage.losses import parts

Metrics = Callable[[Any, Any], Any]
_RESERVED = ("step", "loss")


@dataclass(slots=True)
class Averages:
    """The averages of losses and metrics of micro-batches, weighted by their numbers of samples.

    Sums are exact, so that no result depends on how mini-batches were split. Values stay on their
    device until :meth:`result`. `loss_of`, and `metrics` under each name, return a mean over the
    samples, or a pair (sum, count). Each set of evaluation data has averages of its own, by its
    name.
    """

    loss_of: Callable[[Any, Any], Any]
    metrics: Metrics | None = None
    _sets: dict[str, dict[str, list[_Entry]]] = field(default_factory=dict)
    """The entries of each figure, by set."""

    def add(self, output: Any, target: Any, samples: int, name: str = "") -> None:
        """Add the loss and metrics of a micro-batch of a set: nested tensors of ``[samples, ...]``.

        Raises:
            UsageError: ``loss`` or ``metrics`` returned something other than scalars.
        """
        returned, count = parts(self.loss_of(output, target))
        loss = returned.clone()  # the user's code may add to what it has returned
        figures = self._sets.setdefault(name, {})
        figures.setdefault("loss", []).append(_entry(loss, count, samples))
        if self.metrics is None:
            return
        with user_code("metrics()"):
            values = self.metrics(output, target)
        for figure, (value, count) in checked_figures(values).items():
            figures.setdefault(figure, []).append(_entry(value, count, samples))

    def result(self, step: int) -> Evaluation:
        """Return the averages after a step; NaN for a loss of no samples.

        Figures of a set with a name are ``name/loss`` and so on; ``loss`` is that of the first one.
        """
        found: dict[str, float] = {}
        for name, figures in self._sets.items():
            for figure, entries in figures.items():
                found[f"{name}/{figure}" if name else figure] = _mean(entries)
        loss = next(iter(found.values()), math.nan)
        found.pop("loss", None)
        return Evaluation(step, loss, tuple(found), tuple(found.values()))


_Entry = tuple[Any, Any, Any]
"""A value, the factor that makes it a term of a sum, and the weight of this term."""


def _entry(value: Any, count: Any, samples: int) -> _Entry:
    """Return the entry of a mean over samples, or with a count that of a sum."""
    return (value, samples, samples) if count is None else (value, 1, count)


def _mean(entries: Sequence[_Entry]) -> float:
    values, factors, weights = map(_floats, zip(*entries, strict=True))
    weight = total(weights)
    return total(map(mul, values, factors)) / weight if weight else math.nan


def _floats(values: Sequence[Any]) -> list[float]:
    """Return numbers as floats; of equal kinds of tensors by one wait for their device."""
    kinds = {(one.dtype, one.device) if isinstance(one, torch.Tensor) else None for one in values}
    if len(kinds) == 1 and None not in kinds:
        values = torch.stack([one.reshape(()) for one in values]).tolist()
    return [float(one) for one in values]


def checked_figures(values: Any) -> dict[str, tuple[Any, Any]]:
    """Return what ``metrics`` returned by name: a scalar and its count, which is None for a mean.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(values, Mapping):
        raise UsageError(
            f"metrics(output, target) returned {a_type(values)}; return a dict of scalars"
        )
    for name in values:
        if not isinstance(name, str) or name in _RESERVED:
            raise UsageError(
                f"metrics(output, target) named a value {name!r}; use strings other than "
                f"{' and '.join(map(repr, _RESERVED))}"
            )
    return {
        name: (_scalar(name, value[0]), _scalar(name, value[1]))
        if isinstance(value, (tuple, list)) and len(value) == 2
        else (_scalar(name, value), None)
        for name, value in values.items()
    }


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().clone()
    if isinstance(value, Real):  # numpy's are too
        with suppress(OverflowError):
            return float(value)
    shown = a_type(value)
    if isinstance(value, torch.Tensor):
        shown += f" of shape {tuple(value.shape)}"
        if value.is_complex():
            shown += f" and {value.dtype}"
    raise UsageError(
        f"metrics(output, target) returned {shown} under {name!r}; return a scalar, or a pair "
        "(sum, count) of scalars"
    )
