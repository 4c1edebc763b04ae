"""Small networks of eight layers, in which pipelines have been found to differ from a plain loop.

As a job file it takes the name of a case; `conformance.py` runs the cases through other pipelines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, WORDS, SAMPLES, STEPS, MICROBATCHES, RATE, CLIP = 16, 32, 16, 3, 4, 0.5, 0.05
Batch = tuple[Any, torch.Tensor]


def fill(module: nn.Module, seed: int) -> nn.Module:
    """Set the parameters of a module to numbers that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return module


class Layer(nn.Module):
    """(batch, width) to the same."""

    def __init__(self, index: int, *, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        fill(self.linear, index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.dropout(self.linear(x))))


class Frozen(Layer):
    """A layer whose parameters stay as they are."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.requires_grad_(False)


class Straight(Layer):
    """A layer that does not keep its output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x)
        return made


class InPlace(Layer):
    """A layer that changes its input, which must not be kept by the layer before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


class Fork(Layer):
    """A layer with a second output, which `Join` uses: a skip connection."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, y


class Carry(Layer):
    """A layer that hands on a second tensor, of floats or of truth values."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        x, other = (x, other) if other is not None else x
        return super().forward(x), other


class Join(Layer):
    """A layer that adds what was handed on, or sets to 0 where that is true."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        x, other = (x, other) if other is not None else x
        assert other is not None
        mixed = x.masked_fill(other, 0.0) if other.dtype == torch.bool else x + other
        return super().forward(mixed)


class Mask(Layer):
    """A layer with a second output that has no gradient."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x > 0.5


class Words(nn.Module):
    """(batch, time) to (batch, time, width)."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WORDS, WIDTH))
        fill(self, index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.embedding(x, self.weight)


class Logits(Words):
    """(batch, time, width) to (batch, time, words)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def numbers(step: int, samples: int = SAMPLES) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(samples, WIDTH, generator=generator) for _ in range(2))
    return x, y


def texts(step: int, *, even: bool = False) -> Batch:
    """Return words and the next ones, -100 where there are none: texts differ, unless `even`."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (SAMPLES, 9), generator=generator)
    x, y = words[:, :-1].contiguous(), words[:, 1:].clone()
    for row in range(0 if even else SAMPLES):
        y[row, 1 + row % 8 :] = -100
    return x, y


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def mean_of_words(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def sum_of_words(output: torch.Tensor, target: torch.Tensor) -> Any:
    """Return the sum and the number of words: what pipeworker takes for a mean over words."""
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total, (target != -100).sum()


@dataclass(frozen=True)
class Case:
    """A network and how it is trained.

    Attributes:
        layers: makes each of eight layers.
        loss: of a mini-batch in a plain loop; what other pipelines are given.
        own_loss: what pipeworker is given, if that is not the same.
        batch: the mini-batch of a number, from 0.
        clip: bound on the norm of the whole gradient.
        accumulate: mini-batches for each update.
        tied: whether the first and the last layer share their weight.
    """

    layers: Sequence[partial[Any]]
    loss: Callable[[Any, Any], torch.Tensor] = mean
    own_loss: Callable[[Any, Any], Any] | None = None
    batch: Callable[[int], Batch] = numbers
    clip: float | None = None
    accumulate: int = 1
    tied: bool = False
    options: Sequence[str] = field(default_factory=tuple)


def eight(**places: Callable[..., nn.Module]) -> list[partial[Any]]:
    """Return eight layers; `places` has those that are others, by ``at_`` and their index."""
    return [partial(places.get(f"at_{index}", Layer), index) for index in range(8)]


def of_words() -> list[partial[Any]]:
    return eight(at_0=Words, at_7=Logits)


_SKIP = {f"at_{index}": Carry for index in range(2, 6)}
CASES = {
    "even micro-batches": Case(eight()),
    "dropout off": Case([partial(Layer, index, dropout=0.0) for index in range(8)]),
    "tied weights": Case(
        of_words(), mean_of_words, sum_of_words, partial(texts, even=True), tied=True
    ),
    "mean over words": Case(of_words(), mean_of_words, sum_of_words, texts),
    "clipping by norm": Case(eight(), clip=CLIP, options=("--clip-grad-norm", str(CLIP))),
    "two mini-batches": Case(eight(), accumulate=2, options=("--accumulate", "2")),
    "uneven micro-batches": Case(eight(), batch=partial(numbers, samples=10)),
    "frozen layers": Case(eight(at_0=Frozen, at_1=Frozen, at_4=Frozen)),
    "skip connection": Case(eight(at_1=Fork, at_6=Join, **_SKIP)),
    "mask between stages": Case(eight(at_1=Mask, at_6=Join, **_SKIP)),
    "batch norm": Case([partial(Layer, index, norm=True) for index in range(8)]),
    "input changed in place": Case(
        eight(at_1=Straight, at_2=InPlace, at_3=Straight, at_4=InPlace, at_5=Straight, at_6=InPlace)
    ),
}


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE)


if sys.argv[1:2] and sys.argv[1] in CASES:  # pipeworker's job file
    _case = CASES[sys.argv[1]]
    loss = _case.own_loss or _case.loss
    tied = [("0.weight", "7.weight")] if _case.tied else []

    def model() -> list[Any]:
        return list(_case.layers)

    def data() -> list[Batch]:
        return [_case.batch(number) for number in range(STEPS * _case.accumulate)]
