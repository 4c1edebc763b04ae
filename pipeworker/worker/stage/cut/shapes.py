"""Calls of units of a hollow module: they return tensors without memory, of the right shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeworker.worker.internals import (
    Hooks,
    is_fake,
    put_hooks,
    pytree,
    take_hooks,
    without_fake_modes,
)
from pipeworker.worker.stage import rng
from pipeworker.worker.stage.cut.containers import Contents, held_by, restore
from pipeworker.worker.stage.cut.inner_hooks import Outputs, hooked_in, outputs_within
from pipeworker.worker.stage.cut.units import call_of, computed_attributes, stand_in


class _Call(partial[Any]):
    """A call that takes the place of a unit's forward."""


class HollowUnit:
    """A unit of a hollow module, whose calls another function gets.

    Args:
        unit: the unit; it loses its hooks, which :meth:`call` calls.
        call: gets the calls of the unit.
    """

    def __init__(self, unit: nn.Module, call: Callable[..., Any]) -> None:
        self.unit, self._forward, self._hooks = unit, unit.forward, take_hooks(unit)
        self._replaced = unit.forward = _Call(call)

    def redirect(self, call: Callable[..., Any]) -> None:
        """Have another function get the calls from now on; hooks that were added stay."""
        self._replaced = self.unit.forward = _Call(call)

    @contextmanager
    def itself(self) -> Iterator[nn.Module]:
        """Return the unit with its own forward and hooks.

        Hooks that were added to it since, as libraries do to collect values, are not called.
        """
        later = take_hooks(self.unit)
        put_hooks(self.unit, self._hooks)
        self.unit.forward = self._forward
        try:
            yield self.unit
        finally:
            self.unit.forward = self._replaced
            take_hooks(self.unit)
            put_hooks(self.unit, later)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Outputs]:
        """Return what the unit, and modules within it that have hooks, return for fake tensors.

        If the unit needs numbers, they are those of a copy. No random number generator changes.
        """
        held, hooked = held_by(args, kwargs), hooked_in(self.unit)
        with self.itself() as unit, rng.preserve_generators():
            attributes = [(vars(module), dict(vars(module))) for module in unit.modules()]
            try:
                with outputs_within(unit, hooked) as outputs:
                    return call_of(unit)(*args, **kwargs), outputs
            except Exception:
                restore(held)
                for now, before in attributes:  # a tensor in one, which has a graph, has no copy
                    now.clear()
                    now.update(before)
            return self._call_with_numbers(args, kwargs, held, hooked)

    def _call_with_numbers(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], held: Contents, hooked: list[str]
    ) -> tuple[Any, Outputs]:
        known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        wholes: _Wholes = {}

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if not is_fake(tensor):
                made[id(tensor)] = tensor, tensor
                return tensor
            if id(tensor) not in known:
                known[id(tensor)] = tensor, _numbers_like(tensor)
            return known[id(tensor)][1]

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            for stands, number in known.values():
                if number is tensor:
                    return stands
            if is_fake(tensor):
                return tensor
            if id(tensor) not in made:
                made[id(tensor)] = tensor, _view_like(tensor, wholes)
            return made[id(tensor)][1]

        copied = _with_numbers(self.unit, self._hooks)
        for one, before in held:
            if not isinstance(one, list):
                for key, value in before.items():
                    one[key] = pytree.tree_map_only(torch.Tensor, real, value)
        args, kwargs = pytree.tree_map_only(torch.Tensor, real, (args, kwargs))
        with without_fake_modes(), outputs_within(copied, hooked) as outputs:
            out = call_of(copied)(*args, **kwargs)
        for one, _ in held:
            for key in range(len(one)) if isinstance(one, list) else list(one.keys()):
                one[key] = pytree.tree_map_only(torch.Tensor, fake, one[key])
        for own, other in zip(self.unit.modules(), copied.modules(), strict=True):
            for key, value in vars(other).items():
                if vars(own).get(key) is None and value is not None:  # the copy has set it
                    setattr(own, key, pytree.tree_map_only(torch.Tensor, fake, value))
        faked = [(name, pytree.tree_map_only(torch.Tensor, fake, value)) for name, value in outputs]
        return pytree.tree_map_only(torch.Tensor, fake, out), faked


_Wholes = dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""By address and dtype, a tensor, which keeps the memory, and the stand-in for all of it."""


def _view_like(tensor: torch.Tensor, wholes: _Wholes) -> torch.Tensor:
    """Return a stand-in for a tensor; those of views of the same memory share theirs."""
    if tensor.layout is not torch.strided:
        wants = tensor.requires_grad
        return stand_in(tuple(tensor.shape), tensor.dtype, tensor.device, wants_grad=wants)
    memory, dtype = tensor.untyped_storage(), tensor.dtype
    key = memory.data_ptr(), dtype
    if key not in wholes:
        size, wants = memory.nbytes() // tensor.itemsize, dtype.is_floating_point
        whole = stand_in((size,), dtype, tensor.device, wants_grad=wants or dtype.is_complex)
        wholes[key] = tensor, whole
    view = wholes[key][1].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return view if tensor.requires_grad else view.detach()


def _with_numbers(unit: nn.Module, hooks: Hooks) -> nn.Module:
    """Return a copy of a hollow unit with random parameters, and with the same hooks."""
    memo: dict[int, Any] = {**computed_attributes(unit)}
    for parameter in unit.parameters():
        value = _numbers_like(parameter).detach()
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    forwards = {  # a module within may be a unit too
        one: vars(one).pop("forward")
        for one in unit.modules()
        if one is unit or isinstance(vars(one).get("forward"), _Call)
    }
    take_hooks(unit)
    try:
        with without_fake_modes():
            copied = copy.deepcopy(unit, memo)
    finally:
        for one, forward in forwards.items():
            one.forward = forward
        put_hooks(unit, hooks)
    put_hooks(copied, hooks)
    return copied


def _numbers_like(tensor: torch.Tensor) -> torch.Tensor:
    shape = tuple(tensor.shape)
    with without_fake_modes():
        if not tensor.dtype.is_floating_point:
            return torch.zeros(shape, dtype=tensor.dtype, device="cpu")
        value = torch.randn(shape, device="cpu").mul_(0.02).to(tensor.dtype)
        return value.requires_grad_(tensor.requires_grad)
