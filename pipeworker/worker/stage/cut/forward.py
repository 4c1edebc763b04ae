"""A run of a module's own forward, of which one stage computes its layers and no others.

The module that runs is a hollow one: its parameters are fake tensors. Each call of a unit ends a
layer; what the forward does between units belongs to the layer whose unit is called next. A run of
the layers ``first`` to ``stop - 1``

- repeats the forward before them on stand-ins: units give fake tensors of the shapes that arrived,
  and what depends on the module's input alone, as masks and positions, is computed;
- from then on replaces each stand-in by the tensor that arrived under its number, and computes;
- is left by an exception behind the last unit, and sends on what later layers need.

Values get their numbers by counting the calls of torch's functions outside of units that have an
argument which depends on parameters, so every operation is done once, in a fixed layer, and results
do not depend on the number of stages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgpack
import torch

from pipeworker.errors import UsageError
from pipeworker.worker.internals import is_fake, suspended, version_of, without_fake_modes
from pipeworker.worker.stage import rng
from pipeworker.worker.stage.cut.calls import (
    Counting,
    arguments,
    changed_of,
    descriptions,
    first_uses,
    is_in_place,
    key_of,
    leaves_of,
    line_of_error,
    line_of_the_user,
    name_of,
    reads_metadata,
    tensors_of,
    with_places,
)
from pipeworker.worker.stage.cut.containers import (
    Changed,
    effects_since,
    exchange,
    held_by,
    put_back,
    repeat,
)
from pipeworker.worker.stage.cut.inner_hooks import call_hooks, outputs_within
from pipeworker.worker.stage.cut.plan import INPUT, CutPlan, Number, skip_name
from pipeworker.worker.stage.cut.units import stand_in
from pipeworker.worker.stage.skips import pop, stash
from pipeworker.worker.stage.values import replace_tensors
from pipeworker.worker.transport.structure import TypeRegistry, decode, flatten, unflatten

if TYPE_CHECKING:
    from pipeworker.worker.stage.cut.part import Part

StandIns = dict[Any, Any]
"""Stand-ins for what units return, by layer and description; for what calls make, by those."""
_MOST_KNOWN = 64
"""The number of descriptions by layer whose stand-ins are kept: one for each length of a text."""
Enter = Callable[[int], None]
"""Called as a layer begins, with its index."""
Leave = Callable[[int, Any], Any]
"""Called as a layer ends, with its index and what its unit returned; returns what replaces that."""


class Left(BaseException):
    """Leaves a forward whose remainder other stages compute."""


class Forward:
    """One run of the layers `first` to before `stop`.

    Args:
        types: the classes that may occur in its values.
        parameters: the names of the hollow module's parameters, by id.
        device: where stand-ins seem to be.
        parts: the layers, which have the units, and the parameters that are used outside of them.
        calls: what is called in place of each unit.
        known: stand-ins of earlier runs, which are used again.
        enter: called as each layer begins.
        leave: called as each layer ends.
    """

    def __init__(
        self,
        plan: CutPlan,
        types: TypeRegistry,
        parameters: dict[int, str],
        device: torch.device,
        first: int,
        parts: Sequence[Part],
        calls: Sequence[Callable[..., Any]],
        known: StandIns,
        enter: Enter | None = None,
        leave: Leave | None = None,
    ) -> None:
        self._plan, self._types, self._parameters, self._device = plan, types, parameters, device
        self.first, self.stop = first, first + len(calls)
        self._calls, self._enter, self._leave = calls, enter, leave
        self._parts, self._known = parts, known
        self._is_training = not parts or parts[0].training
        units = [one.unit for one in parts]
        own = [t for unit in units for t in (*unit.parameters(), *unit.buffers())]
        self._has_fake_weights = any(map(is_fake, own))
        self._mode = Counting(self.operation)
        self._layer = 0  # whose unit is called next
        self._count = 0
        self._numbers: dict[int, Number] = {}
        """By the id of each tensor that depends on parameters."""
        self._kept: dict[int, Any] = {}
        """Stand-ins, and weak references to other tensors, by id: so an id stays unique."""
        self._absent: set[int] = set()
        """The ids of stand-ins."""
        self._unneeded: set[int] = set()
        """The ids of stand-ins for tensors of the input, of which only shapes are needed here."""
        self._arrived: dict[Number, torch.Tensor] = {}
        self._versions: dict[Number, int] = {}
        """The versions of the tensors of the input as they arrived."""
        self._present: dict[int, torch.Tensor] = {}
        """The arrived tensors, by the ids of their stand-ins."""
        self._made: dict[Number, torch.Tensor] = {}
        """The tensors made here that later stages need."""
        self._described: list[tuple[Any, ...]] = []
        """By layer, descriptions of what its unit returned and put into containers."""

    # What arrives, and what is sent on.

    def begin(self, value: Any) -> Any:
        """Return the module's input, of what arrives at the first layer."""
        if self.first == 0:
            leaves, structure = flatten(value, self._types)
            self._input = structure, descriptions(leaves, "the input")
            for place, tensor in enumerate(t for t in leaves if isinstance(t, torch.Tensor)):
                self._arrive((INPUT, place), tensor)
            return self._untouched(leaves, structure) if self._plan.touched else value
        packed, *tensors = value
        structure, described, *self._described = msgpack.unpackb(packed, use_list=False)
        self._input = structure, described
        tensors = iter(tensors)
        for number, source, target in self._plan.crossing(self.first):
            if source == self.first - 1 and target == self.first:
                self._arrive(number, next(tensors))
            elif target < self.stop:
                self._arrive(number, pop(skip_name(number, target)))
        return self._untouched(self._leaves(INPUT, described), structure)

    def _arrive(self, number: Number, tensor: torch.Tensor) -> None:
        self._arrived[number] = tensor
        if number[0] == INPUT:
            self._versions[number] = version_of(tensor)

    def _untouched(self, leaves: list[Any], structure: Any) -> Any:
        """Return the module's input; what its forward changes is a copy.

        Later stages need it as it was.
        """
        place = 0
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                arrived = self._arrived.get((INPUT, place), leaf)
                if arrived is leaf:
                    self._unneeded.add(id(leaf))
                leaves[index] = arrived.clone() if place in self._plan.touched else arrived
                place += 1
        return unflatten(structure, iter(leaves), self._types)

    def end(self) -> Any:
        """Return what the layer behind the last one gets; stash what later layers need."""
        tensors = []
        for number, source, target in self._plan.crossing(self.stop):
            if source < self.first:
                continue
            tensor = self._made.get(number, self._arrived.get(number))
            if tensor is None:
                lacking = "its input" if number[0] == INPUT else self._plan.units[number[0]]
                reason = f"{lacking} lacks a tensor that later layers need"
                raise self._elsewhere(reason, in_forward=False)
            if self._versions.get(number, -1) not in (-1, version_of(tensor)):
                # Later stages would repeat the change.
                reason = "it changes a tensor of its input in place, and did not then"
                raise self._elsewhere(reason, in_forward=False)
            if target == self.stop and source == self.stop - 1:
                tensors.append(tensor)
            else:
                stash(skip_name(number, target), tensor)
        return (msgpack.packb([*self._input, *self._described]), *tensors)

    def _leaves(self, layer: int, described: tuple[Any, ...]) -> list[Any]:
        """Return the leaves of what the unit of a layer returned, with stand-ins for tensors."""
        found = self._known.get((layer, described))
        if found is None:
            found = [self._leaf(one) for one in described]
            self._remember((layer, described), found)
        return [*found]

    def _leaf(self, described: Any) -> Any:
        if isinstance(described, tuple) and len(described) == 4:
            shape, name, wants_grad, stride = described
            dtype = getattr(torch, name)
            return stand_in(shape, dtype, self._device, stride, wants_grad=wants_grad)
        return decode(described, self._types)

    # Outside of units.

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do one call of a function of torch outside of units."""
        leaves = [*leaves_of(args), *leaves_of(kwargs)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for buffer, is_overwritten in first_uses(func, args, tensors, self._unused).items():
            if not is_overwritten:
                raise self._elsewhere(f"it uses the buffer {buffer!r} before it overwrites it")
        for tensor in tensors:
            if id(tensor) in self._of_units and not reads_metadata(func):
                name = self._of_units[id(tensor)]
                raise self._elsewhere(f"it uses the buffer {name!r} of a unit, and did not then")
        if not self._depends(tensors):
            if any(is_fake(t) and id(t) not in self._unneeded for t in tensors):
                raise self._elsewhere("it uses a tensor of an earlier micro-batch")
            with without_fake_modes():
                return func(*args, **kwargs)
        changed = changed_of(name_of(func), args, kwargs)
        fills = self._count in self._plan.changed and changed is not None
        fills = fills and not self._depends(tensors_of(changed))
        if self._layer < self.first:
            if fills:  # from now on the tensor is a stand-in itself
                self._change(tensors)
                return None if name_of(func) == "__setitem__" else changed
            if is_in_place(name_of(func)) and id(args[0]) in self._absent:
                if name_of(func) == "__setitem__":  # a stand-in is used again: it does not change
                    return None
                self._number([args[0]])
                return args[0]
            args = with_places(name_of(func), args)
            out = self._again(func, args, kwargs, [*leaves_of(args), *leaves_of(kwargs)])
            if made := tensors_of(out):
                self._number(made)
            return out
        args, kwargs = replace_tensors((args, kwargs), self._replacements(tensors))
        if self._count in self._plan.random:  # earlier stages do not draw these numbers
            with rng.apart(self._count, rng.accelerator_generator(self._device)):
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if fills:
            self._change(tensors)
        elif made := tensors_of(out):
            self._number(made)
        return out

    def _again(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> Any:
        """Return what a call makes of stand-ins: the same as of the same stand-ins before."""
        lasting = (self._absent, self._parameters)
        key = self._count, func, *(key_of(leaf, lasting) for leaf in leaves)
        try:
            found = self._known.get(key)
        except TypeError:  # an argument has no hash
            return func(*args, **kwargs)
        if found is None:
            found = func(*args, **kwargs)
            if tensors_of(found):
                self._remember(key, found)
        return found

    def _remember(self, key: Any, value: Any) -> None:
        if len(self._known) > _MOST_KNOWN * self._plan.counts[-1]:
            self._known.clear()
        self._known[key] = value

    def _depends(self, tensors: Sequence[torch.Tensor]) -> bool:
        return any(id(t) in self._numbers or id(t) in self._parameters for t in tensors)

    def _change(self, tensors: list[torch.Tensor]) -> None:
        self._number([tensors[place] for place in self._plan.changed[self._count]])

    def _exchanged(self, value: Any, changed: Changed) -> Any:
        """Replace stand-ins and hollow parameters, in containers in place, as `changed` notes."""
        held = [before for _, before in held_by((value,), {})]
        return exchange(value, self._replacements(tensors_of((value, held))), changed)

    def _replacements(self, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return what is here of stand-ins and hollow parameters, by their ids."""
        replaced: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            key = id(tensor)
            if key in self._absent:
                if key not in self._present:
                    raise self._elsewhere("it needs a value that the plan did not send")
                replaced[key] = self._present[key]
            elif key in self._parameters:
                layer, name = min(self._layer, len(self._plan) - 1), self._parameters[key]
                if layer not in self._plan.parameters.get(name, ()):
                    raise self._elsewhere(f"it uses {name}, and did not then")
                replaced[key] = self._parts[layer - self.first].parameter(name)
        return replaced

    def _number(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give numbers to what a call that depends on parameters has made."""
        count, self._count = self._count, self._count + 1
        for place, tensor in enumerate(tensors):
            key = id(tensor)
            if key in self._parameters:
                continue
            number = self._plan.same.get((count, place), (count, place))
            is_here = self._layer >= self.first
            users = self._plan.users.get(number)
            if not is_here:
                self._numbers[key], self._kept[key] = number, tensor
                self._absent.add(key)
                if number in self._arrived:
                    self._present[key] = self._arrived[number]
                continue
            known = self._numbers.get(key) == number or tensor is self._arrived.get(number)
            is_apart = (count, place) in self._plan.apart and not known
            if is_apart and self._count in self._plan.counts[:-1]:  # of a unit
                unit = self._plan.units[self._layer]
                raise self._elsewhere(
                    f"{unit} returns a new tensor, and returned then what it was called with, "
                    "which is used again; have it return x.view_as(x) in place of x"
                )
            if key not in self._numbers:
                self._keep(tensor, number)
            if users is not None and users[-1] >= self.stop:
                before = self._made.get(number, self._arrived.get(number, tensor))
                if before.dtype is not tensor.dtype:
                    raise self._elsewhere("a cast makes a tensor, and returned its argument then")
                if is_apart:  # gradients of the two would be added up in another order
                    raise self._elsewhere("a call makes a tensor, and returned its argument then")
                self._made[number] = tensor

    def _keep(self, tensor: torch.Tensor, number: Number) -> None:
        key = id(tensor)
        self._numbers[key] = number
        self._kept[key] = weakref.ref(tensor, partial(self._forget, key))

    def _forget(self, key: int, _: Any) -> None:
        self._numbers.pop(key, None)
        self._kept.pop(key, None)

    # Units.

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Do the call of a unit, which ends a layer."""
        with suspended(self._mode):
            return self._call(name, args, kwargs)

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._has_left:
            raise Left
        layer = self._layer
        if layer >= len(self._plan) or self._plan.units[layer] != name:
            expected = self._plan.units[layer] if layer < len(self._plan) else "none"
            raise self._elsewhere(f"it calls {name}, and called {expected} then")
        if layer < self.first:
            out = self._passed(layer, args, kwargs)
        else:
            out = self._called(layer, args, kwargs)
        self._check_count(layer, f"up to {name}")
        self._layer += 1
        if self._has_left:
            raise Left
        self._begin_layer()
        return out

    @property
    def _has_left(self) -> bool:
        """Whether the forward has been left; code in it may have caught that exception."""
        return self._layer == self.stop < len(self._plan)

    def _check_count(self, place: int, where: str) -> None:
        """Check the number of calls until now, `where`, with that at a place of the plan."""
        expected = self._plan.counts[place]
        if self._count != expected:
            raise self._elsewhere(f"it has {self._count} operations {where}, and had {expected}")

    def _begin_layer(self) -> None:
        layer = self._layer
        if self._enter is not None and layer < self.stop:
            self._enter(layer)

    def _passed(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return stand-ins for what a unit on an earlier stage returned."""
        leaves = self._leaves(layer, self._described[layer])
        structure = self._plan.structures[layer]
        out, effects, outputs = unflatten(structure, iter(leaves), self._types)
        self._number([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        if effects:
            repeat(held_by(args, kwargs), effects)
        self._call_hooks(layer, outputs)
        return out

    def _call_hooks(self, layer: int, outputs: Sequence[Any]) -> None:
        if outputs:
            unit = self._module.get_submodule(self._plan.units[layer])
            call_hooks(unit, list(zip(self._plan.hooked[layer], outputs, strict=True)))

    def _called(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed: Changed = []
        args, kwargs = self._exchanged((args, kwargs), changed)
        held = held_by(args, kwargs)
        call, hooked = self._calls[layer - self.first], self._plan.hooked[layer]
        if hooked:
            with outputs_within(self._parts[layer - self.first].unit, sorted({*hooked})) as outputs:
                out = call(*args, **kwargs)
        else:
            out, outputs = call(*args, **kwargs), []
        effects = effects_since(held)
        put_back(changed)
        if self._leave is not None:
            out = self._replaced(out, self._leave(layer, out))
        whole = out, effects, [value for _, value in outputs]
        leaves, structure = flatten(whole, self._types)
        if structure != self._plan.structures[layer]:
            raise self._elsewhere(f"{self._plan.units[layer]} returns another structure")
        self._described.append(descriptions(leaves, self._plan.units[layer]))
        if not self._has_fake_weights and any(is_fake(t) for t in leaves if torch.is_tensor(t)):
            raise self._elsewhere(f"{self._plan.units[layer]} got a value that is elsewhere")
        self._number([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        self._call_hooks(layer, whole[2])
        return out

    def _replaced(self, value: Any, by: Any) -> Any:
        """Return what replaces a value, with the numbers of the tensors that are known."""
        for old, new in zip(tensors_of(value), tensors_of(by), strict=True):
            if new is not old:
                arrived = (number for number, one in self._arrived.items() if one is old)
                if (number := self._numbers.get(id(old), next(arrived, None))) is not None:
                    self._keep(new, number)
        return by

    def run(
        self, module: torch.nn.Module, value: Any, of_units: Mapping[int, str] | None = None
    ) -> Any:
        """Run the layers; return what the next layer gets, or the module's output.

        `of_units` has the names of the buffers within units, by id, which the forward may not use.
        """
        self._module, self._of_units = module, of_units or {}
        self._unused = {id(module.get_buffer(name)): name for name in self._plan.overwritten}
        batch = self.begin(value)
        self._begin_layer()
        args, kwargs = arguments(batch)
        try:
            # A stage may leave where the forward has disabled gradients, and would enable them.
            with torch.set_grad_enabled(torch.is_grad_enabled()), self._mode:
                out = module(*args, **kwargs)
                if self._layer >= self.stop == len(self._plan):
                    self._check_count(self._layer, "in all")
                    out = self._exchanged(out, [])
                    if not self._has_fake_weights and any(map(is_fake, tensors_of(out))):
                        raise self._elsewhere("its output has a value that is elsewhere")
        except Left:
            pass
        except Exception as error:
            if not self._has_left:
                raise
            unit = self._plan.units[self._layer - 1]
            raise UsageError(
                f"layer {self._layer - 1} ({unit}): the model's forward catches the exception by "
                f"which a stage that ends there leaves it, and fails at {line_of_error(error)} "
                f"with {type(error).__name__}: {error}; have it catch Exception, not all "
                "exceptions (a bare `except`, `except BaseException`)"
            ) from error
        if self._layer < min(self.stop, len(self._plan)):
            raise self._elsewhere("it ends early", in_forward=False)
        return self.end() if self.stop < len(self._plan) else out

    def _elsewhere(self, reason: str, *, in_forward: bool = True) -> UsageError:
        layer = min(self._layer, len(self._plan) - 1)
        at = f", at {line_of_the_user()}" if in_forward else ""
        mode, remedy = "", "cut the model by hand, as a list of layers"
        if not self._is_training:
            mode = ", in eval mode"
            remedy = (
                "have a module with parameters of its own, or an entry of an nn.ModuleList, do "
                f"what depends on `self.training`, or {remedy}"
            )
        return UsageError(
            f"layer {layer} ({self._plan.units[layer]}): the model's forward takes another way "
            f"than when it was cut{mode}{at}: {reason}. A pipeline needs a forward that calls the "
            f"same modules, with the same operations between them, each time; {remedy}"
        )
