"""Modules in eval mode, as `model` gave them, that are trained: pretrained ones often are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipeworker.worker.internals import BatchNorm

_DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_MOST_SHOWN = 3
_LONGEST = 60
"""Characters of the name of a module."""


def eval_mode_note(entries: Sequence[Any]) -> str:
    """Return a note on modules in eval mode that behave otherwise in training; "" if all is well.

    Entries that are not built yet are left out. Nothing is noted if the mode may be meant:

    - of a part whose parameters are all frozen,
    - if eval mode is only that of modules on which it has an effect, as of single batch norms. Then
      they were chosen; a whole model in eval mode, as ``from_pretrained()`` returns it, has linear
      layers and others in eval mode too.
    """
    found: list[str] = []
    is_whole = False
    for index, entry in enumerate(entries):
        if not isinstance(entry, nn.Module):
            continue
        frozen = _frozen(entry)
        for name, module in entry.named_modules():
            if module.training or module in frozen:
                continue
            if _differs(module):
                place = f"{_place(index, name)} ({type(module).__name__})"
                found.append(place if len(place) <= _LONGEST else f"{place[:_LONGEST]}...")
            elif any(p.requires_grad for p in module.parameters(recurse=False)):
                is_whole = True
    if not (found and is_whole):
        return ""
    shown, more = ", ".join(found[:_MOST_SHOWN]), len(found) - _MOST_SHOWN
    shown += f" and {more} more" if more > 0 else ""
    noun = "module is" if len(found) == 1 else "modules are"
    return (
        f"model(): {len(found)} {noun} in eval mode, as model() gave them: {shown}; so they train "
        "without dropout and with fixed batch norm statistics. Call train() in model(), or "
        "freeze the parameters of their layers, requires_grad_(False)"
    )


def _place(index: int, name: str) -> str:
    if name.startswith("^."):  # of a cut module: its own name
        return name.removeprefix("^.")
    return f"layer {index}{name and '.'}{name}"


def _differs(module: nn.Module) -> bool:
    """Return whether the mode of a module has an effect on what it computes."""
    if isinstance(module, _DROPOUT):
        return module.p > 0
    if isinstance(module, BatchNorm):
        return module.running_mean is not None
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return module.dropout > 0
    return isinstance(module, nn.RReLU)


def _frozen(entry: nn.Module) -> set[nn.Module]:
    """Return the modules that are in parts whose parameters are all frozen."""
    found: set[nn.Module] = set()
    for module in entry.modules():
        parameters = list(module.parameters())
        if module not in found and parameters and not any(p.requires_grad for p in parameters):
            found.update(module.modules())
    return found
