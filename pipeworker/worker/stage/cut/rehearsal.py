"""Further runs of a module's forward, which have to do what the run did that made its plan.

In a rehearsal no unit runs: each call of one returns stand-ins, as on the last of many stages. What
a unit left in an attribute, or in an object that the forward reads, is then missing, and what an
earlier forward left is there. Where a call gets other arguments because of that, stages would
silently compute other numbers than one process does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.internals import pytree
from pipeworker.worker.stage import rng
from pipeworker.worker.stage.cut.calls import (
    clear_new,
    leaves_of,
    line_of_error,
    name_of,
    reads_metadata,
    tensors_of,
)
from pipeworker.worker.stage.cut.forward import Forward
from pipeworker.worker.stage.cut.guards import refused
from pipeworker.worker.stage.cut.isolation import Isolation
from pipeworker.worker.stage.cut.objects import held_within
from pipeworker.worker.stage.cut.planning import Planning, needs_numbers
from pipeworker.worker.stage.cut.shapes import HollowUnit
from pipeworker.worker.stage.cut.trace import Trace, is_object, without_content
from pipeworker.worker.stage.cut.units import CPU, call_of
from pipeworker.worker.stage.values import replace_tensors

_PASS = "have units return what they compute, and pass what they need as arguments"
_LEFT = "what {} leaves in an attribute or an object"
ELSEWHERE = (_LEFT.format("a unit"), "where the unit ran on another stage,", _PASS)
AGAIN = (_LEFT.format("an earlier forward"), "in a second run", _PASS)
RETURNED = (
    "whether a unit returns a tensor that it is called with, or a copy",
    "where it returns that tensor,",
    "do not compare tensors by `is`, or have the unit return x.view_as(x) in place of x",
)
"""Causes of a difference: the fact it depends on, when it differs, and the remedy."""


def departed(unit: str) -> tuple[str, str, str]:
    """Return the cause of a difference behind a forward that a stage has left behind a unit."""
    remedy = "set it as the forward begins, or reset it in a `finally` clause"
    return _LEFT.format(f"a stage that ends behind {unit}"), "in its next run", remedy


class _OnStandIns(Forward):
    """One run of all layers on stand-ins.

    Args:
        planning: the run that made the plan.
        parameters: the names of the hollow module's parameters, by id.
    """

    def __init__(self, planning: Planning, parameters: dict[int, str]) -> None:
        plan = planning.plan
        super().__init__(plan, planning.types, parameters, CPU, len(plan) + 1, (), (), {})
        self._described = [*planning.described]

    def begin(self, value: Any) -> Any:
        """Return the module's input."""
        return value

    def end(self) -> None:
        """Leave the forward: no stage follows."""


class Rehearsal(_OnStandIns):
    """One run of a hollow module's forward, which raises where it differs from an earlier one.

    Args:
        planning: the earlier run.
        parameters: the names of the hollow module's parameters, by id.
        cause: for the message, one of the causes above.
        units: the units of the module by name.
        isolation: of the earlier run of the same module; None if this is another copy of it.
        stop: the layer before which a stage leaves the forward; None to run all of it.
    """

    def __init__(
        self,
        planning: Planning,
        parameters: dict[int, str],
        cause: tuple[str, str, str],
        units: Mapping[str, HollowUnit],
        isolation: Isolation | None,
        stop: int | None,
    ) -> None:
        super().__init__(planning, parameters)
        self.stop = self.stop if stop is None else stop
        self._planning, self._expected = planning, planning.trace.calls
        self._trace, self._cause = Trace(), cause
        self._hollow, self._isolation, self._inside = units, isolation, False

    def rehearse(self, module: nn.Module, batch: Any) -> None:
        """Run the forward; raise UsageError if it does anything else than before."""
        self._planning.common.begin()
        try:
            with rng.preserve_generators(), torch.enable_grad():
                self.run(module, batch)
        except UsageError:
            raise
        except Exception as error:
            raise self._elsewhere(
                f"it fails with {type(error).__name__} at {line_of_error(error)}: {error}"
            ) from error
        if self.stop > len(self._plan) and len(self._trace.calls) != len(self._expected):
            raise self._elsewhere("it ends early")

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compare one call of a function of torch outside of units, then do it."""
        leaves = [*leaves_of(args), *leaves_of(kwargs)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._depends(tensors) and not reads_metadata(func):
            self._compare(name_of(func), leaves)
        out = super().operation(func, args, kwargs)
        clear_new(func, out)
        return out

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Do the call of a unit, which ends a layer; or one within a unit that is checked."""
        if not self._inside:
            return super().call(name, *args, **kwargs)
        with self._hollow[name].itself() as unit:
            return call_of(unit)(*args, **kwargs)

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._compare(name, leaves_of((args, kwargs)), partial(self._is_alike, name, args, kwargs))
        if self._isolation is not None:
            self._inside = True
            try:
                unit = self._hollow[name]
                common = self._planning.common
                self._isolation.check_again(name, unit, self._layer, args, kwargs, common)
            finally:
                self._inside = False
        return super()._call(name, args, kwargs)

    def _passed(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return stand-ins for what a unit returned; if they are to show, its own arguments."""
        out = super()._passed(layer, args, kwargs)
        if self._cause is not RETURNED:
            return out
        given = {self._numbers.get(id(one)): one for one in tensors_of((args, kwargs))}
        found = {id(one): given.get(self._numbers[id(one)], one) for one in tensors_of(out)}
        return replace_tensors(out, found)

    def _compare(
        self, name: str, leaves: Sequence[Any], is_alike: Callable[[int], bool] = lambda _: False
    ) -> None:
        place = len(self._trace.calls)
        self._trace.add(name, leaves, self._numbers, self._parameters)
        if place < len(self._expected) and self._trace.calls[place] == self._expected[place]:
            return
        if place >= len(self._expected) or not is_alike(place):
            raise self._elsewhere(f"{name} gets other arguments, or was not called here")

    def _is_alike(self, name: str, args: Any, kwargs: Any, place: int) -> bool:
        """Return whether a unit does the same although an object that it is given holds others.

        A cache of all layers, of which each one only uses its own part, is such an object.
        """
        inside = self._planning.inside.get(place)
        calls = self._trace.calls[place], self._expected[place]
        if inside is None or without_content(calls[0]) != without_content(calls[1]):
            return False
        try:  # the unit may change the object, as it did on its stage
            args, kwargs = pytree.tree_map(_with_own_content, (args, kwargs))
            return self._planning.isolation.calls_of_fresh(name, args, kwargs) == inside
        except Exception:  # of the unit: what it needs is set by others
            return False

    def _elsewhere(self, reason: str, *, in_forward: bool = True) -> UsageError:
        layer = min(self._layer, len(self._plan) - 1)
        fact, when, remedy = self._cause
        what = f"depends on {fact}: {when} {reason}"
        return refused(layer, self._plan.units[layer], what, remedy)


class EvaluationRehearsal(_OnStandIns):
    """One run in eval mode, which raises where an evaluation pass would."""

    def rehearse(self, module: nn.Module, batch: Any) -> None:
        """Run the forward; raise UsageError if it has other units or operations than in training.

        Another error is left to the first pass: a later mini-batch may not cause it.
        """
        self._is_training = False
        for one in module.modules():
            one.training = False
        try:
            with rng.preserve_generators(), torch.no_grad():
                self.run(module, batch)
        except UsageError:
            raise
        except Exception as error:
            if needs_numbers(error):
                reason = f"it needs the numbers of an activation, at {line_of_error(error)}"
                raise self._elsewhere(reason, in_forward=False) from error
            return
        self._check_count(self._layer, "in all")


def _with_own_content(leaf: Any) -> Any:
    if not is_object(leaf):
        return leaf
    kept = [one for one in held_within(leaf) if isinstance(one, (torch.Tensor, nn.Module))]
    return copy.deepcopy(leaf, {id(one): one for one in kept})
