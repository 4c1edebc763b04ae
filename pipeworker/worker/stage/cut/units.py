"""The units of a module, and stand-ins for tensors that a process does not have.

A unit is a submodule that runs as a whole in one layer of the pipeline: an entry of a list of
modules, or else an outermost module with parameters of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeworker.worker.internals import shared_fake_mode, unsaved_buffers_of
from pipeworker.worker.stage.cut.classes import hide_stand_ins
from pipeworker.worker.stage.cut.inner_hooks import forget_library_hooks
from pipeworker.worker.transport.layout import span_of

CPU = torch.device("cpu")
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def units_of(root: nn.Module) -> list[str]:
    """Return the names of the units of a module, in the order of its children."""
    return list(_units(root, ""))


def _units(module: nn.Module, name: str) -> Iterator[str]:
    if name and _holds_state(module, recurse=False) and not _has_list(module):
        yield name
        return
    for key, child in module.named_children():
        full = f"{name}.{key}" if name else key
        if not _holds_state(child):
            continue
        if isinstance(module, _LISTS) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield full
        else:
            yield from _units(child, full)


def _holds_state(module: nn.Module, *, recurse: bool = True) -> bool:
    """Return whether a module has parameters or buffers that are saved."""
    return any(True for _ in module.parameters(recurse)) or any(
        True for _ in saved_buffers(module, recurse=recurse)
    )


def _has_list(module: nn.Module) -> bool:
    """Return whether a list of several modules with state is within a module."""
    return any(
        sum(map(_holds_state, inner.children())) > 1
        for inner in module.modules()
        if isinstance(inner, _LISTS)
    )


def saved_buffers(root: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and values of the buffers that a module's state dict has."""
    modules = root.named_modules(remove_duplicate=False) if recurse else [("", root)]
    for name, module in modules:
        for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if key not in unsaved_buffers_of(module):
                yield (f"{name}.{key}" if name else key), buffer


def stand_in(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    stride: tuple[int, ...] | None = None,
    *,
    wants_grad: bool = False,
) -> torch.Tensor:
    """Return a fake tensor, which has a shape and takes no memory; it is no leaf of a graph.

    Without a `stride` it is contiguous.
    """
    with shared_fake_mode():
        if stride is None:
            made = torch.empty(shape, dtype=dtype, device=device)
            return made.requires_grad_().clone() if wants_grad else made
        whole = torch.empty(span_of(shape, stride), dtype=dtype, device=device)
        return (whole.requires_grad_().clone() if wants_grad else whole).as_strided(shape, stride)


def stride_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a dense tensor; None if it is contiguous, or not dense."""
    is_plain = tensor.layout is not torch.strided or tensor.is_contiguous() or not tensor.numel()
    return None if is_plain else tensor.stride()


def hollow_parameter(parameter: nn.Parameter, device: torch.device = CPU) -> nn.Parameter:
    """Return a parameter like another one that takes no memory and seems to be on a device."""
    fake = stand_in(tuple(parameter.shape), parameter.dtype, device)
    return nn.Parameter(fake, requires_grad=parameter.requires_grad)


def call_of(unit: nn.Module) -> Callable[..., Any]:
    """Return what calls a unit, without the ``__call__`` of its class.

    That surrounds the call already: the hollow copy of the unit runs it.
    """
    is_usual = type(unit).__call__ is nn.Module.__call__
    return unit if is_usual else partial(nn.Module.__call__, unit)


def computed_attributes(module: nn.Module) -> dict[int, torch.Tensor]:
    """Return copies of the tensors with a graph that modules have as attributes, by id.

    torch copies no such tensor. A hook of the deprecated ``torch.nn.utils.weight_norm`` computes
    one before each forward, so that the old one is not used.
    """
    attributes = (value for one in module.modules() for value in vars(one).values())
    return {
        id(value): value.detach().clone()
        for value in attributes
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }


def hollow(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a module whose parameters take no memory and seem to be on a device.

    Its buffers are copied to that device.

    Raises:
        Exception: whatever a copy raises, for a module that cannot be copied.
    """
    memo: dict[int, object] = {**computed_attributes(module)}
    memo |= {id(p): hollow_parameter(p, device) for p in module.parameters()}
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().clone().to(device)
    copied = copy.deepcopy(module, memo)
    hide_stand_ins(copied)
    switch_off(copied)
    forget_library_hooks(copied)
    return copied


def switch_off(module: nn.Module) -> list[str]:
    """Switch off what a library's module does besides its forward; return what was on.

    A module of transformers that trains needs no cache of keys and values, and checkpoints of its
    own would run a unit's forward again, as ``--recompute`` does for a stage.
    """
    found = set()
    for one in module.modules():
        if getattr(one, "gradient_checkpointing", False) is True:
            one.gradient_checkpointing = False  # type: ignore[assignment]
            found.add("gradient_checkpointing")
        configs = [getattr(one, "config", None)]
        configs += list(vars(configs[0]).values()) if _has_cache(configs[0]) else []
        for config in configs:
            if _has_cache(config) and config.use_cache is True:  # type: ignore[union-attr]
                config.use_cache = False  # type: ignore[union-attr]
                found.add("use_cache")
    return sorted(found)


def _has_cache(config: object) -> bool:
    return hasattr(config, "use_cache") and hasattr(config, "__dict__")
