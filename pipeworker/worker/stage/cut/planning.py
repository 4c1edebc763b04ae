"""The plan of a module, made by one run of its forward on fake parameters and real input."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.plan.figures import plural
from pipeworker.worker import blame
from pipeworker.worker.internals import (
    FAKE_LOGGER,
    alias_of,
    changed_by,
    is_fake,
    is_random,
    observing,
    storage_key,
    suspended,
    version_of,
    without_fake_modes,
)
from pipeworker.worker.stage import rng
from pipeworker.worker.stage.cut.calls import (
    Counting,
    arguments,
    changed_of,
    clear_new,
    descriptions,
    first_uses,
    is_hidden,
    leaves_of,
    line_of_error,
    line_of_the_user,
    may_draw,
    name_of,
    numbers_of,
    reads_metadata,
    tensors_of,
    with_places,
)
from pipeworker.worker.stage.cut.common import CommonVariables
from pipeworker.worker.stage.cut.containers import Contents, effects_since, held_by, restore
from pipeworker.worker.stage.cut.guards import Guards, OuterBuffers, refused
from pipeworker.worker.stage.cut.inner_hooks import Outputs, call_hooks
from pipeworker.worker.stage.cut.isolation import Departures, Isolation, UnitAttributes
from pipeworker.worker.stage.cut.plan import INPUT, CutPlan, Number
from pipeworker.worker.stage.cut.shapes import HollowUnit
from pipeworker.worker.stage.cut.trace import Call, Recording, Trace, is_object
from pipeworker.worker.stage.cut.units import call_of
from pipeworker.worker.stage.values import checksums, replace_tensors
from pipeworker.worker.transport.structure import TypeRegistry, flatten

_NEEDS_NUMBERS = ("DataDependentOutputException", "DynamicOutputShapeException")
"""Names of the exceptions of fake tensors whose numbers are asked for."""
_NO_DATA = ("data is not allocated yet", ".numpy() is not supported for tensor subclasses")
"""Parts of torch's RuntimeErrors for a kernel, as of packed sequences, that reads the numbers, and
for an array of NumPy."""


def needs_numbers(error: Exception) -> bool:
    """Return whether code was refused the numbers of a tensor that has none."""
    return type(error).__name__ in _NEEDS_NUMBERS or any(text in str(error) for text in _NO_DATA)


class Planning:
    """A run that makes a plan; its arguments are as in :class:`Forward`.

    Attributes:
        plan: the plan.
        trace: the calls that depend on parameters.
        described: by layer, descriptions of what its unit returned.
        inside: by place in the trace, the calls within a unit that is called with an object.
        isolation: of the units, while and after the forward runs.
        common: the variables that units share.
        departures: what the modules around the units hold behind each layer.
    """

    def __init__(
        self, types: TypeRegistry, parameters: dict[int, str], common: CommonVariables
    ) -> None:
        self.plan, self.trace = CutPlan(), Trace()
        self.described: list[tuple[Any, ...]] = []
        self.inside: dict[int, list[Call]] = {}
        self._mode = Counting(self.operation)
        self.types, self._parameters = types, parameters
        self._numbers: dict[int, Number] = {}
        self._kept: list[Any] = []
        self._made: dict[Number, int] = {}
        self._used: dict[Number, set[int]] = {}
        self._named: dict[str, set[int]] = {}
        self._passed: dict[int, list[Number]] = {}
        """By the id of each tensor that was returned as it was given, what was made of it."""
        self._input: dict[int, int] = {}
        self._input_until: dict[int, int] = {}
        self._everywhere: set[int] = set()
        self._count = 0
        self._at = 0
        self._storages: dict[int, set[Number]] = {}
        self._changes: list[tuple[int, int, str]] = []
        self.common = common
        self._caught: UsageError | None = None
        """The error to raise if the forward catches an error that a unit has raised."""
        self._unit = ""  # that is called, or was called last when the forward has ended

    def run(
        self, module: nn.Module, units: Mapping[str, HollowUnit], isolation: Isolation, batch: Any
    ) -> CutPlan:
        """Return the plan of a hollow module, whose units call :meth:`call`, for an input."""
        self._units, self.isolation = units, isolation
        own = [one.unit for one in units.values()]
        self._parameters_of = {n: [*map(id, u.unit.parameters())] for n, u in units.items()}
        self._attributes = UnitAttributes({name: one.unit for name, one in units.items()})
        self._guards = Guards(module, own, self._here)
        self._outer = OuterBuffers(module, own)
        self._unused = self._outer.unsaved(self._parameters)
        self.departures = Departures(module, own, self.common)
        self._owned = {
            storage_key(parameter): self._parameters[id(parameter)]
            for parameter in module.parameters()
            if id(parameter) in self._parameters
        }
        leaves, _ = flatten(batch, self.types)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._input = {id(tensor): place for place, tensor in enumerate(tensors)}
        self._kept.append(tensors)
        states = [(version_of(tensor), checksums(tensor)) for tensor in tensors]
        args, kwargs = arguments(batch)
        logger = logging.getLogger(FAKE_LOGGER)
        level = logger.level
        logger.setLevel(logging.CRITICAL)  # a unit that needs numbers gets them
        try:
            functions = self._guards.functions(lambda t: not self._unit and self._depends(t))
            with rng.preserve_generators(), functions, self._mode:
                out = module(*args, **kwargs)
            self.departures.note()
        except Exception as error:
            if self._guards.refusal is not None:
                raise self._guards.refusal from None
            if needs_numbers(error):
                raise self._needs_numbers(error) from error
            layer, unit = self._here()
            count = next((len(tensor) for tensor in tensors if tensor.dim()), 1)
            samples = plural(count, "sample")
            where = (
                f"forward() of model(), in layer {layer} ({unit}), on a micro-batch of {samples} "
                "without numbers,"
            )
            blame.blame_user(where, error, early=True)
        finally:
            logger.setLevel(level)
        if refusal := self._guards.refusal or self._caught:
            raise refusal
        if not self.plan.units:
            raise UsageError(
                "model(): its forward calls no module with parameters, so it is one layer; return "
                "a list of layers with it, nn.Sequential(...)"
            )
        self.plan.counts.append(self._count)
        self._at -= 1
        last, self._unit = self._at, self.plan.units[-1]
        self._use(tensors_of(out))
        self._guards.check_tensors(self._unknown(tensors_of(out)))
        plan = self.plan
        for place, (tensor, before) in enumerate(zip(tensors, states, strict=True)):
            if (version_of(tensor), checksums(tensor)) != before:  # `.data` leaves no version
                plan.touched.append(place)
        for number, layers in sorted(self._used.items()):
            users = sorted({min(layer, last) for layer in layers} | {min(self._made[number], last)})
            if len(users) > 1:
                plan.users[number] = users
        for place in range(len(tensors)):
            until = last if place in self._everywhere else self._input_until.get(place, 0)
            if until:
                plan.users[INPUT, place] = list(range(until + 1))
        plan.parameters = {
            name: sorted({min(layer, last) for layer in layers})
            for name, layers in self._named.items()
        }
        self._check_views()
        self._outer.check(plan.overwritten, lambda buffer: id(buffer) in self._numbers)
        return plan

    def note_attributes(self) -> None:
        """Note the attributes of units that are set, and have no effect on the units."""
        self.plan.attributes.update(path for _, path in self._attributes.changed())

    def _here(self) -> tuple[int, str]:
        """Return the layer that the forward is in, and what messages call it."""
        units = self.plan.units
        between = f"behind {units[-1]}" if units else "before its first unit"
        return self._at, self._unit or between

    def _needs_numbers(self, error: Exception) -> UsageError:
        layer, unit = self._here()
        return UsageError(
            f"layer {layer} ({unit}): the model's forward depends on the numbers of an activation, "
            f"at {line_of_error(error)}: an if, an assertion, item(), numpy(), a distribution "
            "without validate_args=False, a selection by a mask or pack_padded_sequence. A "
            "pipeline cannot cut it there; have a module with parameters of its own or an entry of "
            "an nn.ModuleList do it, which runs as a whole, or cut the model by hand, as a list of "
            "layers"
        )

    @property
    def has_aliases(self) -> bool:
        """Whether a unit has returned a tensor that it was called with."""
        return bool(self._passed)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do one call of a function of torch outside of units."""
        if is_hidden(func):  # TorchScript would hide the error's class
            self._guards.refused(
                "calls a function or a module of TorchScript between its layers",
                "call it within a layer, or use the one in Python",
            )
        tensors = tensors_of((args, kwargs))
        name = name_of(func)
        first = first_uses(func, args, tensors, self._unused)
        self.plan.overwritten += [buffer for buffer, is_whole in first.items() if is_whole]
        tainted = [t for t in tensors if id(t) in self._numbers or id(t) in self._parameters]
        if not tainted:
            with without_fake_modes():
                out = func(*args, **kwargs)
            clear_new(func, out)
            self._guards.check_tensors(tensors)
            if not reads_metadata(func) or tensors_of(out):
                for tensor in tensors:
                    if id(tensor) in self._input:
                        self._everywhere.add(self._input[id(tensor)])
                self._guards.check_buffers(tensors)
            return out
        self._guards.check_tensors(self._unknown(tensors))
        parameter = self._parameters.get(id(tensors[0]), "")
        self._guards.tainted(name, tensors, parameter)
        if name == "register_hook":
            self._check_hooked(tainted)
            self._guards.check_held(args, self._numbers)
        self._use(tensors)
        if not reads_metadata(func):
            leaves = [*leaves_of(args), *leaves_of(kwargs)]
            self._guards.check_state(leaves)
            self.trace.add(name, leaves, self._numbers, self._parameters)
        changed = changed_of(name, args, kwargs)
        if isinstance(changed, torch.Tensor):
            if not any(changed is t for t in tainted):
                self._guards.filled(changed, resizes="out" in kwargs and not changed.numel())
                places = [place for place, t in enumerate(tensors) if t is changed]
                self.plan.changed[self._count] = places[:1]
                self._number([changed])
                return None if name == "__setitem__" else changed
            self._note_change(changed)
        elif changed is not None:  # the tensors of a list, as torch._foreach_mul_ changes them
            for tensor in tensors_of(changed):
                self._note_change(tensor)
        before = [version_of(tensor) for tensor in tensors]
        draws: list[Any] = []
        written: list[torch.Tensor] = []

        def note(called: Any, *given: Any) -> None:
            draws.extend([called] if is_random(called) else [])
            written.extend(changed_by(called, *given[:2]))

        placed = with_places(name, args)
        if placed is not args:  # each stage needs the mask, to know how many it selects
            self._everywhere.update(self._input[id(t)] for t in tensors if id(t) in self._input)
        with observing(note):
            out = func(*placed, **kwargs)
        changes = {id(t) for t, was in zip(tensors, before, strict=True) if version_of(t) != was}
        known = [t for t in tainted if id(t) in self._numbers or id(t) in changes]
        self._guards.check_changed(name, written, known)
        if draws or may_draw(name):
            self.plan.random.add(self._count)
        elif not (
            changed is not None
            or tensors_of(out)
            or reads_metadata(func)
            or any(map(is_fake, tainted))
        ):
            raise self._guards.refused(
                "depends on the numbers of a buffer that is saved",
                "register it with persistent=False, or move the code into a module with parameters",
            )
        for tensor, version in zip(tensors, before, strict=True):
            if version_of(tensor) != version and tensor is not changed:
                self._note_change(tensor)
        made = tensors_of(out)
        passed = {} if changed is not None else self._aliases(made)
        if made:
            self._number(made)
        return replace_tensors(out, passed)

    def _depends(self, tensors: Sequence[torch.Tensor]) -> bool:
        return any(id(t) in self._numbers or id(t) in self._parameters for t in tensors)

    def _unknown(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the fake tensors that no counted call, and no unit, has returned."""
        return [
            tensor
            for tensor in tensors
            if is_fake(tensor)
            and id(tensor) not in self._numbers
            and id(tensor) not in self._parameters
        ]

    def _check_hooked(self, tensors: Sequence[torch.Tensor]) -> None:
        """Reject a hook on the gradient of a value that earlier layers have used already."""
        for number in numbers_of(tensors, self._numbers):
            used = self._used.get(number, set())
            if any(self._made[number] <= layer < self._at for layer in used):
                raise self._guards.refused(
                    "registers a hook on a tensor that an earlier layer has used",
                    "register it directly behind the module that makes the tensor",
                )

    def _use(self, tensors: Sequence[torch.Tensor]) -> None:
        for number in numbers_of(tensors, self._numbers):
            self._used.setdefault(number, set()).add(self._at)
        for tensor in tensors:
            key = id(tensor)
            self.plan.apart.update(self._passed.get(key, ()))
            if key in self._parameters:
                self._named.setdefault(self._parameters[key], set()).add(self._at)
            elif key in self._input:
                self._input_until[self._input[key]] = self._at

    def _number(self, tensors: Sequence[torch.Tensor]) -> None:
        count, self._count = self._count, self._count + 1
        for place, tensor in enumerate(tensors):
            key = id(tensor)
            if key in self._parameters:
                continue
            if key in self._numbers:
                self.plan.same[count, place] = self._numbers[key]
                continue
            number = self._numbers[key] = (count, place)
            self._made[number] = self._at
            self._kept.append(tensor)
            if is_fake(tensor):
                self._storages.setdefault(storage_key(tensor), set()).add(number)

    def _note_change(self, tensor: torch.Tensor) -> None:
        if name := self._owned.get(storage_key(tensor)):
            raise self._guards.refused(
                f"changes the parameter {name!r}, of which each stage that uses it has a copy",
                "change it in the optimizer's step(), or within the module that it belongs to",
            )
        number = self._numbers.get(id(tensor))
        if number is not None and is_fake(tensor):
            self._changes.append((storage_key(tensor), self._at, line_of_the_user()))

    def _check_views(self) -> None:
        """Reject changes in place of memory that two values share, of which one passes a cut."""
        for storage, layer, line in self._changes:
            crossing = [
                number
                for number in self._storages.get(storage, ())
                if self._made[number] < layer <= max(self._used.get(number, {-1}))
            ]
            if len(crossing) > 1:  # they arrive as tensors that share no memory
                raise UsageError(
                    f"layer {layer} ({self.plan.units[min(layer, self._at)]}): the model's "
                    f"forward changes a tensor in place at {line}, of which another layer has "
                    "a view, so the two cannot be on different stages; change a copy there, "
                    "or cut the model by hand, as a list of layers"
                )

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Do the call of a unit, which ends a layer."""
        if self._unit:  # a module that is a unit, and is called within another one
            with self._units[name].itself() as unit:
                return call_of(unit)(*args, **kwargs)
        with suspended(self._mode):
            self._unit = name
            try:
                return self._call(name, args, kwargs)
            except Exception as error:
                what = f"catches the {type(error).__name__} that a unit raises"
                caught = refused(*self._here(), what, "call it with what it takes")
                self._caught = self._caught or caught
                raise
            finally:
                self._unit = ""

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self._units[name].unit
        if [*map(id, unit.parameters())] != self._parameters_of[name]:
            raise self._guards.refused("replaces the parameters of a unit", "do it within a unit")
        self._guards.check_context()
        self._guards.check_transform()
        leaves = leaves_of((args, kwargs))
        if any(isinstance(leaf, nn.Module) for leaf in leaves):
            raise self._guards.refused("calls a unit with a module", "have the unit own the module")
        self._guards.check_state(leaves)
        given = tensors_of((args, kwargs))
        self._guards.check_tensors(self._unknown(given))
        self.trace.add(name, leaves, self._numbers, self._parameters)
        gets_object = any(map(is_object, leaves))
        held = held_by(args, kwargs)
        inside = [*tensors_of((args, kwargs)), *tensors_of([before for _, before in held])]
        self._use(inside)
        before = {id(tensor): version_of(tensor) for tensor in inside}
        out, outputs = self._called(name, args, kwargs, held, gets_object, set(before))
        for tensor in inside:
            if version_of(tensor) != before[id(tensor)]:
                self._note_change(tensor)
        whole = out, effects_since(held), [value for _, value in outputs]
        leaves, structure = flatten(whole, self.types)
        self.described.append(descriptions(leaves, name))
        self.plan.units.append(name)
        self.plan.classes.append(type(unit).__name__)
        self.plan.structures.append(structure)
        self.plan.hooked.append([inner for inner, _ in outputs])
        returned = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        passed = {} if held else self._aliases(returned)
        self._number(returned)
        self.plan.counts.append(self._count)
        self._at += 1
        call_hooks(unit, outputs)
        self.departures.note()
        return replace_tensors(out, passed)

    def _aliases(self, returned: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return, by id, aliases of what a unit or a function of torch returns as it was given it.

        They show whether the forward uses what was returned, or what was given.
        """
        aliases: dict[int, torch.Tensor] = {}
        for place, tensor in enumerate(returned):
            if is_fake(tensor) and (number := self._numbers.get(id(tensor))):
                with torch.enable_grad():  # else a change in place of the alias is an error
                    alias = aliases.setdefault(id(tensor), alias_of(tensor))
                self._numbers[id(alias)] = number
                self._kept.append(alias)
                self._passed.setdefault(id(tensor), []).append((self._count, place))
        return aliases

    def _called(
        self, name: str, args: Any, kwargs: Any, held: Contents, gets_object: bool, given: set[int]
    ) -> tuple[Any, Outputs]:
        """Call a unit; reject that others have changed it so that its call differs."""
        unit, recording, expected = self._units[name], Recording(), None
        changed = self.isolation.changed(name, unit.unit)
        common = self.common.first_changed()
        if is_suspect := changed is not None or common is not None:
            with suppress(Exception), self.common.unchanged():  # it needs what others set
                expected = self.isolation.calls_of_fresh(name, args, kwargs)
            restore(held)
            self.note_attributes()
        place = len(self.trace.calls) - 1
        with recording if is_suspect or gets_object else nullcontext(), self.common.noting():
            made = unit.call(args, kwargs)
        if gets_object:
            self.inside[place] = recording.trace.calls
            if (self._numbers.keys() & recording.used.keys()) - given:
                what = "calls a unit with an object that holds an activation, which the unit uses"
                raise self._guards.refused(what, "pass it as an argument of its own")
        if is_suspect and recording.trace.calls != expected:
            what = f"sets {changed!r} of {name}, which has an object of its own on each stage"
            if changed is None:
                what = f"sets {common}, which each stage has for itself"
            raise self._guards.refused(f"or another layer {what}", "pass the value as an argument")
        self.isolation.note_call(name, unit.unit, self.common.last)
        return made
