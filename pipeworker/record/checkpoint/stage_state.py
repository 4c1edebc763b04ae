"""The state of a stage: its layers, its optimizer and its scheduler, by the names of parameters.

Names are those of the user's own module, ``model().state_dict()``, so that nothing depends on how
layers are grouped into stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError, with_article
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.checkpoint.json_state import Tensors, is_whole, pack
from pipeworker.record.checkpoint.tensor_file import TensorInfo

_EXTRA = "_extra_state"
UserCode = Callable[[str], AbstractContextManager[Any]]
"""Returns a context for a call of the user's code, which the argument names."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """An optimizer of a stage, its scheduler or None, and the state of that scheduler."""

    optimizer: torch.optim.Optimizer
    schedule: Any = None
    scheduler: Any = None


@dataclass(frozen=True, slots=True)
class StageState:
    """The layers of a stage, and what updates them.

    Attributes:
        names: the names of all layers of the model.
        states: the state dicts of the stage's layers.
        updates: the optimizers of the stage, with their schedulers.
        keeps_weights: whether weights and buffers are saved too. Otherwise only the optimizer's
            and scheduler's state is, because another worker has the same layers.
        first: the index of the stage's first layer in the model.
        steps: the number of steps of the job that the schedulers were made for; 0 if they take
            none.
        restart_schedulers: makes the schedulers again, after a number of their steps.
        adapters: what makes peft's own folder of the whole model's weights, saved with one stage;
            see :func:`pipeworker.record.weights.conversions.describe_adapters`.
        built_buffers: the buffers of each layer as its constructor left them.
        built_strides: the strides of each layer's parameters as its constructor left them.
    """

    names: LayerNames
    layers: Sequence[nn.Module]
    states: Sequence[Mapping[str, Any]]
    updates: Sequence[OptimizerState] = ()
    keeps_weights: bool = True
    first: int = 0
    steps: int = 0
    restart_schedulers: Callable[[int], None] | None = None
    adapters: Mapping[str, Any] | None = None
    built_buffers: Sequence[Mapping[str, TensorInfo]] = ()
    built_strides: Sequence[Mapping[str, tuple[int, ...]]] = ()

    def indexed(self) -> Iterator[tuple[int, nn.Module, Mapping[str, Any]]]:
        """Yield each layer's index in the model, the layer and its state dict."""
        indices = range(self.first, self.first + len(self.layers))
        return zip(indices, self.layers, self.states, strict=True)

    def load(
        self,
        saved: Callable[[int, nn.Module, Mapping[str, Any]], dict[str, Any]],
        user_code: UserCode,
        *,
        strict: bool = True,
    ) -> None:
        """Load into each layer the entries that `saved` returns of its index, itself and its state.

        A layer without any is left alone unless `strict`.
        """
        for index, layer, state in self.indexed():
            filled: Any = copy.copy(state)  # keeps the versions of modules
            filled.clear()
            filled.update(saved(index, layer, state))
            name = self.names.unit(index)
            if filled or strict:
                call = f"load_state_dict() of layer {name} ({type(layer).__name__})"
                with _copied_expanded(layer), user_code(call):
                    # The user's own load_state_dict() may have no `strict`, whose default is True.
                    layer.load_state_dict(filled, **({} if strict else {"strict": False}))

    def entries(self) -> dict[str, Any]:
        """Return the entries of all state dicts, by their names in the whole module's.

        Each is returned by one stage: that of the first layer which has it.
        """
        if not self.keeps_weights:
            return {}
        return {
            self.names.parameter(index, key): value
            for index, _, state in self.indexed()
            for key, value in state.items()
            if self.names.is_first(index, key)
        }

    def frozen(self) -> set[str]:
        """Return the names of the parameters that want no gradient."""
        return {
            self.names.parameter(index, key)
            for index, layer, _ in self.indexed()
            for key, parameter in layer.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
        }

    def changed_by_update(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that nothing but an update changes."""
        for layer in self.layers:
            yield from (p for p in layer.parameters() if p.requires_grad)
        for update in self.updates:
            for state in update.optimizer.state.values():
                values = state.values() if isinstance(state, dict) else ()
                yield from (value for value in values if isinstance(value, torch.Tensor))

    def unlisted_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that are in no state dict (caches, tables) by name."""
        if not self.keeps_weights:
            return {}
        return {
            self.names.parameter(index, key): buffer
            for index, layer, state in self.indexed()
            for key, buffer in layer.named_buffers(remove_duplicate=False)
            if key not in state and self.names.is_first(index, key)
        }

    def made_buffers(self) -> dict[str, str]:
        """Return the buffers in state dicts that forwards have registered, or given another shape.

        Each name has that of the buffer in a state dict, if possible a built one, that is the same
        tensor; the first of several, which may be itself. A buffer that shares memory with another
        one in another way is left out: it would have memory of its own after a restore. Buffers in
        no state dict are returned too, if they are the same tensor as another buffer.
        """
        kept: list[tuple[int, str, torch.Tensor]] = []
        made: list[tuple[int, str, torch.Tensor]] = []
        unlisted = self.unlisted_buffers()
        for (index, layer, state), built in zip(self.indexed(), self.built_buffers, strict=False):
            for key, buffer in layer.named_buffers(remove_duplicate=False):
                if key in state:
                    is_kept = built.get(key) == _info_of(buffer)
                    (kept if is_kept else made).append((index, key, buffer))
        firsts: dict[int, str] = {}
        sharers: dict[int, set[int]] = {}  # the buffers of each storage
        for index, key, buffer in [*kept, *made] if made or unlisted else ():
            firsts.setdefault(id(buffer), self.names.parameter(index, key))
            sharers.setdefault(_memory_of(buffer), set()).add(id(buffer))
        found = {
            self.names.parameter(index, key): firsts[id(buffer)]
            for index, key, buffer in made
            if len(sharers[_memory_of(buffer)]) == 1
        }
        for name, buffer in unlisted.items():
            if firsts.setdefault(id(buffer), name) != name:
                found[name] = firsts[id(buffer)]
        return found

    def strides(self) -> dict[str, list[int]]:
        """Return the strides of parameters, buffers and extra state with several dims, by name.

        A tensor that is expanded, or a part of other memory, is left out: a copy has other strides.
        So is a parameter with the strides that its layer was built with: if the job file has
        changed, as to channels_last, a run that resumes has those that the file gives now.
        """
        built = chain(self.built_strides, repeat(dict[str, tuple[int, ...]]()))
        return {
            self.names.parameter(index, key): [*tensor.stride()]
            for (index, layer, state), strides in zip(self.indexed(), built, strict=False)
            for key, tensor in (
                *layer.named_parameters(remove_duplicate=False),
                *layer.named_buffers(remove_duplicate=False),
                *((k, v) for k, v in state.items() if is_extra_state(k)),
            )
            if isinstance(tensor, torch.Tensor)
            and tensor.layout is torch.strided
            and not (tensor.is_nested or tensor.is_quantized)  # torch makes none like these on meta
            and tensor.dim() > 1
            and is_whole(tensor)
            and tensor.stride() != strides.get(key)
        }

    def aliases(self) -> dict[str, str]:
        """Return the further names of weights that have several in a layer, with the first."""
        found: dict[str, str] = {}
        for index, layer, state in self.indexed() if self.keeps_weights else ():
            firsts: dict[int, str] = {}
            for key, parameter in layer.named_parameters(remove_duplicate=False):
                if key in state and self.names.is_first(index, key):
                    name = self.names.parameter(index, key)
                    if firsts.setdefault(id(parameter), name) != name:
                        found[name] = firsts[id(parameter)]
        return found

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return each parameter once, in model order, by the first of its names."""
        found: dict[str, nn.Parameter] = {}
        known: set[int] = set()
        for index, layer, _ in self.indexed():
            for key, parameter in layer.named_parameters():
                if id(parameter) not in known:
                    known.add(id(parameter))
                    # Places of a tied weight may have one name: the optimizer has the first.
                    found.setdefault(self.names.parameter(index, key), parameter)
        return found

    def pack_updates(self, elsewhere: Collection[int], tensors: Tensors) -> list[dict[str, Any]]:
        """Return the states and groups of optimizers and the states of schedulers, as JSON.

        The tensors in them are added to `tensors`; ``worker_content.py`` explains `elsewhere`.

        Raises:
            UsageError: an optimizer keeps state that belongs to no parameter, or that a checkpoint
                cannot hold.
        """
        names = {id(p): name for name, p in self.parameters().items() if id(p) not in elsewhere}
        return [self._packed(update, names, tensors) for update in self.updates]

    def _packed(
        self, update: OptimizerState, names: Mapping[int, str], tensors: Tensors
    ) -> dict[str, Any]:
        optimizer = update.optimizer
        known = {id(p) for layer in self.layers for p in layer.parameters()}
        known |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        for key in optimizer.state:
            if id(key) not in known:
                raise UsageError(
                    f"the optimizer's state has the key {key!r:.80}, which is no parameter: a "
                    "checkpoint keeps state by parameter"
                )
        state = {names[id(p)]: v for p, v in optimizer.state.items() if id(p) in names}
        groups = [
            {**group, "params": [names[id(p)] for p in group["params"] if id(p) in names]}
            for group in optimizer.param_groups
        ]
        before = {*tensors}
        packed = {
            "state": {name: pack(value, tensors, name) for name, value in state.items()},
            "groups": pack(groups, tensors, "optimizer/groups"),
        }
        for name in tensors.keys() - before:
            if (kind := type(tensors[name])) not in (torch.Tensor, nn.Parameter):
                found = with_article(f"{kind.__module__}.{kind.__qualname__}")
                raise UsageError(
                    f"{name} is {found}, which a run that resumes would have as a plain tensor; "
                    "choose an optimizer with plain tensors"
                )
        if update.schedule is not None:
            packed["scheduler"] = pack(update.schedule, tensors, "scheduler")
        if self.steps:
            packed["steps"] = self.steps
        return packed


def buffer_infos(layer: nn.Module) -> dict[str, TensorInfo]:
    """Return the dtype and the shape of each buffer of a layer, by all of its names."""
    return {key: _info_of(buffer) for key, buffer in layer.named_buffers(remove_duplicate=False)}


def parameter_strides(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the strides of each dense parameter of a layer, by all of its names."""
    return {
        key: parameter.stride()
        for key, parameter in layer.named_parameters(remove_duplicate=False)
        if parameter.layout is torch.strided and not parameter.is_nested
    }


def _memory_of(tensor: torch.Tensor) -> int:
    """Return a number for the memory of a tensor, which its views share."""
    is_strided = tensor.layout is torch.strided and tensor.numel() > 0
    return tensor.untyped_storage().data_ptr() if is_strided else id(tensor)


def _info_of(tensor: torch.Tensor) -> TensorInfo:
    return tensor.dtype, () if tensor.is_nested else tuple(tensor.shape)


def is_extra_state(key: str) -> bool:
    """Return whether a key is that of a module's extra state, which may be any value."""
    return key.rpartition(".")[2] == _EXTRA


@contextmanager
def _copied_expanded(layer: nn.Module) -> Iterator[None]:
    """Have copies in place of expanded buffers, into which ``load_state_dict()`` copies nothing.

    An expanded buffer is used again afterwards if it can have the values that were loaded.
    """
    expanded, copies = [], dict[int, torch.Tensor]()
    for path, buffer in [*layer.named_buffers(remove_duplicate=False)]:
        if _is_expanded(buffer):
            folder, _, name = path.rpartition(".")
            module = layer.get_submodule(folder)
            expanded.append((module, name, buffer))
            setattr(module, name, copies.setdefault(id(buffer), buffer.clone()))
    yield
    for module, name, buffer in expanded:
        loaded = getattr(module, name)
        first = tuple(slice(None if step else 1) for step in buffer.stride())
        if loaded.shape == buffer.shape and loaded.equal(loaded[first].expand_as(loaded)):
            with torch.no_grad():
                buffer[first].copy_(loaded[first])
            setattr(module, name, buffer)


def _is_expanded(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return any(not step and size > 1 for step, size in sizes)
