"""The state of a checkpoint put back into a worker's stages, whatever number of stages wrote it.

Everything is kept by the names of weights. A worker opens the files of all, and reads of them what
is its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.record.checkpoint import Part, read_plain
from pipeworker.record.manifest import Shard
from pipeworker.record.misfits import Misfits, by_layer, is_extra
from pipeworker.record.plain import Refused, unpack
from pipeworker.record.regroup import Place, Update, regrouped
from pipeworker.record.tensors import TensorFile

_MEMBERS = {"params", "param_names"}
"""Of a parameter group: what says whose it is."""
Users = Callable[[str], AbstractContextManager[Any]]


def restore(
    shards: Sequence[Shard],
    parts: Sequence[Part],
    ties: Mapping[str, str] = MappingProxyType({}),
    users: Users = nullcontext,
    loads_itself: Callable[[nn.Module], bool] = lambda _: False,
) -> None:
    """Put the state of a checkpoint into stages that are built.

    Args:
        shards: what all workers wrote; checksums are not looked at.
        parts: the stages of this worker.
        ties: each further name of a tied weight, and the first one, which has its state.
        users: entered around each call of the user's code, with what is called.
        loads_itself: whether a module has a way of its own to load what it holds.

    Raises:
        UsageError: the checkpoint is of another model, and nothing has changed; or it is damaged.
        Exception: what the user's code raises.
    """
    saved = _Saved(shards, ties, loads_itself)
    misfits = Misfits()
    for part in parts:
        for name, layer, state in zip(part.names, part.layers, part.states, strict=True):
            saved.compare(name, layer, state, misfits)
    if misfits:
        where = shards[0].model.parent
        raise UsageError(f"the checkpoint {where} is of another model: {misfits}")
    with torch.no_grad():
        for part in parts:
            for name, layer, state in zip(part.names, part.layers, part.states, strict=True):
                filled: Any = copy.copy(state)  # with what it says of versions
                filled.clear()
                filled.update(saved.state_of(name, layer, state))
                with users(f"load_state_dict() of layer {name} ({type(layer).__name__})"):
                    layer.load_state_dict(filled)
                for key, buffer in saved.buffers_of(name).items():
                    _put(layer, key, buffer, _device_of(part.layers))
            if part.optimizer is not None:
                _restore_update(part, part.optimizer, saved, users)


def position(shards: Sequence[Shard]) -> dict[str, Any]:
    """Where the worker with the first stage was in the data.

    Raises:
        UsageError: nobody says, or it is damaged.
    """
    for shard in shards:
        plain = read_plain(shard.state)
        if "data" in plain:
            found: dict[str, Any] = _Source(
                shard.state, TensorFile(shard.optimizer), plain["data"]
            ).read(dict)
            return found
    raise UsageError(
        f"{shards[0].state.parent} does not say where the data was: it is of a loop of its own"
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """A packed value in the file of a worker."""

    path: Path
    tensors: TensorFile
    packed: Any

    def read(self, kind: type = object) -> Any:
        try:
            value = unpack(self.packed, self.tensors)
        except Refused as error:
            raise _damaged(self.path, error) from None
        if not isinstance(value, kind):
            raise _damaged(self.path, f"{value!r:.40} is no {kind.__name__}")
        return value

    def within(self, packed: Any) -> _Source:
        return _Source(self.path, self.tensors, packed)


def _damaged(path: Path, why: object) -> UsageError:
    return UsageError(f"cannot read {path}: it is not what a stage writes ({why})")


@dataclass(slots=True)
class _Saved:
    """What all workers wrote, by name; nothing is read before it is asked for."""

    shards: Sequence[Shard]
    ties: Mapping[str, str]
    loads_itself: Callable[[nn.Module], bool]
    weights: dict[str, TensorFile] = field(default_factory=dict)
    extra: dict[str, _Source] = field(default_factory=dict)
    buffers: dict[str, _Source] = field(default_factory=dict)
    states: dict[str, _Source] = field(default_factory=dict)  # of optimizers, by parameter
    places: dict[str, Place] = field(default_factory=dict)  # of parameters in groups
    _layers: dict[int, dict[str, list[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for shard in self.shards:
            weights = TensorFile(shard.model)
            both = next((name for name in weights if name in self.weights), None)
            if both is not None:
                raise _damaged(shard.model, f"{both!r:.80} is in another part as well")
            self.weights |= dict.fromkeys(weights, weights)
            try:
                plain = read_plain(shard.state)
            except OSError as error:
                raise UsageError(f"cannot read {shard.state}: {error.strerror}") from None
            file = _Source(shard.state, TensorFile(shard.optimizer), None)
            self.extra |= {name: file.within(value) for name, value in plain["extra"].items()}
            self.buffers |= {name: file.within(value) for name, value in plain["buffers"].items()}
            for update in plain["updates"]:
                self._open_update(file, update)
        for names in (self.weights, self.extra, self.buffers):
            self._layers[id(names)] = by_layer(names)

    def _open_update(self, file: _Source, update: Any) -> None:
        if not (isinstance(update, dict) and isinstance(update.get("state"), dict)):
            raise _damaged(file.path, "an optimizer's state is not there")
        groups = file.within(update.get("groups")).read(list)
        scheduler = file.within(update.get("scheduler")).read()
        found = Update(groups, scheduler)
        for index, group in enumerate(groups):
            names = group.get("params") if isinstance(group, dict) else None
            if not (isinstance(names, list) and all(type(name) is str for name in names)):
                raise _damaged(file.path, "a parameter group is none")
            self.places |= dict.fromkeys(names, Place(found, index))
        self.states |= {name: file.within(value) for name, value in update["state"].items()}

    def _of(self, names: Mapping[str, Any], layer: str) -> list[str]:
        """Those of a layer, without its name."""
        return self._layers[id(names)].get(layer, [])

    def first(self, name: str) -> str:
        """The name that a weight has its state under."""
        return self.ties.get(name, name)

    def _weight(self, name: str) -> tuple[TensorFile, str] | None:
        for one in (self.first(name), name):
            if one in self.weights:
                return self.weights[one], one
        return None

    def compare(
        self, name: str, layer: nn.Module, state: Mapping[str, Any], misfits: Misfits
    ) -> None:
        """Find what load_state_dict() would refuse, or cast.

        What is no tensor, or extra state, is the layer's own to judge, and so are the shapes of
        what a module loads itself: an observer's grow with what it has seen.
        """
        own = self._loaded_by_themselves(layer)
        for key, value in state.items():
            full = f"{name}.{key}"
            if not isinstance(value, torch.Tensor) or is_extra(key):
                continue
            found = self._weight(full)
            if found is not None:
                file, stored = found
                look, wanted = file.look(stored), (value.dtype, tuple(value.shape))
                if look != wanted and key.rpartition(".")[0] not in own:
                    misfits.differ(full, look, wanted)
            else:
                misfits.missing.append(full)
        modules = {path for path, _ in layer.named_modules(remove_duplicate=False)}
        misfits.unexpected += [
            f"{name}.{key}" for key in self._of(self.weights, name) if key not in state
        ]
        misfits.unexpected += [
            f"{name}.{key}"
            for key in self._of(self.buffers, name)
            if key.rpartition(".")[0] not in modules
        ]

    def _loaded_by_themselves(self, layer: nn.Module) -> set[str]:
        """The paths of such modules."""
        modules = layer.named_modules(remove_duplicate=False)
        return {path for path, module in modules if self.loads_itself(module)}

    def state_of(self, name: str, layer: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict of a layer."""
        found: dict[str, Any] = {}
        copied = {key for key, _ in layer.named_parameters(remove_duplicate=False)}
        copied |= {key for key, _ in layer.named_buffers(remove_duplicate=False)}
        own = self._loaded_by_themselves(layer)
        copied = {key for key in copied if key.rpartition(".")[0] not in own}
        for key in dict.fromkeys([*state, *self._of(self.weights, name)]):
            weight = self._weight(f"{name}.{key}")
            if weight is not None:
                file, stored = weight
                found[key] = file.mapped(stored) if key in copied else file[stored]
        for key in self._of(self.extra, name):
            found[key] = self.extra[f"{name}.{key}"].read()
        return found

    def buffers_of(self, layer: str) -> dict[str, torch.Tensor]:
        """The buffers of a layer that its state dict does not have."""
        keys = self._of(self.buffers, layer)
        return {key: self.buffers[f"{layer}.{key}"].read(torch.Tensor) for key in keys}


def _device_of(layers: Sequence[nn.Module]) -> torch.device:
    for layer in layers:
        for tensor in (*layer.parameters(), *layer.buffers()):
            return tensor.device
    return torch.device("cpu")


def _put(layer: nn.Module, key: str, value: torch.Tensor, device: torch.device) -> None:
    """Give a buffer its value: in place where it fits, since others may share its memory."""
    path, _, name = key.rpartition(".")
    module = layer.get_submodule(path)
    there = getattr(module, name, None)
    if isinstance(there, torch.Tensor):
        device = there.device
        if there.shape == value.shape and there.dtype is value.dtype:
            try:
                there.copy_(value)
                return
            except RuntimeError:  # one place of memory for several numbers, as of expand()
                pass
    if hasattr(module, name):
        setattr(module, name, value.to(device))
    else:
        module.register_buffer(name, value.to(device), persistent=False)


def _restore_update(
    part: Part, optimizer: torch.optim.Optimizer, saved: _Saved, users: Users
) -> None:
    """Put back the optimizer's state and groups, and the scheduler's state."""
    parameters = part.parameters()
    names = {id(p): saved.first(name) for name, p in parameters.items()}
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [names[id(p)] for p in parameters.values() if id(p) in given]
    origin = next((saved.places[name].update for name in trained if name in saved.places), None)
    if origin is None:
        return
    groups = optimizer.param_groups
    places: list[Place | None] = []
    for index, group in enumerate(groups):
        known = (saved.places.get(names.get(id(p), "")) for p in group["params"])
        same = Place(origin, index) if len(origin.groups) == len(groups) else None
        places.append(next(filter(None, known), same))
    for group, place in zip(groups, places, strict=True):
        if place is not None:
            _fill(group, place.group)
        for parameter in group["params"]:
            source = saved.states.get(names.get(id(parameter), ""))
            if source is not None:
                optimizer.state[parameter] = _placed(source.read(), parameter, group)
    if part.scheduler is not None and origin.scheduler is not None:
        state = regrouped(origin, places, part.schedule)
        with users("load_state_dict() of the scheduler"):
            part.scheduler.load_state_dict(state)


def _fill(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give a parameter group all that the saved one had but its parameters."""
    for key, value in saved.items():
        there = group.get(key)
        if key in _MEMBERS:
            continue
        if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
            there.copy_(value)  # groups may share it
        else:
            group[key] = value


def _placed(value: Any, parameter: nn.Parameter, group: Mapping[str, Any], key: Any = None) -> Any:
    """A part of a parameter's state where torch's own load_state_dict() has it; nothing is cast.

    What is as large as the parameter is laid out as it is: its strides were lost in the file.
    """
    if isinstance(value, dict):
        filled = value.copy()
        filled.update((k, _placed(v, parameter, group, k)) for k, v in value.items())
        return filled
    if type(value) in (list, tuple):
        return type(value)(_placed(item, parameter, group) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value
    if value.shape != parameter.shape:
        return value.to(parameter.device)
    like = torch.empty_like(parameter, dtype=value.dtype)
    same = like.stride() == value.stride() and like.device == value.device
    return value if same else like.copy_(value)
