"""The device a worker computes on, and how much of its memory it took."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch

from pipeworker.errors import UsageError
from pipeworker.worker.device.visible import Accelerators, module_of
from pipeworker.worker.internals import pytree


def device_for(asked: str, local_rank: int, seen: Accelerators) -> torch.device:
    """The device of a worker, which is pinned to it; where they are few, several have one.

    Args:
        asked: ``auto``, ``cpu``, or a kind of accelerator.
        local_rank: the worker's number on its host.

    Raises:
        UsageError: there is none of this kind.
    """
    kind = seen.kind
    if asked not in ("auto", "cpu", kind):
        instead = f"it sees {kind}, which --device auto takes" if kind else "see pipeworker env"
        raise UsageError(
            f"--device {asked}: torch sees no {asked.upper()} device on this host: {instead}"
        )
    if asked == "cpu" or not kind:
        return torch.device("cpu")
    index = local_rank % seen.count
    seen.take(index)
    return torch.device(kind, index)


def unit_of(device: torch.device, seen: Accelerators) -> str:
    """Which accelerator of its host it is; empty for the CPU."""
    return "" if device.type == "cpu" else seen.unit(device.index or 0)


def peak_memory(device: torch.device) -> int:
    """Bytes: of the accelerator's allocator, or of the process where it has none of its own."""
    allocated = getattr(module_of(device.type), "max_memory_allocated", None)
    if allocated is not None:
        return int(allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def to_device(value: Any, device: torch.device) -> Any:
    """The value with its tensors on a device."""
    if device.type == "cpu":
        return value
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), value)
