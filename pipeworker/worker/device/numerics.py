"""Torch's own settings that kernels are chosen by, and so a job's numbers depend on.

They are the user's: set in the job file, or in the environment of all workers. What must be is that
they are the same on every worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch

_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Of the environment, before cuBLAS starts: its products are then the same in each run."""
_OF_BACKENDS = (
    *("fp32_precision", "cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision"),
    *("cudnn.rnn.fp32_precision", "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision"),
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "mkldnn.enabled"),
)
_OF_TORCH: tuple[Callable[[], object], ...] = (
    *(torch.get_default_dtype, torch.are_deterministic_algorithms_enabled),
    *(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled),
    *(torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.cudnn_sdp_enabled),
)
_OF_ENVIRONMENT = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _WORKSPACE[0]),
    *("MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"),
)
_LONGEST = 64
"""Characters of a variable that are looked at."""


def settings() -> tuple[str, ...]:
    """As they are now: ``torch.backends.cudnn.benchmark = False``."""
    found = [(f"torch.backends.{name}", attrgetter(name)(torch.backends)) for name in _OF_BACKENDS]
    found += [(f"{of.__module__}.{of.__name__}()", of()) for of in _OF_TORCH]
    found += [(name, os.environ.get(name, "not set")[:_LONGEST]) for name in _OF_ENVIRONMENT]
    return tuple(f"{name} = {value}" for name, value in found)


def before_start() -> None:
    """What ``--deterministic`` needs before an accelerator is used."""
    os.environ.setdefault(*_WORKSPACE)


def deterministic() -> None:
    """What ``--deterministic`` sets: each kernel that has no fixed order raises."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@contextmanager
def put_back(asked: Callable[[], bool]) -> Iterator[None]:
    """In a process of the user's: on inside of this where it is asked for, and as it was behind it.

    Args:
        asked: whether ``--deterministic`` is in force, as far as that is known.
    """
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if asked():
        deterministic()
    try:
        yield
    finally:
        if asked():
            torch.use_deterministic_algorithms(before, warn_only=only_warns)
            torch.backends.cudnn.benchmark = benchmark
