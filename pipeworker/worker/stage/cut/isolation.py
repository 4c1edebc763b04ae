"""The attributes of units, and the objects in them: another stage does not see them change.

Each process has objects of its own for a module's units, and its own copy of the module around
them. So a unit must not depend on an attribute, or on an object that it holds, which the module's
forward or another unit sets while the forward runs. When something has changed that way before a
unit is called, the unit runs once more, on a copy that did not see the change, and both runs have
to be the same: a cache of positions passes, a flag or a factor does not. In the same way a second
run of the forward checks what has changed since the unit's own last call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.internals import pytree, version_of
from pipeworker.worker.stage.cut.common import CommonVariables, States
from pipeworker.worker.stage.cut.containers import held_by, restore
from pipeworker.worker.stage.cut.objects import bytes_of, held_within, is_same
from pipeworker.worker.stage.cut.plan import CutPlan
from pipeworker.worker.stage.cut.shapes import HollowUnit
from pipeworker.worker.stage.cut.trace import Call, Recording
from pipeworker.worker.stage.slots import OF_EVERY_MODULE
from pipeworker.worker.transport.structure import PLAIN_TYPES

_OF_TORCH = OF_EVERY_MODULE - {"training"} | {"forward"}
"""The attributes in which each module keeps its parameters, buffers, modules and hooks; and the one
that gets the calls of a hollow unit."""
_MOST_DEPARTURES = 8
"""Layers behind which a forward is left at most."""
_Held = dict[str, list[Any]]
"""By the path of an attribute, the objects that it holds, and the versions of its tensors."""


class Isolation:
    """The attributes of each unit of a module as its forward begins.

    Args:
        units: the units by name.
        fresh: returns a unit, by name, of a copy of the module that has not run.
    """

    def __init__(self, units: Mapping[str, nn.Module], fresh: Callable[[str], nn.Module]) -> None:
        self._before = {name: _held_by(unit) for name, unit in units.items()}
        self._after: dict[str, tuple[_Held, int]] = {}
        self._common: dict[str, States] = {}
        self._fresh = fresh

    def changed(self, name: str, unit: nn.Module) -> str | None:
        """Return the path of an attribute of a unit that is not as it was, if there is one."""
        return changed_path(self._before[name], _held_by(unit))

    def note_call(self, name: str, unit: nn.Module, states: States) -> None:
        """Note what a unit holds, and the states of common variables, as a call of it ends."""
        _, count = self._after.get(name, ({}, 0))
        self._after[name] = _held_by(unit), count + 1
        self._common[name] = states

    def calls_of_fresh(
        self, name: str, args: Any, kwargs: Any, *, again: bool = False
    ) -> list[Call]:
        """Return the calls of a unit that saw no change, in its first or in one more forward.

        Raises:
            Exception: whatever its forward raises.
        """
        unit, recording = HollowUnit(self._fresh(name), id), Recording()
        for _ in range(self._after[name][1] if again else 0):
            self._call(unit, args, kwargs)
        with recording:
            self._call(unit, args, kwargs)
        return recording.trace.calls

    def _call(self, unit: HollowUnit, args: Any, kwargs: Any) -> None:
        """Call a unit with copies of the containers in its arguments."""
        args, kwargs = pytree.tree_map(lambda leaf: leaf, (args, kwargs))
        unit.call(args, kwargs)

    def check_again(
        self,
        name: str,
        unit: HollowUnit,
        layer: int,
        args: Any,
        kwargs: Any,
        common: CommonVariables,
    ) -> None:
        """Reject a change since a unit's last call by which its next one differs."""
        before, count = self._after.get(name, ({}, 0))
        changed = changed_path(before, _held_by(unit.unit)) if count else None
        left = common.left_since(self._common[name]) if count else {}
        if changed is None and not common.changed and not left:
            return
        held, recording = held_by(args, kwargs), Recording()
        try:
            with common.unchanged(left):
                expected = self.calls_of_fresh(name, args, kwargs, again=True)
            restore(held)
            with recording:
                unit.call(args, kwargs)
            same = recording.trace.calls == expected
        except Exception:  # of the unit: what it needs is set by others
            same = False
        restore(held)
        if not same:
            what = common.first_changed(left) if changed is None else f"{changed!r} of {name}"
            raise UsageError(
                f"layer {layer} ({name}): the model's forward or another layer sets {what} for the "
                "next forward, and each stage has one of its own; pass the value as an argument, "
                "or cut the model by hand, as a list of layers"
            )
        self.note_call(name, unit.unit, common.states())


class UnitAttributes:
    """The attributes of hollow units: what a forward sets there, the layers' own units do not see.

    A plan shows most such changes. This class finds, behind each forward, those that depend on the
    input; it does not look into the objects that attributes hold.
    """

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self._found = [
            (unit, folder, vars(module), [*vars(module).values()], [*vars(module)])
            for unit, one in units.items()
            for folder, module in one.named_modules(prefix=unit)
        ]

    def note_modes(self) -> None:
        """Note which modules are in training now."""
        for _, _, now, values, keys in self._found:
            values[keys.index("training")] = now["training"]

    def changed(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each unit and the path of an attribute of it that has changed."""
        for unit, folder, now, values, keys in self._found:
            if len(now) == len(values) and all(map(is_, now.values(), values)):  # fast, and usual
                continue
            before = dict(zip(keys, values, strict=True))
            for key in {**before, **now}:
                value, old = now.get(key), before.get(key)
                is_same = value is old or (type(value) in PLAIN_TYPES and value == old)
                if not is_same and key not in _OF_TORCH:
                    yield unit, f"{folder}.{key}"

    def check(self, plan: CutPlan) -> None:
        """Reject a change of an attribute that the forward left alone when the plan was made."""
        for unit, path in self.changed():
            if path not in plan.attributes:
                raise UsageError(
                    f"layer {plan.units.index(unit)} ({unit}): the model's forward or another "
                    f"layer sets {path!r}, and did not when it was cut, and each stage has a "
                    "module of its own; pass the value as an argument, or cut the model by hand, "
                    "as a list of layers"
                )


class Departures:
    """The attributes around the units of a module, and the common variables, behind each layer.

    A stage's next forward begins where it leaves one: a forward that sets a flag before some units
    and resets it behind them never resets it on a stage that ends between them.
    """

    def __init__(
        self, module: nn.Module, units: Collection[nn.Module], common: CommonVariables
    ) -> None:
        inside = {id(one) for unit in units for one in unit.modules()}
        self._around = [(n, one) for n, one in module.named_modules() if id(one) not in inside]
        self._common = common
        self._behind: list[dict[Any, list[Any]]] = []

    def note(self) -> None:
        """Note what they hold behind a layer, or, in the end, behind the forward."""
        self._behind.append(held_by_modules(self._around) | self._common.shown())

    def layers(self) -> list[int]:
        """Return the layers behind which they hold something else than behind the forward."""
        of_units = self._common.changed
        *behind, end = (
            {key: value for key, value in held.items() if key not in of_units}
            for held in self._behind
        )
        found: list[int] = []
        known = [end]
        for layer, held in enumerate(behind[:-1]):
            if len(found) < _MOST_DEPARTURES and all(
                changed_path(one, held) is not None for one in known
            ):
                found.append(layer)
                known.append(held)
        return found


def changed_path(before: _Held, now: _Held) -> str | None:
    """Return the first path that does not hold what it held, if there is one."""
    for path in {**before, **now}:
        if not is_same(before.get(path, []), now.get(path, [])):
            return path
    return None


def held_by_modules(modules: Iterable[tuple[str, nn.Module]]) -> _Held:
    """Return what the attributes of modules hold, by path."""
    found: _Held = {}
    for name, module in modules:
        for key, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
            if key not in _OF_TORCH:
                found[f"{name}.{key}" if name else key] = list(_flat(value))
    return found


def _held_by(unit: nn.Module) -> _Held:
    """Return what a unit holds, and what modules around it hold that its attributes lead to."""
    found = held_by_modules(unit.named_modules())
    inside = {id(one) for one in unit.modules()}
    around = [
        (path, one)
        for path, held in found.items()
        for one in held
        if isinstance(one, nn.Module) and id(one) not in inside
    ]
    return found | held_by_modules(around)


def _flat(value: Any) -> Iterator[Any]:
    """Yield a value, and what it holds; with each, what shows that its numbers have changed."""
    for one in held_within(value):
        yield one
        yield version_of(one) if isinstance(one, torch.Tensor) else bytes_of(one)
