"""Buffers that graphs save: the next forward must not change what a backward still needs.

The plain loop runs the backward of a micro-batch before the forward of the next one. A stage that
keeps graphs runs several forwards first. If a forward changes a buffer in place and the graph has
saved it, as in ``x * self.scale``, the backward would read what a later forward made of it. Some
changes leave no trace in the tensor's version, as those of batch norm's kernels and of
``buffer.data``, so torch would not notice. A parameter cannot be replaced by a copy, because an
optimizer has it: such a change of one is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from pipeworker.errors import UsageError
from pipeworker.worker import blame
from pipeworker.worker.internals import (
    SAVED_PREFIX,
    BatchNorm,
    buffers_of,
    ignores_statistics,
    is_fake,
    version_of,
)
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.offload import Offload, Packed, addresses_of
from pipeworker.worker.stage.slots import Copies, Slot, copy_of, get_slot, is_small, set_slot
from pipeworker.worker.stage.values import (
    checksum,
    checksums,
    distinct_tensors,
    is_checked,
    is_dense,
    versions,
)

_UNUSED = (f"{SAVED_PREFIX}running_mean", f"{SAVED_PREFIX}running_var")
"""The names of the tensors that a batch norm in training saves, and does not use."""
_KEEP_IN_BUFFER = (
    "change weights in the optimizer's step() or in before_update(), and keep what forwards change "
    "in buffers (register_buffer)"
)


class SavedBuffers:
    """The buffers of a stage that its forwards change in place and its graphs save.

    The very first forward that keeps its graph finds out which these are; most networks have none.
    A small buffer that it only saves is one of them too, because a later forward may change it, as
    a temperature that falls at times; and so is one that it only changes, because a later forward
    may use it. After each forward the layers continue with copies, and the graph keeps the
    originals, which get the values of the copies when no graph is left: other code may hold them.
    A tensor in a plain attribute is treated as a buffer. Such tensors stay on the device.

    Whether a parameter changes, or another buffer does later, the second graph of the first
    mini-batch shows, of the second one, the fourth and so on. A batch norm uses what it saves in
    eval mode alone, so a forward may be the first one to depend on its statistics when it switches
    the mode. The first of the layers has the index `first` in the model.
    """

    def __init__(
        self, layers: Sequence[nn.Module], first: int, offload: Offload | None = None
    ) -> None:
        self._layers, self._first, self._offload = layers, first, offload
        whole = nn.ModuleList(layers)
        self._modules, self._weights = [*whole.modules()], [*whole.parameters()]
        self._slots: list[Slot] | None = None
        self._modes = {
            module: module.training
            for module in self._modules
            if isinstance(module, BatchNorm) and module.track_running_stats
        }
        """Whether each batch norm was in training in the last forward; those of no slot."""
        self._mini_batches = self._graphs = 0
        self._replaced: dict[Slot, tuple[torch.Tensor, torch.Tensor]] = {}
        """The tensors that copies have replaced in this mini-batch, and the last copies."""

    @property
    def is_empty(self) -> bool:
        """Whether the stage is known to have no such buffer."""
        return self._slots == []

    def begin(self) -> None:
        """Start a mini-batch: no graph is kept."""
        self._mini_batches += 1
        self._graphs = 0
        self._replaced = {}

    def end(self) -> None:
        """End a mini-batch: tensors that copies have replaced are in their places again."""
        for slot, (original, last) in self._replaced.items():
            if get_slot(slot) is last and original.shape == last.shape:
                if _is_writable(original):
                    with torch.no_grad():
                        original.copy_(last)
                set_slot(slot, original)
        self._replaced = {}

    def forward(self, mb: MicroBatch) -> AbstractContextManager[None]:
        """Leave to the graph of the forward inside the context what it saves.

        Raises:
            UsageError: it has changed, without a trace, what graphs save.
        """
        self._graphs += 1
        is_due = self._graphs == 2 and is_checked(self._mini_batches)
        is_watched = is_due or self._modes or not self.is_empty
        return self._forward(mb, is_due) if is_watched else nullcontext()

    @contextmanager
    def _forward(self, mb: MicroBatch, is_due: bool) -> Iterator[None]:
        before = self._candidates() if self._slots is None else {}
        others = self._others() if is_due else {}
        yield
        if self._slots is None:
            self._slots = self._under_all_names(_saved_and_changing(before, mb.output))
        if is_due:
            _check_unchanged(others, mb)
        self.note_modes(mb)
        copies: Copies = {}
        for slot in self._slots:
            now = get_slot(slot)
            original, last = self._replaced.get(slot, (now, now))
            set_slot(slot, copied := copy_of(now, copies))
            if isinstance(now, torch.Tensor):  # the layer may have put another one there
                self._replaced[slot] = (original if now is last else now), copied
        if copies and self._offload is not None:
            self._offload.leave(copies.values())

    def note_modes(self, mb: MicroBatch) -> None:
        """Note, after a forward, which batch norms depend on their statistics from now on.

        Raises:
            UsageError: it has changed statistics that earlier graphs of the mini-batch depend on.
        """
        for norm in [norm for norm, mode in self._modes.items() if norm.training is not mode]:
            if norm.training and self._graphs > (not mb.recompute):
                place = next(name for name, module in self._named() if module is norm)
                raise UsageError(
                    f"{place}: the forward of micro-batch {mb.number} has switched it to training, "
                    "which changes the statistics that earlier forwards of the mini-batch depend "
                    "on; use --recompute always"
                )
            if norm.training:
                self._modes[norm] = True
            elif not mb.recompute and self._slots is not None:
                del self._modes[norm]
                names = "running_mean", "running_var"
                self._slots += [(norm, n) for n in names if (norm, n) not in self._slots]

    def _candidates(self) -> dict[Slot, tuple[torch.Tensor, _State]]:
        """Return the tensors that a forward may change in place, and their states.

        A tensor that shares its memory with another one, or is a parameter of a module, is left
        out: a copy would not show what is written to the other.
        """
        found = {
            (module, name): value for module in self._modules for name, value in _tensors_of(module)
        }
        distinct = {id(tensor): tensor for tensor in found.values()}
        uses: Counter[int | None] = Counter(addresses_of((*distinct.values(), *self._weights)))
        return {
            slot: (value, _state_of(value))
            for slot, value in found.items()
            if not value.requires_grad and uses[_address(value)] == 1
        }

    def _under_all_names(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return slots, and those that have the same tensors by now, of which a forward made one.

        They remain one tensor, because all of them get the same copy.
        """
        tensors = {id(get_slot(slot)) for slot in slots}
        named = ((m, name, value) for m in self._modules for name, value in _tensors_of(m))
        same = [(m, name) for m, name, value in named if id(value) in tensors]
        return [*dict.fromkeys([*slots, *same])]

    def _others(self) -> dict[str, _Compared]:
        """Return the tensors that no copy replaces, parameters among them, as they are."""
        replaced = {*(self._slots or ())}
        return {
            f"{place}{'.' * (place[-1] != ' ')}{name}": (value, version_of(value), checksum(value))
            for place, module in self._named()
            for name, value in (*module.named_parameters(recurse=False), *_tensors_of(module))
            if (module, name) not in replaced and is_dense(value)
        }

    def _named(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules with their names for errors."""
        for index, layer in enumerate(self._layers, self._first):
            for folder, module in layer.named_modules():
                yield f"{blame.layer(index, blame.kind_of(layer))}: {folder}", module


_Compared = tuple[torch.Tensor, int, torch.Tensor]
"""A tensor, its version, and its checksum, on its device."""
_State = tuple[list[int], tuple[int, ...]]


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a module by itself, and the tensors in its attributes, by name.

    A fake tensor is left out, which has no bits to change, and one made in inference mode, which no
    graph saves.
    """
    for name, value in (*buffers_of(module).items(), *vars(module).items()):
        if isinstance(value, torch.Tensor) and not (is_fake(value) or value.is_inference()):
            yield name, value


def _state_of(tensor: torch.Tensor) -> _State:
    """Return numbers that differ after a change in place, also one that leaves no trace."""
    return versions(tensor), checksums(tensor)


def _saved_and_changing(before: dict[Slot, tuple[torch.Tensor, _State]], output: Any) -> list[Slot]:
    """Return the slots whose tensors forwards may change, and graphs may save.

    This forward has changed them in place, or its graph has saved them and they are small. Integers
    that it has only changed are left out, which are counters, and the statistics of batch norms: a
    network has many of them.
    """
    changed: dict[Slot, bool] = {
        slot: _state_of(value) != state
        for slot, (value, state) in before.items()
        if get_slot(slot) is value and not value.requires_grad
    }
    changing = [slot for slot in changed if changed[slot] or is_small(slot, before[slot][0])]
    saved = {*_saved_storages(output)} if changing else ()
    return [
        slot
        for slot in changing
        if _address(before[slot][0]) in saved
        or (changed[slot] and before[slot][0].is_floating_point() and _is_used(slot[0]))
    ]


def _is_writable(tensor: torch.Tensor) -> bool:
    """Return whether forwards can change a tensor in place: not an expanded one."""
    is_expanded = is_dense(tensor) and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return not (is_expanded or tensor.is_inference())


def _is_used(module: nn.Module) -> bool:
    """Return whether a module's graph may save its buffers: that of a batch norm does not."""
    return not isinstance(module, BatchNorm) or not module.training


def _check_unchanged(before: Mapping[str, _Compared], mb: MicroBatch) -> None:
    """Refuse a forward that has changed, without a trace, a tensor that its graph has saved too."""
    changed = _changed({n: one for n, one in before.items() if version_of(one[0]) == one[1]})
    saved = {*_saved_storages(mb.output)} if changed else ()
    for name in changed:
        value, *_ = before[name]
        if _address(value) in saved:
            is_weight = isinstance(value, nn.Parameter)
            raise UsageError(
                f"{name}: the forward of micro-batch {mb.number} has changed it without a trace "
                "(.data), and backwards need what it was in earlier forwards; "
                + (_KEEP_IN_BUFFER if is_weight else "use --recompute always")
            )


def _changed(before: Mapping[str, _Compared]) -> list[str]:
    """Return the tensors with other numbers than before; the host waits once for each device."""
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, (value, _, numbers) in before.items():
        by_device.setdefault(numbers.device, {})[name] = checksum(value) != numbers
    return [
        name
        for found in by_device.values()
        for name, differs in zip(found, torch.stack([*found.values()]).tolist(), strict=True)
        if differs
    ]


def _saved_storages(output: Any) -> Iterator[int | None]:
    """Yield the addresses of the storages that the graph behind an output has saved."""
    waiting: list[Node | None] = [tensor.grad_fn for tensor in distinct_tensors(output)]
    seen: set[Node | None] = {None}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [other for other, _ in node.next_functions]
        unused = _UNUSED if ignores_statistics(node) else ()
        for one in saved_by(node, unused):
            tensor = one.data
            if isinstance(tensor, Packed | torch.Tensor):
                yield _address(tensor)
        # The node of a function in Python is its `ctx`, to which its forward may assign tensors.
        assigned = [*getattr(node, "__dict__", {}).values()]
        yield from map(_address, distinct_tensors(assigned) if assigned else ())


def _address(tensor: Packed | torch.Tensor) -> int | None:
    if isinstance(tensor, Packed):
        return tensor.address
    return next(addresses_of((tensor,)), None)


def saved_by(node: Node, unused: Collection[str] = ()) -> Iterator[Any]:
    """Yield what a graph's node has saved, except in the attributes `unused`."""
    for name in _saved_names(type(node)):
        if name not in unused:
            saved = getattr(node, name)
            yield from saved if isinstance(saved, tuple) else (saved,)


@lru_cache(maxsize=1024)
def _saved_names(kind: type) -> tuple[str, ...]:
    """Return the names of the attributes with what nodes of a kind have saved."""
    return tuple(name for name in dir(kind) if name.startswith(SAVED_PREFIX))
