"""The layers of a cut module: each owns one unit, and runs its part of the module's own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError, a_type
from pipeworker.facts.layer_names import LayerNames
from pipeworker.worker.internals import buffers_of, map_tensor_leaves, storage_key
from pipeworker.worker.stage.cut.common import CommonVariables
from pipeworker.worker.stage.cut.forward import Enter, Forward, Leave, StandIns
from pipeworker.worker.stage.cut.guards import OuterBuffers, buffers_within, changes_buffer
from pipeworker.worker.stage.cut.inner_hooks import forget_library_hooks
from pipeworker.worker.stage.cut.isolation import Isolation, UnitAttributes, held_by_modules
from pipeworker.worker.stage.cut.plan import CutPlan
from pipeworker.worker.stage.cut.planning import Planning
from pipeworker.worker.stage.cut.rehearsal import (
    AGAIN,
    ELSEWHERE,
    RETURNED,
    EvaluationRehearsal,
    Rehearsal,
    departed,
)
from pipeworker.worker.stage.cut.shapes import HollowUnit
from pipeworker.worker.stage.cut.units import (
    CPU,
    call_of,
    computed_attributes,
    hollow,
    saved_buffers,
    switch_off,
    units_of,
)
from pipeworker.worker.stage.values import is_dense
from pipeworker.worker.transport.layout import span_of
from pipeworker.worker.transport.structure import TypeRegistry

ROOT = "^"
"""The name, within a layer, of what has the names of the user's module."""


class Cut:
    """A module that is cut into layers.

    Attributes:
        module: a hollow copy of the module, which calls :meth:`_unit` in place of each unit.
        switched_off: what the module did besides its forward, by the names of its settings.
    """

    def __init__(
        self, module: nn.Module, types: TypeRegistry, device: torch.device, plan: CutPlan
    ) -> None:
        self.plan, self.types = plan, types
        self.module = _hollow(module, device)
        self._device = device
        self._parameters = _names_of(self.module)
        self._modes = [(one, one.training) for one in self.module.modules()]
        self._is_training: bool | None = None
        self.switched_off: list[str] = []
        self._run: Any = None
        self._stand_ins: StandIns = {}
        units = {n: one.unit for n, one in _intercept(self.module, self._unit).items()}
        self._outer = OuterBuffers(self.module, units.values())
        self._attributes = UnitAttributes(units)

    def share_buffers(self, other: Cut) -> None:
        """Keep no copies of the buffers within units, which do not run: use those of another cut.

        They may be as large as weights.
        """
        for name in self.plan.units:
            own, others = (one.module.get_submodule(name).modules() for one in (self, other))
            for module, same in zip(own, others, strict=True):
                buffers_of(module).update(buffers_of(same))

    @cached_property
    def _inside(self) -> dict[int, str]:
        """Return the names of the buffers within units, by id, which units of layers change."""
        return buffers_within(self.module, map(self.module.get_submodule, self.plan.units))

    def _unit(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._run.call(name, *args, **kwargs)

    def run(
        self,
        parts: Sequence[Part],
        calls: Sequence[Callable[..., Any]],
        value: Any,
        enter: Enter | None = None,
        leave: Leave | None = None,
    ) -> Any:
        """Run consecutive layers; return what the next layer gets, or the module's output.

        Args:
            parts: the layers.
            calls: what is called in place of the unit of each.
            value: the module's input, or what the layer before returned.
            enter: called as each layer begins.
            leave: called as each layer ends.
        """
        self._set_mode(is_training=parts[0].training)
        around = self.plan, self.types, self._parameters, self._device, parts[0].index
        outer = self._run
        self._run = Forward(*around, parts, calls, self._stand_ins, enter, leave)
        try:
            found = self._run.run(self.module, value, self._inside)
            self._outer.check(self.plan.overwritten)
            self._attributes.check(self.plan)
            return found
        finally:
            self._run = outer

    def _set_mode(self, *, is_training: bool) -> None:
        """Set the mode of the modules around units, to what it was at first or to eval mode."""
        if is_training is not self._is_training:
            self._is_training = is_training
            for module, mode in self._modes:
                module.training = mode and is_training
            self._attributes.note_modes()

    def parts_of(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the layers by name, which own the units and parameters of a whole module."""
        plan, names = self.plan, self.plan.names
        self.switched_off = switch_off(module)
        forget_library_hooks(module)
        parameters: dict[str, torch.Tensor] = dict(saved_buffers(module))
        parameters |= dict(module.named_parameters(remove_duplicate=False))
        outside: list[dict[str, Any]] = [{} for _ in names]
        for name, layers in plan.parameters.items():
            for layer in layers:
                if not name.startswith(f"{plan.units[layer]}."):
                    outside[layer][name] = parameters[name]
        first = {name: min(layers) for name, layers in plan.parameters.items()}
        for i, unit in enumerate(plan.units):
            for name in _within(module, unit):
                first.setdefault(name, i)
        owners = {id(parameters[name]): i for name, i in first.items()}
        for name, tensor in parameters.items():
            if name not in first:
                # It is another name of a layer's tensor, or no layer uses it; the loss may.
                outside[owners.get(id(tensor), -1)][name] = tensor
        found: dict[str, nn.Module] = {}
        for i, unit in enumerate(plan.units):
            kind, own = part_class(plan.classes[i]), module.get_submodule(unit)
            found[LayerNames.of_cut(names[i], outside[i])] = kind(self, i, own, outside[i])
        return found


def plan_of(
    module: nn.Module, types: TypeRegistry, batch: Any, *, evaluates: bool = False
) -> CutPlan:
    """Return the plan of a module for an input, which is a micro-batch of its data.

    With `evaluates` the forward is also run in eval mode, where it must do the same operations.
    """
    copied, fresh, untouched = (_hollow(module, CPU) for _ in range(3))
    in_eval_mode = _hollow(module, CPU) if evaluates else None
    common = CommonVariables(module.modules())
    planning = Planning(types, _names_of(copied), common)
    units = _intercept(copied, planning.call)
    itself = Isolation({"": module}, lambda _: module)
    _reject_views(module)
    isolation = Isolation(
        {name: one.unit for name, one in units.items()},
        lambda name: hollow(untouched.get_submodule(name), CPU),
    )
    with torch.enable_grad():
        plan = planning.run(copied, units, isolation, _copy(batch))
    _reject_shared(module, plan.overwritten)
    if changed := itself.changed("", module):
        raise UsageError(
            f"model(): a hook or another function holds the module, and sets {changed!r} of it; a "
            "pipeline runs copies of the module: have the function use the module that it is given"
        )

    def rehearse(
        one: nn.Module,
        own: Mapping[str, HollowUnit],
        cause: tuple[str, str, str],
        before: Isolation | None = None,
        stop: int | None = None,
    ) -> None:
        rehearsal = Rehearsal(planning, _names_of(one), cause, own, before, stop)
        for name, unit in own.items():
            unit.redirect(partial(rehearsal.call, name))
        rehearsal.rehearse(one, _copy(batch))

    with common.as_at_first():
        rehearse(fresh, _intercept(fresh, id), ELSEWHERE)
    rehearse(copied, units, AGAIN, isolation)
    if planning.has_aliases:
        rehearse(copied, units, RETURNED)
    for layer in planning.departures.layers():
        for stop in (layer + 1, None):
            rehearse(copied, units, departed(plan.units[layer]), isolation, stop)
    if in_eval_mode is not None:
        rehearsal = EvaluationRehearsal(planning, _names_of(in_eval_mode))
        with common.as_at_first():
            _intercept(in_eval_mode, rehearsal.call)
            rehearsal.rehearse(in_eval_mode, _copy(batch))
    common.restore()
    planning.note_attributes()
    return plan


def _reject_views(module: nn.Module) -> None:
    """Reject a tensor in the memory of a trained parameter, but within the parameter's own unit.

    Another stage has a copy of it, which no update changes.
    """
    units, parameters = units_of(module), dict(module.named_parameters())
    known = {id(parameter) for parameter in parameters.values()}
    owned = [(n, _memory(p)) for n, p in parameters.items() if p.requires_grad and is_dense(p)]
    by_storage: dict[int, list[tuple[str, range]]] = {}
    for name, (storage, place) in owned:
        by_storage.setdefault(storage, []).append((name, place))
    for path, held in held_by_modules(module.named_modules()).items():
        for one in held:
            if not isinstance(one, torch.Tensor) or id(one) in known or not is_dense(one):
                continue
            storage, own = _memory(one)
            for name, place in by_storage.get(storage, ()):
                is_common = own.start < place.stop and place.start < own.stop
                both = (path, name)
                if is_common and not any(all(n.startswith(f"{u}.") for n in both) for u in units):
                    raise UsageError(
                        f"model(): {path!r} has the memory of the parameter {name!r}, and a stage "
                        "without that parameter would have a copy, which no update changes; use "
                        "the parameter itself, or clone() it"
                    )


def _reject_shared(module: nn.Module, overwritten: Sequence[str]) -> None:
    """Reject an overwritten buffer that shares its memory, as with a view of it.

    A copy of the module has two tensors, of which the forward would overwrite one.
    """
    held = held_by_modules(module.named_modules()).values() if overwritten else ()
    tensors = {id(one): one for values in held for one in values if isinstance(one, torch.Tensor)}
    for name in overwritten:
        buffer = module.get_buffer(name)
        for one in tensors.values():
            if one is not buffer and is_dense(one) and storage_key(one) == storage_key(buffer):
                raise changes_buffer(name)


def _memory(tensor: torch.Tensor) -> tuple[int, range]:
    """Return a number for a dense tensor's storage, and the bytes there from first to last."""
    begin = tensor.storage_offset() * tensor.itemsize
    size = span_of(tensor.shape, tensor.stride()) * tensor.itemsize
    return storage_key(tensor), range(begin, begin + size)


def _copy(batch: Any) -> Any:
    """Return a copy on the CPU, where the hollow modules seem to be; data() may use a device."""
    return map_tensor_leaves(lambda tensor: tensor.to(CPU, copy=True), batch)


def _names_of(module: nn.Module) -> dict[int, str]:
    """Return the first names of what layers own: parameters, and saved buffers outside of units."""
    units = [module.get_submodule(name) for name in units_of(module)]
    inside = {id(buffer) for unit in units for buffer in unit.buffers()}
    saved = reversed([*saved_buffers(module)])
    buffers = {id(b): name for name, b in saved if id(b) not in inside}
    return {**{id(p): name for name, p in module.named_parameters()}, **buffers}


def _intercept(module: nn.Module, call: Callable[..., Any]) -> dict[str, HollowUnit]:
    """Have each unit of a hollow module call a function, with its name; return the units."""
    units: dict[str, HollowUnit] = {}
    for name in units_of(module):
        unit = module.get_submodule(name)
        if all(unit is not one.unit for one in units.values()):
            units[name] = HollowUnit(unit, partial(call, name))
    return units


class Part(nn.Module):
    """One layer of a cut module: a unit, and the parameters that its layer uses beside it.

    Attributes:
        unit: the unit, of which each layer has an object of its own.
    """

    cut: Cut
    unit: nn.Module
    index: int

    def __init__(self, cut: Cut, index: int, unit: nn.Module, outside: dict[str, Any]) -> None:
        super().__init__()
        self.__dict__.update(cut=cut, index=index)
        self._place(cut.plan.units[index], unit)
        for name, tensor in outside.items():
            self._place(name, tensor)
        self._resolve()

    def _resolve(self) -> None:
        self.__dict__["unit"] = self.get_submodule(f"{ROOT}.{self.cut.plan.units[self.index]}")

    def _place(self, path: str, value: Any) -> None:
        parent: nn.Module = self
        *folders, last = f"{ROOT}.{path}".split(".")
        for folder in folders:
            children = dict(parent.named_children())
            if folder not in children:
                children[folder] = nn.Module()
                parent.add_module(folder, children[folder])
            parent = children[folder]
        if isinstance(value, nn.Module):
            parent.add_module(last, value)
        elif isinstance(value, nn.Parameter):
            parent.register_parameter(last, value)
        else:
            parent.register_buffer(last, value)

    @property
    def pipeworker_kind(self) -> str:
        """The name of this layer in messages: ``blocks.3, Block``."""
        return f"{self.cut.plan.names[self.index]}, {type(self).__name__}"

    @property
    def operations(self) -> int:
        """The number of calls outside of units that belong to this layer."""
        counts = [0, *self.cut.plan.counts]
        return counts[self.index + 1] - counts[self.index]

    @property
    def call(self) -> Callable[..., Any]:
        """The function that calls the unit."""
        return call_of(self.unit)

    def outside(self) -> list[torch.Tensor]:
        """Return the parameters that this layer uses outside of its unit."""
        own = {id(parameter) for parameter in self.unit.parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in own]

    def parameter(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer of the user's module that this layer owns."""
        folder, _, key = f"{ROOT}.{name}".rpartition(".")
        found: torch.Tensor = getattr(self.get_submodule(folder), key)
        return found

    def forward(self, value: Any) -> Any:
        """Run this layer alone."""
        return self.cut.run([self], [self.call], value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        made = type(self).__new__(type(self))
        nn.Module.__init__(made)
        made.__dict__.update(cut=self.cut, index=self.index, training=self.training)
        memo |= computed_attributes(self)
        for name, module in self.named_children():
            made.add_module(name, copy.deepcopy(module, memo))
        made._resolve()
        return made


@cache
def part_class(name: str) -> type[Part]:
    """Return the class of layers whose unit is of a class of this name: messages show it."""
    return type(name, (Part,), {})


def _within(module: nn.Module, unit: str) -> list[str]:
    inner = module.get_submodule(unit)
    named = (*inner.named_parameters(remove_duplicate=False), *saved_buffers(inner))
    return [f"{unit}.{name}" for name, _ in named]


def _hollow(module: nn.Module, device: torch.device) -> nn.Module:
    try:
        return hollow(module, device)
    except Exception as error:
        raise UsageError(
            f"model(): {a_type(module)} cannot be copied, and a pipeline cuts a copy of it: "
            f"{error}; return a list of layers"
        ) from None
