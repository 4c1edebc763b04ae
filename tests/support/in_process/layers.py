"""Layers, a loss, optimizers and random data for pipelines in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pipeworker
from support.in_process.plain_loop import Batches


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def data(*sizes: int, width: int = 6, out: int = 2) -> Batches:
    return [(torch.randn(n, width), torch.randn(n, out)) for n in sizes]


class Layer(nn.Module):
    """A layer from a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


class Apply(nn.Module):
    """A linear layer applied to one key of a dict."""

    def __init__(self, source: str, target: str, width: int = 6, out: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.source, self.target = source, target

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        return {**value, self.target: self.linear(value[self.source])}


class Noise(nn.Module):
    """A random layer, like dropout: a recompute must draw what the forward drew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.3) + torch.rand(x.shape[1]) if self.training else x


def mlp() -> list[nn.Module]:
    return [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), Noise(), nn.GELU(), nn.Linear(8, 2)]


def noisy(tensor: torch.Tensor) -> torch.Tensor:
    """Have a hook add noise to the gradient of a tensor; return the tensor."""
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: gradient + torch.randn_like(gradient))  # type: ignore[no-untyped-call]
    return tensor


class Stash(nn.Module):
    """A layer that stashes its input."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pipeworker.stash(self.name, x)
        return x


class Pop(nn.Module):
    """A layer that adds a stashed tensor."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + pipeworker.pop(self.name)
