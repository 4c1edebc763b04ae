"""Restoring the state of a checkpoint into a worker's stages, however many stages wrote it.

A worker opens the files of all workers, and reads what its own stages need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipeworker.errors import UsageError
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.checkpoint.checkpoint import PackedValue, damaged, read_plain
from pipeworker.record.checkpoint.json_state import with_strides
from pipeworker.record.checkpoint.manifest import WorkerFiles
from pipeworker.record.checkpoint.param_groups import (
    SavedGroup,
    SavedOptimizer,
    scheduler_state_for,
)
from pipeworker.record.checkpoint.snapshot_memory import MEMORY
from pipeworker.record.checkpoint.stage_state import (
    OptimizerState,
    StageState,
    StateDictDiff,
    UserCode,
    is_extra_state,
)
from pipeworker.record.checkpoint.tensor_file import TensorFile

_MEMBERS = {"params", "param_names"}
"""The entries of a parameter group that say which parameters it has."""


def restore(
    files: Sequence[WorkerFiles],
    stages: Sequence[StageState],
    ties: Mapping[str, str] = MappingProxyType({}),
    user_code: UserCode = nullcontext,
    loads_itself: Callable[[nn.Module], bool] = lambda _: False,
) -> None:
    """Restore the state in the files of all workers into the stages of this one, which are built.

    The checksums of the files are not examined. By each further name of a tied weight, `ties` has
    the first one, which the state has; `loads_itself` returns whether a module has a way of its own
    to load its state.

    Raises:
        UsageError: the checkpoint is of another model, and nothing has changed; or it is damaged.
    """
    saved = check_fits(files, stages, ties, loads_itself)
    with torch.no_grad():
        for stage in stages:
            for index, layer, _ in stage.indexed():
                saved.set_made_buffers(index, layer, _device_of(stage.layers))
            stage.load(saved.state_of, user_code)
            for index, layer, _ in stage.indexed():
                for key in saved.buffer_keys.get(index, ()):  # which no state dict has
                    buffer = saved.buffers[saved.names.parameter(index, key)].read(torch.Tensor)
                    _set_buffer(layer, key, buffer, _device_of(stage.layers))
                saved.restore_strides(index, layer)
            _restore_updates(stage, saved, user_code)


def check_fits(
    files: Sequence[WorkerFiles],
    stages: Sequence[StageState],
    ties: Mapping[str, str],
    loads_itself: Callable[[nn.Module], bool],
) -> _SavedState:
    """Check that the state in the files is of the same model; return it. See :func:`restore`.

    Raises:
        UsageError: the checkpoint is of another model, or damaged.
    """
    saved = _SavedState(files, stages[0].names, ties, loads_itself)
    diff = StateDictDiff()
    for stage in stages:
        for index, layer, state in stage.indexed():
            saved.compare(index, layer, state, diff)
    if diff:
        raise UsageError(_misfit(files[0].model.parent, diff))
    return saved


def _misfit(folder: Path, diff: StateDictDiff) -> str:
    """Return the message for state that is not the model's, from files of this folder."""
    if folder == MEMORY:
        return (
            f"the snapshot in memory is not of the model that model() builds: {diff}; if a forward "
            "registers a parameter or a module, make it in __init__"
        )
    return f"the checkpoint {folder} is of another model: {diff}"


def restored_position(files: Sequence[WorkerFiles]) -> dict[str, Any]:
    """Return the position in the data that the worker with stage 0 saved.

    Raises:
        UsageError: no file has the position, or a file is damaged.
    """
    for one in files:
        plain = read_plain(one.state)
        if "data" in plain:
            value = PackedValue(one.state, TensorFile(one.optimizer), plain["data"])
            found: dict[str, Any] = value.read(dict)
            return found
    raise UsageError(
        f"{files[0].state.parent} has no position in the data: a loop of its own wrote it; restore "
        "it from such a loop"
    )


@dataclass(slots=True)
class _SavedState:
    """The state that all workers saved, by name. Values are read when they are needed."""

    files: Sequence[WorkerFiles]
    names: LayerNames
    ties: Mapping[str, str]
    loads_itself: Callable[[nn.Module], bool]
    weights: dict[str, TensorFile] = field(default_factory=dict)
    extra: dict[str, PackedValue] = field(default_factory=dict)
    buffers: dict[str, PackedValue] = field(default_factory=dict)
    strides: dict[str, Any] = field(default_factory=dict)  # of buffers; none in older files
    made: set[str] = field(default_factory=set)  # buffers that forwards made; none in older files
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
            made = packed(plain.get("made", [])).read(list)
            if not all(type(name) is str for name in made):
                raise damaged(files.state, "the name of a buffer is none")
            self.made.update(made)
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
                key.rpartition(".")[0] in own or self._is_made(index, layer, key)
            ):
                diff.add_different(full, info, wanted)
        modules = {path for path, _ in layer.named_modules(remove_duplicate=False)}
        unexpected = [
            key
            for key in self.weight_keys.get(index, ())
            if key not in state and not self._is_made(index, layer, key)
        ]
        for key in self.buffer_keys.get(index, ()):
            if key.rpartition(".")[0] not in modules:
                unexpected.append(key)
        diff.unexpected += [self.names.parameter(index, key) for key in unexpected]

    def _self_loading_paths(self, layer: nn.Module) -> set[str]:
        """Return the paths of the modules that load their state themselves."""
        modules = layer.named_modules(remove_duplicate=False)
        return {path for path, module in modules if self.loads_itself(module)}

    def _is_made(self, index: int, layer: nn.Module, key: str) -> bool:
        """Return whether a key is that of a buffer that a forward sets, registers or resizes."""
        return _is_unset_buffer(layer, key) or (
            self.names.parameter(index, key) in self.made and _may_have_buffer(layer, key)
        )

    def set_made_buffers(self, index: int, layer: nn.Module, device: torch.device) -> None:
        """Set the buffers of a layer that forwards made: load_state_dict() would refuse them."""
        for key in self.weight_keys.get(index, ()):
            if self._is_made(index, layer, key):
                name = self.names.parameter(index, key)
                _set_buffer(layer, key, self.weights[name][name], device, persistent=True)

    def restore_strides(self, index: int, layer: nn.Module) -> None:
        """Give buffers the strides that they had: matrix kernels choose their order by these."""
        made: dict[torch.Tensor, torch.Tensor] = {}  # several names may have one buffer
        for key, buffer in [*layer.named_buffers(remove_duplicate=False)]:
            strides = self.strides.get(self.names.parameter(index, key))
            if strides is not None and [*buffer.stride()] != strides:
                path, _, name = key.rpartition(".")
                try:
                    if buffer not in made:
                        made[buffer] = with_strides(buffer, strides)
                except (TypeError, ValueError, RuntimeError) as error:
                    raise damaged(self.files[0].state, f"{error!s:.80}") from None
                setattr(layer.get_submodule(path), name, made[buffer])

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
            weight = self._weight(self.names.parameter(index, key))
            if weight is not None:
                file, stored = weight
                found[key] = file.mapped(stored) if key in copied else file[stored]
        for key in self.extra_keys.get(index, ()):
            found[key] = self.extra[self.names.parameter(index, key)].read()
        return found


def _device_of(layers: Sequence[nn.Module]) -> torch.device:
    tensors = (t for layer in layers for t in (*layer.parameters(), *layer.buffers()))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _is_unset_buffer(layer: nn.Module, key: str) -> bool:
    """Return whether a key is that of a buffer that is None, which load_state_dict() refuses.

    A norm without running statistics has such buffers too, and would use them if they were set.
    """
    with suppress(AttributeError):  # no buffer
        module = layer.get_submodule(key.rpartition(".")[0])
        return layer.get_buffer(key) is None and getattr(module, "track_running_stats", True)
    return False


def _may_have_buffer(layer: nn.Module, key: str) -> bool:
    """Return whether a layer has a buffer of this name, or a module that can register it."""
    path, _, name = key.rpartition(".")
    with suppress(AttributeError):  # no such module
        module = layer.get_submodule(path)
        return name in dict(module.named_buffers(recurse=False)) or not hasattr(module, name)
    return False


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
    module = layer.get_submodule(path)
    present = getattr(module, name, None)
    if isinstance(present, torch.Tensor):
        device = present.device
        if present.shape == value.shape and present.dtype is value.dtype:
            with suppress(RuntimeError):  # several elements share memory, as those of expand()
                present.copy_(value)
                return
    if hasattr(module, name):
        setattr(module, name, value.to(device))
    else:
        module.register_buffer(name, value.to(device), persistent=persistent)


def _restore_updates(stage: StageState, saved: _SavedState, user_code: UserCode) -> None:
    """Restore the state and groups of a stage's optimizers, and the state of their schedulers."""
    parameters = stage.parameters()
    names = {id(p): saved.first_name(name) for name, p in parameters.items()}
    scheduled: list[tuple[OptimizerState, SavedOptimizer, list[SavedGroup | None]]] = []
    for update in stage.updates:
        grouped = {id(p) for group in update.optimizer.param_groups for p in group["params"]}
        trained = (names[id(p)] for p in parameters.values() if id(p) in grouped)
        origin = next((saved.groups[n].optimizer for n in trained if n in saved.groups), None)
        if origin is not None:
            groups = _restore_optimizer(update.optimizer, origin, saved, names)
            if update.scheduler is not None and origin.scheduler is not None:
                scheduled.append((update, origin, groups))
    by_loss = [one for one in scheduled if isinstance(one[0].scheduler, ReduceLROnPlateau)]
    by_step = [one for one in scheduled if not isinstance(one[0].scheduler, ReduceLROnPlateau)]
    counts = {_restart_count(stage, update, origin) for update, origin, _ in by_step}
    count = counts.pop() if len(counts) == 1 else None
    if stage.restart_schedulers and count is not None:
        stage.restart_schedulers(count)
        scheduled = by_loss
    for update, origin, groups in scheduled:
        state = scheduler_state_for(origin, groups, update.schedule)
        with user_code("load_state_dict() of the scheduler"):
            update.scheduler.load_state_dict(state)


def _restore_optimizer(
    optimizer: torch.optim.Optimizer,
    origin: SavedOptimizer,
    saved: _SavedState,
    names: Mapping[int, str],
) -> list[SavedGroup | None]:
    """Restore the state and groups of an optimizer; return the saved group that each continues.

    The saved optimizer `origin` has its first parameter. The `names` under which parameters have
    their state are by id.
    """
    groups = optimizer.param_groups
    saved_groups: list[SavedGroup | None] = []
    for index, group in enumerate(groups):
        known = (saved.groups.get(names.get(id(p), "")) for p in group["params"])
        same = SavedGroup(origin, index) if len(origin.groups) == len(groups) else None
        saved_groups.append(next(filter(None, known), same))
    for group, saved_group in zip(groups, saved_groups, strict=True):
        if saved_group is not None:
            _fill_group(group, saved_group.optimizer.groups[saved_group.index])
        for parameter in group["params"]:
            value = saved.states.get(names.get(id(parameter), ""))
            if value is not None:
                optimizer.state[parameter] = _placed(value.read(), parameter, group)
            else:  # as after load_state_dict(): that of later steps goes
                optimizer.state.pop(parameter, None)
    return saved_groups


def _restart_count(stage: StageState, update: OptimizerState, origin: SavedOptimizer) -> int | None:
    """Return after how many of its steps a scheduler is made again; None if its state is loaded.

    It is made again if the job was resumed with another number of steps.
    """
    others = 0 < stage.steps != origin.steps > 0
    began = all("initial_lr" in group for group in update.optimizer.param_groups)
    return origin.scheduled if others and began else None


def _fill_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Copy all entries of a saved parameter group except its parameters."""
    for key, value in saved.items():
        present = group.get(key)
        if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor):
            present.copy_(value)  # groups may share it
        elif key not in _MEMBERS:
            group[key] = value


def _placed(value: Any, parameter: nn.Parameter, group: Mapping[str, Any], key: Any = None) -> Any:
    """Return a parameter's state on the device on which torch's own load_state_dict() puts it.

    Nothing is cast. A contiguous tensor of the parameter's shape gets the parameter's strides: an
    older file does not have the tensor's own.
    """
    if isinstance(value, dict):
        filled = value.copy()  # of its own class
        for k, v in value.items():
            filled[k] = _placed(v, parameter, group, k)
        return filled
    if type(value) in (list, tuple):
        return type(value)(_placed(item, parameter, group) for item in value)
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    if on_host or not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape or not value.is_contiguous():
        return value.to(parameter.device)
    like = torch.empty_like(parameter, dtype=value.dtype)
    same = like.stride() == value.stride() and like.device == value.device
    return value if same else like.copy_(value)
