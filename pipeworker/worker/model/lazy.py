"""Lazy layers, as ``nn.LazyLinear``: before their first input their parameters have no sizes."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from pipeworker.errors import UsageError
from pipeworker.worker import blame


def reject_lazy_layer(layer: nn.Module, index: int) -> None:
    """Reject a lazy layer: before its first input an optimizer finds no parameters in it.

    Raises:
        UsageError: it is one, or has one.
    """
    if any(map(_is_lazy, layer.modules())):
        raise _without_sizes(f"{blame.layer(index, blame.kind_of(layer))}:")


def reject_lazy_module(module: nn.Module) -> None:
    """Reject a module to be cut that has a lazy one.

    Raises:
        UsageError: it has one; the message names the first.
    """
    for name, one in module.named_modules():
        if _is_lazy(one):
            raise _without_sizes(f"model(): its {name} ({type(one).__name__})")


def _is_lazy(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(map(is_lazy, own))


def _without_sizes(name: str) -> UsageError:
    return UsageError(f"{name} has parameters without sizes; pass the sizes when you build it")
