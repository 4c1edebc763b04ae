"""Torch's settings by which kernels are chosen: a job's numbers depend on them.

The user sets them in the job file, or in the environment of all workers. They must be the same on
every worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch

_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""A variable that makes cuBLAS deterministic; it is read when cuBLAS starts."""
_OF_BACKENDS = (
    *("fp32_precision", "cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision"),
    *("cudnn.rnn.fp32_precision", "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision"),
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "mkldnn.enabled"),
    *("opt_einsum.enabled", "opt_einsum.strategy"),  # the order of products depends on it
)
_OF_TORCH: tuple[Callable[[], object], ...] = (
    *(torch.get_default_dtype, torch.are_deterministic_algorithms_enabled),
    *(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled),
    *(torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.cudnn_sdp_enabled),
    torch.backends.cuda.preferred_blas_library,
)
_OF_ENVIRONMENT = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _WORKSPACE[0]),
    *("CUBLASLT_WORKSPACE_SIZE", "PYTORCH_TUNABLEOP_ENABLED"),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"),
    *("ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("DNNL_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE"),  # the older names, which count as well
)
_LONGEST = 64
"""Number of characters of a variable that are compared."""


def settings() -> tuple[str, ...]:
    """Return the settings in force, each as ``torch.backends.cudnn.benchmark = False``."""
    found = [(f"torch.backends.{name}", attrgetter(name)(torch.backends)) for name in _OF_BACKENDS]
    found += [(f"{of.__module__}.{of.__name__}()", of()) for of in _OF_TORCH]
    found += [(name, os.environ.get(name, "not set")[:_LONGEST]) for name in _OF_ENVIRONMENT]
    return tuple(f"{name} = {value}" for name, value in found)


def before_start() -> None:
    """Set what ``--deterministic`` needs before an accelerator is used."""
    os.environ.setdefault(*_WORKSPACE)


def enable_deterministic() -> None:
    """Make kernels without a fixed order raise, for ``--deterministic``."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@contextmanager
def deterministic_mode(requested: Callable[[], bool]) -> Iterator[None]:
    """Enable deterministic mode inside the context if requested; restore the settings on exit.

    `requested` returns whether ``--deterministic`` is in force; it is called on entry and on exit,
    because a worker may learn that only in between.
    """
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if requested():
        enable_deterministic()
    try:
        yield
    finally:
        if requested():
            torch.use_deterministic_algorithms(before, warn_only=only_warns)
            torch.backends.cudnn.benchmark = benchmark
