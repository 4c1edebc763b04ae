"""Buffers of layers during recompute: a second forward must equal the first, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeworker.worker.internals import BatchNorm, buffers_of, submodules_of, version_of
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.slots import (
    ABSENT,
    OF_EVERY_MODULE,
    Copies,
    PlainValues,
    Slot,
    copy_of,
    get_slot,
    is_same,
    is_small,
    plain_values,
    set_slot,
)

_state = threading.local()
_get = partial(get_slot, absent=ABSENT)


def is_recomputing() -> bool:
    """Return whether the forward that calls this is the recompute of its micro-batch.

    Layers that count, log or cache need it. It is False in the first forward, in evaluation and
    outside of pipeworker. It must not change what the layer computes. torchgpipe offers the same.
    """
    return getattr(_state, "recomputing", False)


def set_recomputing(*, value: bool) -> None:
    """Set what :func:`is_recomputing` returns in this thread."""
    _state.recomputing = value


class Buffers:
    """The buffers of a stage, as batch-norm statistics: a recompute must not change them again.

    The very first forward finds out which buffers change; from then on only those and the small
    ones are copied before each forward that will be repeated. One copy of each other buffer is
    kept, because a forward may begin to change it later.

    Tensors in plain attributes, as a cache or what a layer keeps for its next forward, are treated
    as buffers, also those that a later forward is the first to assign. So are the numbers that a
    module has beside them, because they may decide whether a forward makes a cached tensor again. A
    parameter in an attribute is that of another module: optimizers change it, and forwards do not.

    Other numbers and flags that the very first forward has changed, as a counter, are not those of
    the first forward in a recompute, because a layer may do something once that they note, as to
    register a hook. But the recompute's changes of them are undone before the next forward: the
    backward may read what its own forward has set.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = nn.ModuleList(layers)
        self._modules = self._all_modules()
        self._slots: list[Slot] = []
        self._changing: list[Slot] | None = None
        self._unchanged: dict[Slot, _Copied] = {}
        self._beside: dict[nn.Module, PlainValues] = {}
        """The plain values of modules whose tensors may begin to change, before the mini-batch."""
        self._until: dict[Slot, Any] = {}
        """Values of buffers that began to change later, from before their first change."""
        self._counters: list[Slot] = []
        """Plain values that a recompute may find advanced, and must not advance."""
        self._around_recompute: list[tuple[Slot, Any, Any]] = []
        """The values of these before and after the last recompute, until its changes are undone."""
        self._known: list[tuple[nn.Module, dict[str, Any], set[str]]] = []
        """The attributes of each module, and their names after the last forward."""
        self._empty: list[tuple[Slot, dict[str, Any], Any]] = []
        """The attributes that are None or 0, all attributes of their modules, and the values."""
        self._waiting = 0

    def _all_modules(self) -> list[nn.Module]:
        return [*self._layers.modules()]  # each once

    def begin(self) -> None:
        """Start a mini-batch: no forward waits for its recompute."""
        self._waiting = 0

    def end(self) -> None:
        """End a mini-batch."""
        self._undo()

    def _undo(self) -> None:
        """Undo what the last recompute has counted, and not what a hook of its backward has.

        Such a hook lowers a counter that the forward has raised, or sets another value, as 0.
        """
        for slot, before, after in self._around_recompute:
            now = _get(slot)
            if now is after or (type(now) is type(after) and now == after):
                set_slot(slot, before)
            elif now and type(now) in (int, float) and type(now) is type(after) is type(before):
                set_slot(slot, before + now - after)
        self._around_recompute = []

    @contextmanager
    def first_forward(self, mb: MicroBatch) -> Iterator[None]:
        """Keep the values from which the forward inside the context starts."""
        self._undo()
        copies: Copies = {}
        if self._waiting:
            self._keep_changed()  # by a forward that keeps its graph
        elif self._changing is not None:  # by code outside of forward
            for slot in self._changed():
                self._unchanged[slot] = _Copied(slot, copy_of(_get(slot), copies))
            appeared = [slot for slot, _ in self._appeared()]
            for module in self._beside.keys() & {module for module, _ in appeared}:
                appeared += [(module, name) for name in plain_values(self._beside.pop(module).all)]
            self._changing += appeared
            for beside in self._beside.values():
                beside.update()
        slots, attributes = self._changing, {}
        if slots is None:
            self._modules = self._all_modules()
            # A module of torch.jit.script has no dict to iterate over.
            slots = [(m, name) for m in self._modules for name, _ in buffers_of(m).items()]
            self._slots, attributes = slots, self._attributes(copies)
        mb.buffers_before = [(slot, copy_of(_get(slot), copies)) for slot in slots]
        yield
        if self._changing is None:
            new = [*self._new_attributes(attributes), *self._new_buffers()]
            known, self._modules = {*self._modules}, self._all_modules()
            new += self._of_new(module for module in self._modules if module not in known)
            # By value: batch norm changes its statistics without a trace in their version. All of
            # them, because the mean of zeros is the first one again.
            changed = {slot for slot, value in mb.buffers_before if not is_same(_get(slot), value)}
            norms = {module for module, _ in changed if isinstance(module, BatchNorm)}
            mb.buffers_before = [
                (slot, value)
                for slot, value in mb.buffers_before
                if slot in changed
                or slot[0] in norms
                or (isinstance(now := _get(slot), torch.Tensor) and is_small(slot, now))
            ]
            # A buffer that was None now exists, and is hardly ever created again. But it may be
            # another one, which changes.
            tensors = {id(_get(slot)) for slot, value in mb.buffers_before if value is not None}
            self._changing = [
                slot
                for slot, value in mb.buffers_before
                if value is not None or id(_get(slot)) in tensors
            ]
            old_values = self._old_values(attributes)
            modules = {slot[0] for slot, _ in mb.buffers_before + new}
            new += [
                (slot, old)
                for slot, value, old in old_values
                if (slot[0] in modules and _keeps_beside_tensors(slot))
                or (type(value) is tuple and value is not old)  # as a hidden state
            ]
            mb.buffers_before += new
            self._changing += [slot for slot, _ in new]
            changing = {*self._changing}
            self._counters = [
                slot
                for slot, value, old in old_values
                if slot not in changing and (type(value) is not type(old) or value != old)
            ]
            copies = {}
            for slot in self._slots:
                if slot not in changing:
                    self._unchanged[slot] = _Copied(slot, copy_of(_get(slot), copies))
            self._watch_attributes(changing, copies)
            self._watch_plain_values({slot[0] for slot in self._changing})
        self._keep_changed()
        self._waiting += 1
        mb.buffers_before = mb.buffers_before or None

    def _keep_changed(self) -> None:
        """Keep the old values of what has begun to change."""
        assert self._changing is not None
        known = len(self._changing)
        for slot in self._changed():
            self._until[slot] = self._unchanged.pop(slot).copy
            self._changing.append(slot)
        for slot, before in self._appeared():
            self._until[slot] = before
            self._changing.append(slot)
        for module in self._beside.keys() & {module for module, _ in self._changing[known:]}:
            before = self._beside.pop(module).values
            were = {name for name, value in before.items() if value is not None}
            for name in were | plain_values(vars(module)).keys():
                if (module, name) not in self._until:
                    self._until[module, name] = before.get(name, ABSENT)
                    self._changing.append((module, name))

    def _watch_attributes(self, changing: Collection[Slot], copies: Copies) -> None:
        """Note the attributes that later forwards may set or change, beside those that change.

        They are None, 0, absent, or tensors.
        """
        self._known = [(module, vars(module), {*vars(module)}) for module in self._modules]
        for module, attributes, names in self._known:
            for name in names - OF_EVERY_MODULE:
                slot, value = (module, name), attributes[name]
                is_state = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
                if value is None or (type(value) in (int, float) and not value):
                    self._empty.append((slot, attributes, value))
                elif is_state and slot not in changing:
                    self._unchanged[slot] = _Copied(slot, copy_of(value, copies))
        self._watch_new(self._modules)

    def _watch_plain_values(self, done: Collection[nn.Module]) -> None:
        """Note the plain values of modules whose tensors may begin to change, except of `done`."""
        slots = [*self._unchanged, *(slot for slot, *_ in self._empty)]
        modules = {module for module, _ in slots if module not in done}
        self._beside = {m: PlainValues(vars(m)) for m in modules if not isinstance(m, BatchNorm)}

    def _watch_new(self, modules: Sequence[nn.Module]) -> None:
        """Note the buffers and modules within modules, to which a forward may add others."""
        both = [(m, held) for m in modules for held in (buffers_of(m), submodules_of(m))]
        self._known += [(m, held, {*held}) for m, held in both if isinstance(held, dict)]

    def _of_new(self, modules: Iterable[nn.Module]) -> list[tuple[Slot, Any]]:
        """Return the buffers of modules that a forward has made, with copies of them.

        A recompute finds these modules, and must not change their buffers again.
        """
        return [
            ((module, name), copy_of(value, {}))
            for module in modules
            for name, value in buffers_of(module).items()
        ]

    def _appeared(self) -> list[tuple[Slot, Any]]:
        """Return the attributes and buffers that are tensors by now, and what they were.

        They were empty or absent. Those of a module that a forward has made are returned as copies.
        """
        made: list[nn.Module] = []
        found = [
            (slot, value)
            for slot, attributes, value in self._empty
            if isinstance(attributes.get(slot[1]), torch.Tensor)
        ]
        if found:
            known = {slot for slot, _ in found}
            self._empty = [one for one in self._empty if one[0] not in known]
        for module, attributes, names in self._known:
            if len(attributes) != len(names):
                new = attributes.keys() - names
                names |= new
                found += [
                    ((module, name), ABSENT)
                    for name in new
                    if isinstance(attributes[name], torch.Tensor)
                ]
                modules = [attributes[name] for name in new]
                made += [one for one in modules if isinstance(one, nn.Module)]
        if made:
            new_modules = [*dict.fromkeys(one for module in made for one in module.modules())]
            self._watch_new(new_modules)
            found += self._of_new(new_modules)
        return found

    def _attributes(self, copies: Copies) -> dict[Slot, tuple[Any, Any]]:
        """Return the attributes of all modules; of those that are tensors, copies too."""
        return {
            (module, name): (
                value,
                copy_of(value, copies) if isinstance(value, torch.Tensor) else value,
            )
            for module in self._modules
            for name, value in vars(module).items()
        }

    def _new_attributes(self, before: dict[Slot, tuple[Any, Any]]) -> list[tuple[Slot, Any]]:
        """Return the tensors that the very first forward has made of attributes; their old values.

        A tensor that it has changed in place is one of them, and so is a small one, which a later
        forward may change.
        """
        found: list[tuple[Slot, Any]] = []
        weights = {id(p) for module in self._modules for p in module.parameters(recurse=False)}
        for module in self._modules:
            for name, value in vars(module).items():
                old, copy = before.get((module, name), (ABSENT, ABSENT))
                if not isinstance(value, torch.Tensor) or id(value) in weights:
                    continue
                lasts = value.requires_grad or not is_small((module, name), value)
                if lasts and old is value and is_same(value, copy):
                    continue
                found.append(((module, name), copy))
        return found

    def _old_values(self, before: dict[Slot, tuple[Any, Any]]) -> list[tuple[Slot, Any, Any]]:
        """Return the plain values of all modules, and what they were before the very first forward.

        Those of a module that the forward has made are left out.
        """
        known = {module for module, _ in before}
        return [
            ((module, name), value, before.get((module, name), (ABSENT,))[0])
            for module in self._modules
            if module in known
            for name, value in plain_values(vars(module)).items()
        ]

    def _new_buffers(self) -> list[tuple[Slot, Any]]:
        """Return the buffers that the very first forward has registered, as absent before it."""
        known = {*self._slots}
        return [
            ((module, name), ABSENT)
            for module in self._modules
            for name, value in buffers_of(module).items()
            if value is not None and (module, name) not in known
        ]

    def _changed(self) -> list[Slot]:
        """Return what has changed, so far unchanged, and the other buffers of such modules.

        A change of the module's other buffers may leave no trace in their version.
        """
        unchanged = self._unchanged.items()
        found = {slot for slot, copied in unchanged if not copied.is_of(_get(slot))}
        if not found:
            return []
        modules = {module for module, name in found if name in buffers_of(module)}
        return [
            (module, name)
            for module, name in self._unchanged
            if (module, name) in found or (module in modules and name in buffers_of(module))
        ]

    @contextmanager
    def second_forward(self, mb: MicroBatch) -> Iterator[None]:
        """Give the forward inside the context the buffers of the first; undo its changes after."""
        self._undo()
        self._keep_changed()  # by a forward that keeps its graph
        self._waiting -= 1
        before: dict[Slot, Any] = dict(mb.buffers_before or ())
        mb.buffers_before = None
        copies: Copies = {}
        for slot, value in self._until.items():
            if slot not in before:
                before[slot] = value if value is ABSENT else copy_of(value, copies)
        counters = [(slot, _get(slot)) for slot in self._counters if slot not in before]
        after = [(slot, _get(slot), slot[1] in buffers_of(slot[0])) for slot in before]
        for slot, value in before.items():
            set_slot(slot, value)
        set_recomputing(value=True)
        try:
            yield
        finally:
            set_recomputing(value=False)
            self._around_recompute = [(slot, value, _get(slot)) for slot, value in counters]
            for slot, value, is_buffer in after:
                set_slot(slot, value, is_buffer=is_buffer)


class _Copied:
    """A copy of what is in a slot, and its identity and version at that time."""

    def __init__(self, slot: Slot, copy: Any) -> None:
        self.copy = copy
        self._value = _get(slot)
        self._version = _version(self._value)

    def is_of(self, now: Any) -> bool:
        """Return whether what is in the slot is the same object, with the same version."""
        return now is self._value and _version(now) == self._version


def _keeps_beside_tensors(slot: Slot) -> bool:
    """Return whether a module may keep a plain value for its tensors: of a batch norm, momentum."""
    return slot[1] == "momentum" or not isinstance(slot[0], BatchNorm)


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, torch.Tensor) else 0
