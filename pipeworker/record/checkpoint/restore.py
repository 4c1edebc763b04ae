"""Restoring the state of a checkpoint into a worker's stages, however many stages wrote it.

A worker opens the files of all workers, and reads what its own stages need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipeworker.errors import UsageError
from pipeworker.record.checkpoint.checkpoint import PackedValue, read_plain
from pipeworker.record.checkpoint.manifest import WorkerFiles
from pipeworker.record.checkpoint.param_groups import (
    SavedGroup,
    SavedOptimizer,
    scheduler_state_for,
)
from pipeworker.record.checkpoint.saved_state import SavedState
from pipeworker.record.checkpoint.snapshot_memory import MEMORY
from pipeworker.record.checkpoint.stage_state import OptimizerState, StageState, UserCode
from pipeworker.record.checkpoint.state_dict_diff import StateDictDiff
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
            device = _device_of(stage.layers)
            saved.set_made_buffers(stage, device)
            stage.load(saved.state_of, user_code)
            for index, layer, _ in stage.indexed():
                saved.set_unlisted_buffers(index, layer, device)
            saved.share_unlisted_buffers(stage)
            saved.restore_strides(stage)
            _restore_updates(stage, saved, user_code)


def check_fits(
    files: Sequence[WorkerFiles],
    stages: Sequence[StageState],
    ties: Mapping[str, str],
    loads_itself: Callable[[nn.Module], bool],
) -> SavedState:
    """Check that the state in the files is of the same model; return it. See :func:`restore`.

    Raises:
        UsageError: the checkpoint is of another model, or damaged.
    """
    saved = SavedState(files, stages[0].names, ties, loads_itself)
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
            "registers a parameter, a module or buffers that share memory, make them in __init__"
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


def _device_of(layers: Sequence[nn.Module]) -> torch.device:
    tensors = (t for layer in layers for t in (*layer.parameters(), *layer.buffers()))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _restore_updates(stage: StageState, saved: SavedState, user_code: UserCode) -> None:
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
    saved: SavedState,
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
