"""Lazy layers, as ``nn.LazyLinear``: before their first input their parameters have no sizes."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from pipeworker.errors import UsageError
from pipeworker.worker import blame


def reject_lazy(module: nn.Module, layer: int | None = None) -> None:
    """Reject a layer, or a module to be cut, that has a lazy module.

    Before its first input an optimizer finds no parameters in it.

    Raises:
        UsageError: it has one; the message names the layer, or the lazy module within the other.
    """
    for name, one in module.named_modules():
        if any(map(is_lazy, (*one.parameters(recurse=False), *one.buffers(recurse=False)))):
            where = f"model(): its {name} ({type(one).__name__})"
            if layer is not None:
                where = f"{blame.layer(layer, blame.kind_of(module))}:"
            raise UsageError(
                f"{where} has parameters without sizes; pass the sizes when you build it"
            )
