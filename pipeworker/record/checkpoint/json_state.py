"""The state of optimizers, schedulers and layers as JSON, with the tensors in it kept apart.

Such a state consists of tensors, numbers, texts, lists, tuples and dicts, nested. A value that JSON
does not have becomes a dict with one key that begins with ``$``. Reading imports and calls nothing
that a file names.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from pipeworker.errors import UsageError, with_article

Tensors = dict[str, torch.Tensor]
_DEPTH = 100
JSON_DEPTH = 3 * _DEPTH + 10
"""The levels of lists and dicts in JSON with packed values: an item of a dict takes three."""
_DICTS: dict[str, type[dict[Any, Any]]] = {"OrderedDict": OrderedDict, "Counter": Counter}
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


class InvalidState(ValueError):
    """A packed value is not one that :func:`pack` makes, or one of its tensors is missing."""


def pack(value: Any, tensors: Tensors, name: str, depth: int = 0) -> Any:
    """Return a value, which consists of tensors and plain values, as JSON has it.

    Add its tensors to `tensors`, under names of their own, which begin with `name`.

    Raises:
        UsageError: a part of the value is neither a tensor nor plain; it is named.
    """
    if depth > _DEPTH:
        raise UsageError(f"{name} is nested too deeply for a checkpoint")

    def within(item: Any, key: object) -> Any:
        return pack(item, tensors, f"{name}/{key}", depth + 1)

    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [within(item, key) for key, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [within(item, key) for key, item in enumerate(value)]}
    if isinstance(value, torch.Tensor):
        packed = pack_tensor(value, tensors, name)
        if value.is_contiguous():
            return packed
        return {"$strided": [packed, [*torch.empty_like(value, device="meta").stride()]]}
    if kind is np.ndarray or isinstance(value, np.generic):
        mark = "$array" if kind is np.ndarray else "$scalar"
        return {mark: pack_tensor(_of_numpy(value, name), tensors, name)}
    if kind is dict or kind in _DICTS.values():
        if kind is dict and all(type(k) is str and not k.startswith("$") for k in value):
            return {key: within(item, key) for key, item in value.items()}
        items = [[within(key, "key"), within(item, key)] for key, item in value.items()]
        return {"$items": items} if kind is dict else {f"${kind.__name__}": items}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is torch.Size:
        return {"$size": list(value)}
    if kind is torch.dtype:
        return {"$dtype": str(value)}
    found = with_article(f"{kind.__module__}.{kind.__qualname__}")
    raise UsageError(
        f"{name} is {found}: a checkpoint holds tensors, numbers, texts, lists, tuples and dicts"
    )


def _of_numpy(value: Any, name: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError):  # texts, objects, dates, 128 bits, another order of bytes
        raise UsageError(
            f"{name} is of NumPy's {value.dtype}, and no tensor is; a checkpoint cannot hold it"
        ) from None


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory, each at a place of its own."""
    if tensor.is_contiguous():
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def with_strides(tensor: torch.Tensor, strides: Any) -> torch.Tensor:
    """Return a copy of a tensor with the strides of one that is whole.

    Raises:
        TypeError, RuntimeError: they are no strides.
        ValueError: they are none of a tensor of this shape.
    """
    shape, fits = tensor.shape, len(strides) == tensor.dim()
    if not (fits and is_whole(torch.empty_strided(shape, strides, device="meta"))):
        raise ValueError(f"the strides {strides!r:.40} are none of the shape {[*shape]!r:.40}")
    kind, device = tensor.dtype, tensor.device
    return torch.empty_strided(shape, strides, dtype=kind, device=device).copy_(tensor)


def pack_tensor(tensor: torch.Tensor, tensors: Tensors, name: str) -> dict[str, Any]:
    """Add a tensor to `tensors`, and return what refers to it; its strides are left out."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UsageError(
            f"{name} is a tensor that is sparse, quantized or nested, which no file has; make it "
            "dense, or a buffer with persistent=False that model() fills"
        )
    unique = name
    while unique in tensors:
        unique += "'"
    complex128 = tensor.dtype is torch.complex128  # which the format lacks
    tensors[unique] = torch.view_as_real(tensor.resolve_conj()) if complex128 else tensor
    return {"$complex": unique} if complex128 else {"$tensor": unique}


def unpack(packed: Any, tensors: Mapping[str, torch.Tensor], depth: int = 0) -> Any:
    """Return the value of which :func:`pack` made `packed`.

    Raises:
        InvalidState: :func:`pack` does not make such a value, or a tensor is missing.
    """
    if depth > _DEPTH + 1:  # a tensor is one level below its array
        raise InvalidState("it is nested too deeply")

    def within(item: Any) -> Any:
        return unpack(item, tensors, depth + 1)

    if isinstance(packed, list):
        return [within(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) == 1:
        ((mark, content),) = packed.items()
        if mark.startswith("$"):
            return _unpack_marked(mark, content, tensors, within)
    return {key: within(item) for key, item in packed.items()}


def _unpack_marked(
    mark: str, content: Any, tensors: Mapping[str, torch.Tensor], within: Callable[[Any], Any]
) -> Any:
    try:
        match mark:
            case "$float":
                return _SPECIAL[content]
            case "$tuple":
                return tuple(within(_of_type(list, content)))
            case "$tensor":
                return tensors[content]
            case "$complex":
                return as_complex(tensors[content])
            case "$strided":
                inner, strides = _of_type(list, content)
                return with_strides(_of_type(torch.Tensor, within(inner)), strides)
            case "$array":
                return within(content).numpy()
            case "$scalar":
                return within(content).numpy()[()]
            case "$bytes":
                return base64.b64decode(content, validate=True)
            case "$size":
                return torch.Size(_of_type(int, n) for n in _of_type(list, content))
            case "$dtype":
                return _DTYPES[content]
        kind = dict if mark == "$items" else _DICTS[mark[1:]]
        return kind({within(key): within(item) for key, item in _of_type(list, content)})
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, InvalidState):
            raise
        raise InvalidState(f"{mark} of something else") from None


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """Return pairs of shape (..., 2) as complex numbers, in memory aligned for these.

    Raises:
        RuntimeError: the tensor has another shape or dtype.
    """
    return torch.view_as_complex(pairs.clone())


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise InvalidState(f"{value!r:.40} is no {kind.__name__}")
    return value
