"""The device a worker computes on, and how much of its memory it took."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch

from pipeworker.errors import UsageError
from pipeworker.worker.internals import pytree


def device_for(asked: str, local_rank: int) -> torch.device:
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise UsageError("--device cuda: torch sees no CUDA device on this host")
    if asked == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def peak_memory(device: torch.device) -> int:
    """Bytes: of the accelerator's allocator, or of the process on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def to_device(value: Any, device: torch.device) -> Any:
    """The value with its tensors on a device."""
    if device.type == "cpu":
        return value
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), value)
