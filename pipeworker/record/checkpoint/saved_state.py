"""The state that the files of all workers have, by name, and what of it fits the layers here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.checkpoint.checkpoint import PackedValue, damaged, read_plain
from pipeworker.record.checkpoint.json_state import with_strides
from pipeworker.record.checkpoint.manifest import WorkerFiles
from pipeworker.record.checkpoint.param_groups import SavedGroup, SavedOptimizer
from pipeworker.record.checkpoint.stage_state import StageState, is_extra_state
from pipeworker.record.checkpoint.state_dict_diff import StateDictDiff
from pipeworker.record.checkpoint.tensor_file import TensorFile


@dataclass(slots=True)
class SavedState:
    """The state that all workers saved, by name. Values are read when they are needed."""

    files: Sequence[WorkerFiles]
    names: LayerNames
    ties: Mapping[str, str]
    loads_itself: Callable[[nn.Module], bool]
    weights: dict[str, TensorFile] = field(default_factory=dict)
    extra: dict[str, PackedValue] = field(default_factory=dict)
    buffers: dict[str, PackedValue] = field(default_factory=dict)
    strides: dict[str, Any] = field(default_factory=dict)  # by name; older files lack some
    made: dict[str, str] = field(default_factory=dict)  # by forwards; none in older files
    states: dict[str, PackedValue] = field(default_factory=dict)  # of optimizers, by parameter
    groups: dict[str, SavedGroup] = field(default_factory=dict)  # by parameter
    weight_keys: Mapping[int, list[str]] = field(init=False)  # by layer
    extra_keys: Mapping[int, list[str]] = field(init=False)
    buffer_keys: Mapping[int, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        for files in self.files:
            for path in files.weights:
                weights = TensorFile(path)
                both = next((name for name in weights if name in self.weights), None)
                if both is not None:
                    raise damaged(path, f"{both!r:.80} is in another part as well")
                self.weights |= dict.fromkeys(weights, weights)
            plain = read_plain(files.state)
            packed = partial(PackedValue, files.state, TensorFile(files.optimizer))
            self.extra |= {name: packed(value) for name, value in plain["extra"].items()}
            self.buffers |= {name: packed(value) for name, value in plain["buffers"].items()}
            self.strides |= packed(plain.get("strides", {})).read(dict)
            made = packed(plain.get("made", {})).read(dict)
            if not all(type(name) is str for pair in made.items() for name in pair):
                raise damaged(files.state, "the name of a buffer is none")
            self.made |= made
            for update in plain["updates"]:
                self._add_update(files.state, packed, update)
        self.weight_keys, _ = self.names.by_layer(self.weights)
        self.extra_keys, _ = self.names.by_layer(self.extra)
        self.buffer_keys, _ = self.names.by_layer(self.buffers)

    def _add_update(self, path: Path, packed: Callable[[Any], PackedValue], update: Any) -> None:
        if not (isinstance(update, dict) and isinstance(update.get("state"), dict)):
            raise damaged(path, "an optimizer's state is not there")
        groups = packed(update.get("groups")).read(list)
        steps = update.get("steps", 0)
        if type(steps) is not int:
            raise damaged(path, "the number of steps of a scheduler is none")
        optimizer = SavedOptimizer(groups, packed(update.get("scheduler")).read(), steps)
        for index, group in enumerate(groups):
            names = group.get("params") if isinstance(group, dict) else None
            if not (isinstance(names, list) and all(type(name) is str for name in names)):
                raise damaged(path, "a parameter group is none")
            self.groups |= dict.fromkeys(names, SavedGroup(optimizer, index))
        self.states |= {name: packed(value) for name, value in update["state"].items()}

    def first_name(self, name: str) -> str:
        """Return the name under which a weight has its optimizer state."""
        return self.ties.get(name, name)

    def _weight(self, name: str) -> tuple[TensorFile, str] | None:
        for one in (self.first_name(name), name):
            if one in self.weights:
                return self.weights[one], one
        return None

    def compare(
        self, index: int, layer: nn.Module, state: Mapping[str, Any], diff: StateDictDiff
    ) -> None:
        """Record what load_state_dict() would refuse or cast.

        Extra state and values that are not tensors are left to the layer. So are the shapes of the
        tensors that a module loads itself: those of an observer grow with the data.
        """
        own = self._self_loading_paths(layer)
        for key, value in state.items():
            full = self.names.parameter(index, key)
            if not isinstance(value, torch.Tensor) or is_extra_state(key):
                continue
            found = self._weight(full)
            if found is None:
                diff.missing.append(full)
                continue
            file, stored = found
            info, wanted = file.info(stored), (value.dtype, tuple(value.shape))
            if info != wanted and not (
                key.rpartition(".")[0] in own or self._is_made(index, layer, key, state)
            ):
                diff.add_different(full, info, wanted)
        modules = {path for path, _ in layer.named_modules(remove_duplicate=False)}
        unexpected = [
            key
            for key in self.weight_keys.get(index, ())
            if key not in state and not self._is_made(index, layer, key, state)
        ]
        for key in self.buffer_keys.get(index, ()):
            if key.rpartition(".")[0] not in modules:
                unexpected.append(key)
        diff.unexpected += [self.names.parameter(index, key) for key in unexpected]

    def _self_loading_paths(self, layer: nn.Module) -> set[str]:
        """Return the paths of the modules that load their state themselves."""
        modules = layer.named_modules(remove_duplicate=False)
        return {path for path, module in modules if self.loads_itself(module)}

    def _is_made(self, index: int, layer: nn.Module, key: str, state: Mapping[str, Any]) -> bool:
        """Return whether a key is that of a buffer that a forward sets, registers or resizes."""
        return _is_unset_buffer(layer, key) or (
            self.names.parameter(index, key) in self.made and _may_have_buffer(layer, key, state)
        )

    def set_made_buffers(self, stage: StageState, device: torch.device) -> None:
        """Set the buffers of a stage that forwards made: load_state_dict() would refuse them.

        Those that were one tensor are one again: a forward may change it under another name.
        """
        present: dict[str, torch.Tensor] = {}
        made: dict[str, tuple[nn.Module, str]] = {}
        for index, layer, state in stage.indexed():
            for key, buffer in layer.named_buffers(remove_duplicate=False):
                present.setdefault(self.names.parameter(index, key), buffer)
            for key in self.weight_keys.get(index, ()):
                if self._is_made(index, layer, key, state):
                    made[self.names.parameter(index, key)] = layer, key
        for name in sorted(made, key=lambda name: self.made.get(name, name) != name):
            (layer, key), value = made[name], self.weights[name][name]
            other = self.made.get(name, name)
            if other != name and other in present and _is_like(present[other], value):
                _put_buffer(layer, key, present[other], persistent=True)
            else:
                _set_buffer(layer, key, value, device, persistent=True)
            present[name] = _buffer(layer, key)

    def set_unlisted_buffers(self, index: int, layer: nn.Module, device: torch.device) -> None:
        """Set the buffers of a layer that no state dict has."""
        for key in self.buffer_keys.get(index, ()):
            buffer = self.buffers[self.names.parameter(index, key)].read(torch.Tensor)
            _set_buffer(layer, key, buffer, device)

    def share_unlisted_buffers(self, stage: StageState) -> None:
        """Share the buffers that no state dict has with those that were the same tensor.

        A forward may change such a buffer under the other name.
        """
        present = {
            self.names.parameter(index, key): buffer
            for index, layer, _ in stage.indexed()
            for key, buffer in layer.named_buffers(remove_duplicate=False)
        }
        for index, layer, _ in stage.indexed():
            for key in self.buffer_keys.get(index, ()):
                name = self.names.parameter(index, key)
                other = present.get(self.made.get(name, name))
                if other is not None and _is_like(other, _buffer(layer, key)):
                    _put_buffer(layer, key, other, persistent=False)

    def restore_strides(self, stage: StageState) -> None:
        """Give tensors the strides that they had: matrix kernels choose their order by these.

        An optimizer or a forward had replaced the memory that the layers were built with.
        """
        made: dict[Any, torch.Tensor] = {}
        for index, layer, _ in stage.indexed():
            # Their class shows nothing: torch.jit.load() returns modules whose weights are tensors.
            parameters = dict(layer.named_parameters(remove_duplicate=False))
            for key, tensor in [
                *parameters.items(),
                *layer.named_buffers(remove_duplicate=False),
            ]:
                strides = self.strides.get(self.names.parameter(index, key))
                # All tensors without elements have one address.
                if strides is None or not tensor.numel() or [*tensor.stride()] == strides:
                    continue
                is_parameter = key in parameters
                # Several names may have one buffer. The places of a tied weight share its memory.
                one = (tensor.data_ptr(), tensor.shape) if is_parameter else tensor
                if one not in made:
                    made[one] = self._with_strides(tensor.detach(), strides)
                path, _, name = key.rpartition(".")
                if is_parameter:
                    tensor.data = made[one]
                else:
                    setattr(_submodule(layer, path), name, made[one])

    def _with_strides(self, tensor: torch.Tensor, strides: Any) -> torch.Tensor:
        try:
            return with_strides(tensor, strides)
        except (TypeError, ValueError, RuntimeError) as error:
            raise damaged(self.files[0].state, f"{error!s:.80}") from None

    def state_of(self, index: int, layer: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved state dict of a layer."""
        found: dict[str, Any] = {}
        own = self._self_loading_paths(layer)
        named = chain(
            layer.named_parameters(remove_duplicate=False),
            layer.named_buffers(remove_duplicate=False),
        )
        copied = {key for key, _ in named if key.rpartition(".")[0] not in own}
        for key in dict.fromkeys([*state, *self.weight_keys.get(index, ())]):
            full = self.names.parameter(index, key)
            weight = self._weight(full)
            if weight is not None:
                file, stored = weight
                found[key] = file.mapped(stored) if key in copied else file[stored]
                if is_extra_state(key) and full in self.strides:
                    found[key] = self._with_strides(found[key], self.strides[full])
        for key in self.extra_keys.get(index, ()):
            found[key] = self.extra[self.names.parameter(index, key)].read()
        return found


def _submodule(layer: nn.Module, path: str) -> Any:
    """Return a module within a layer; one of TorchScript has no ``get_submodule``.

    Raises:
        AttributeError: there is none.
    """
    module: Any = layer
    for name in path.split(".") if path else ():
        module = getattr(module, name)
    return module


def _buffer(layer: nn.Module, key: str) -> torch.Tensor:
    path, _, name = key.rpartition(".")
    buffer: torch.Tensor = getattr(_submodule(layer, path), name)
    return buffer


def _is_unset_buffer(layer: nn.Module, key: str) -> bool:
    """Return whether a key is that of a buffer that is None, which load_state_dict() refuses.

    A norm without running statistics has such buffers too, and would use them if they were set.
    """
    with suppress(AttributeError):  # no buffer
        path, _, name = key.rpartition(".")
        module = _submodule(layer, path)
        if isinstance(module, torch.jit.ScriptModule):  # has no get_buffer()
            return False
        return module.get_buffer(name) is None and getattr(module, "track_running_stats", True)
    return False


def _may_have_buffer(layer: nn.Module, key: str, state: Mapping[str, Any]) -> bool:
    """Return whether a layer has a buffer of this name in its `state`, or a forward may add it."""
    path, _, name = key.rpartition(".")
    with suppress(AttributeError):  # no such module
        module = _submodule(layer, path)
        if hasattr(module, name):
            return key in state and name in dict(module.named_buffers(recurse=False))
        return True
    return False


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype


def _set_buffer(
    layer: nn.Module,
    key: str,
    value: torch.Tensor,
    device: torch.device,
    *,
    persistent: bool = False,
) -> None:
    """Set a buffer, in place if the value fits: other tensors may share its memory.

    One that the layer does not have is registered, `persistent` or not.
    """
    path, _, name = key.rpartition(".")
    module = _submodule(layer, path)
    present = getattr(module, name, None)
    if isinstance(present, torch.Tensor):
        device = present.device
        if _is_like(present, value):
            with suppress(RuntimeError):  # several elements share memory, as those of expand()
                present.copy_(value)
                return
    _put_buffer(layer, key, value.to(device), persistent=persistent)


def _put_buffer(layer: nn.Module, key: str, value: torch.Tensor, *, persistent: bool) -> None:
    """Put a tensor in the place of a buffer; one that the layer does not have is registered."""
    path, _, name = key.rpartition(".")
    module = _submodule(layer, path)
    if hasattr(module, name):
        setattr(module, name, value)
    else:
        module.register_buffer(name, value, persistent=persistent)
