"""Facts about this machine and its installation, for bug reports (``pipeworker env``)."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from pipeworker.environment import torch_version
from pipeworker.host import cgroups
from pipeworker.version import __version__
from pipeworker.wire.keys import TOKEN_VARIABLE

_PACKAGES = (
    *("numpy", "pyzmq", "msgpack", "msgspec", "psutil", "typing_extensions", "cryptography"),
    *("safetensors", "click", "rich"),
)
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")
_LIMITS = ("NOFILE", "NPROC", "MEMLOCK", "CORE")


def facts() -> dict[str, Any]:
    """Return the facts by name. Of the job's token only its presence is reported."""
    variables = (
        *_VARIABLES,
        *sorted(name for name in os.environ if name.startswith("PIPEWORKER_")),
    )
    return {
        "pipeworker": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": torch_version() or "not installed",
        **{name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "devices": _devices(),
        "cores": _cores(),
        "memory": _memory(),
        "/dev/shm": _shared(),
        **{f"RLIMIT_{name}": _limit(name) for name in _LIMITS},
        **{name: os.environ[name] for name in variables if name in os.environ},
        **({TOKEN_VARIABLE: "is set"} if TOKEN_VARIABLE in os.environ else {}),
    }


def text(found: Mapping[str, Any]) -> str:
    """Format facts, one line each."""
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in found.items())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    """Describe the devices that torch sees, or why torch cannot be imported."""
    try:
        import torch

        count = torch.accelerator.device_count()
        current, built = torch.accelerator.current_accelerator(), "the CPU only"
        names = [f"{current}:{number}" for number in range(count)]
        if current is not None:
            version = torch.version.cuda or torch.version.hip
            built = f"CUDA {version}" if current.type == "cuda" else current.type
            name_of = getattr(torch.get_device_module(current), "get_device_name", None)
            names = [name_of(number) for number in range(count)] if name_of else names
    except Exception as error:  # also a ValueError, for a wrong TORCH_LOGS
        return f"unknown: torch failed: {' '.join(str(error).split())}"
    return f"{', '.join(names) or 'no accelerator'}; torch is built for {built}"


def _cores() -> str:
    usable = len(os.sched_getaffinity(0))
    bound = cgroups.core_quota()
    at_most = "" if bound is None else f", for {bound:g} at a time"
    return f"{usable} of {os.cpu_count()}{at_most}"


def _memory() -> str:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bound = cgroups.memory_limit()
    at_most = "" if bound is None or bound >= total else f", of which {_gib(bound)} may be used"
    return f"{_gib(total)}{at_most}"


def _shared() -> str:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return str(error.strerror)
    return f"{_gib(usage.total)}, {_gib(usage.free)} free"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _limit(name: str) -> str:
    soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    shown = ["unlimited" if one == resource.RLIM_INFINITY else str(one) for one in (soft, hard)]
    return shown[0] if soft == hard else f"{shown[0]}, up to {shown[1]}"
