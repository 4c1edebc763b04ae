"""What a worker has of its host: a device, memory, and a place for what is printed."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from pipeworker.errors import UsageError


def redirect_output(path: Path) -> None:
    """Everything the worker prints, C code included, goes to its log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


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
