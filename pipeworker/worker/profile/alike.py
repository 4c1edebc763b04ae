"""Alike layers: layers that cost the same, because class, configuration and shapes are equal.

The key of a layer has the class of each of its modules, their configuration (``extra_repr()`` and
attributes that are plain values, or dataclasses of these), their mode, and the shape, dtype and
trainability of parameters and buffers. Attributes that tell where a layer is, as ``layer_idx`` of
many libraries, are no part of it: else no two layers of a language model would be alike.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

from pipeworker.job.options import Options
from pipeworker.worker.internals import dense_parts
from pipeworker.worker.stage.cut.part import Part
from pipeworker.worker.stage.slots import OF_EVERY_MODULE

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
_PLACES = re.compile(
    r"(^|_)(idx|index|name|names|namespace|scope|prefix|key|id|label|tag|seed)$"
    r"|(layer|block|stage|level)_?(no|num|number)$"
)
"""Names of attributes that tell where a layer is, or how it is called."""
_MOST_ITEMS, _MOST_LEVELS = 64, 8
"""Items of a container whose attribute is part of a key."""
_OTHERS = ("torch", "builtins", "pipeworker")
_SIZE = 16


def digest(*parts: Any) -> str:
    """Return a digest of plain values, by their ``repr``."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "replace"), digest_size=_SIZE).hexdigest()


def key_of(layer: nn.Module) -> str:
    """Return a digest that is equal for layers that cost the same on equal inputs."""
    if isinstance(layer, Part):
        outside = sorted(tuple(tensor.shape) for tensor in layer.outside())
        return digest(key_of(layer.unit), layer.operations, outside)
    modules = [
        (name, str(type(module)), module.training, module.extra_repr(), _attributes(module))
        for name, module in layer.named_modules()
    ]
    tensors = [
        (
            name,
            tuple(tensor.shape),
            [(tuple(part.shape), part.stride(), str(part.dtype)) for part in dense_parts(tensor)],
            tensor.requires_grad,
        )
        for named in (layer.named_parameters(), layer.named_buffers())
        for name, tensor in named
    ]
    return digest(modules, tensors, _code_of(layer))


def surroundings(options: Options, device: torch.device, sources: Iterable[Any]) -> str:
    """Return a digest of what else a layer's cost depends on: code, device, options and torch.

    `sources` are names and digests of the files of the job.
    """
    return digest(
        torch.__version__,
        platform.python_version(),
        name_of(device),
        os.cpu_count() if device.type == "cpu" else 0,
        options.precision,
        options.threads,
        options.compile,
        options.deterministic,
        options.deferred_batch_norm,
        sys.argv[1:],  # they may choose the optimizer, whose state counts
        sorted(sources),
    )


def name_of(device: torch.device) -> str:
    """Return the product name of a device: ``NVIDIA H200``, or the processor's."""
    if device.type == "cpu":
        return _processor()
    named = getattr(torch.get_device_module(device.type), "get_device_name", None)
    return str(named(device)) if named is not None else device.type


@cache
def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def _attributes(module: nn.Module) -> list[tuple[str, str]]:
    """Return the attributes of a module that are its configuration, each as text."""
    found = []
    for name, value in sorted(vars(module).items()):
        if name not in OF_EVERY_MODULE and not _PLACES.search(name) and (text := _plain(value)):
            found.append((name, text))
    return found


def _plain(value: Any, levels: int = _MOST_LEVELS) -> str:
    """Return a plain value, or what a function does, as text; "" for anything else."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, partial):
        parts = (value.func, value.args, value.keywords)
        return f"partial {[_plain(part, levels - 1) for part in parts]}"
    if isinstance(value, Enum):
        return f"{type(value)} {value.name or value.value}"  # Python 3.10 names no combined flags
    if is_dataclass(value) and not isinstance(value, type):
        names = (one.name for one in fields(value) if not _PLACES.search(one.name))
        value = {name: getattr(value, name, None) for name in names}
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS and levels > 0:
        items = [_plain(item, levels - 1) for item in value]
        return f"[{', '.join(items)}]" if all(items) else ""
    if inspect.isroutine(value) or isinstance(value, type):
        name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        code = getattr(value, "__code__", None)
        return f"{name} {_operations(value, code)}" if isinstance(code, CodeType) else name
    return ""


def _operations(function: Any, code: CodeType) -> list[Any]:
    """Return the operations of a function and their numbers: all lambdas have one name."""
    numbers = [*code.co_consts, *(function.__defaults__ or ())]
    with suppress(ValueError):  # a variable that is not assigned yet
        numbers += [cell.cell_contents for cell in function.__closure__ or ()]
    plain = [repr(number) for number in numbers if isinstance(number, _PLAIN)]
    return [code.co_code, code.co_names, *plain]


def _code_of(layer: nn.Module) -> list[str]:
    """Return digests of the files that define the classes of a layer, but not torch's own."""
    kinds = {kind for module in layer.modules() for kind in type(module).__mro__}
    names = {kind.__module__ for kind in kinds if kind.__module__.partition(".")[0] not in _OTHERS}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in names}
    return sorted(_file_digest(file) for file in files if isinstance(file, str))


@cache
def _file_digest(file: str) -> str:
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=_SIZE).hexdigest()
    except OSError:
        return ""
