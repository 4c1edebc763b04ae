"""Nested plain values as JSON, with the tensors in them aside: what a checkpoint can hold.

What an optimizer, a scheduler or a layer has as its state is made of tensors, numbers, texts,
lists, tuples and dicts. These become what JSON has; where JSON has no word for something there is a
dict with one key that begins with ``$``. Nothing is imported or called because a file says so.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from pipeworker.errors import UsageError

Tensors = dict[str, torch.Tensor]
_DEPTH = 100
_DICTS: dict[str, type[dict[Any, Any]]] = {"OrderedDict": OrderedDict, "Counter": Counter}
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


class Refused(ValueError):
    """A value, or what stands for one, is none that a checkpoint can hold."""


def pack(value: Any, tensors: Tensors, name: str) -> Any:
    """What JSON can hold of a value; its tensors are put into `tensors` under names of their own.

    Args:
        name: of the value; what is refused is named by it, and tensors are.

    Raises:
        UsageError: something in it is neither a tensor nor plain.
    """
    return _pack(value, tensors, name, 0)


def _pack(value: Any, tensors: Tensors, name: str, depth: int) -> Any:
    if depth > _DEPTH:
        raise UsageError(f"{name} is nested too deeply for a checkpoint")

    def within(item: Any, key: object) -> Any:
        return _pack(item, tensors, f"{name}/{key}", depth + 1)

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
        return _pack_tensor(value, tensors, name)
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return {"$array": _pack_tensor(torch.from_numpy(value.copy()), tensors, name)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$scalar": _pack_tensor(torch.from_numpy(np.array(value)), tensors, name)}
    if kind is dict or kind in _DICTS.values():
        simple = kind is dict and all(type(k) is str and not k.startswith("$") for k in value)
        if simple:
            return {key: within(item, key) for key, item in value.items()}
        items = [[within(key, "key"), within(item, key)] for key, item in value.items()]
        return {"$items": items} if kind is dict else {f"${kind.__name__}": items}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is torch.Size:
        return {"$size": list(value)}
    if kind is torch.dtype:
        return {"$dtype": str(value)}
    raise UsageError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds tensors, numbers, "
        "texts, lists, tuples and dicts"
    )


def _pack_tensor(tensor: torch.Tensor, tensors: Tensors, name: str) -> dict[str, Any]:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UsageError(
            f"{name} is a tensor that is sparse, quantized or nested, which no file has"
        )
    unique = name
    while unique in tensors:
        unique += "'"
    complex128 = tensor.dtype is torch.complex128  # which the format lacks
    tensors[unique] = torch.view_as_real(tensor) if complex128 else tensor
    return {"$complex": unique} if complex128 else {"$tensor": unique}


def unpack(packed: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value of which :func:`pack` made this.

    Raises:
        Refused: it is not what :func:`pack` makes, or a tensor is missing.
    """
    return _unpack(packed, tensors, 0)


def _unpack(packed: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if depth > 2 * _DEPTH:
        raise Refused("it is nested too deeply")

    def within(item: Any) -> Any:
        return _unpack(item, tensors, depth + 1)

    if isinstance(packed, list):
        return [within(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) == 1:
        ((word, content),) = packed.items()
        if word.startswith("$"):
            return _unpack_word(word, content, tensors, within)
    return {key: within(item) for key, item in packed.items()}


def _unpack_word(
    word: str, content: Any, tensors: Mapping[str, torch.Tensor], within: Callable[[Any], Any]
) -> Any:
    try:
        match word:
            case "$float":
                return _SPECIAL[content]
            case "$tuple":
                return tuple(within(_a(list, content)))
            case "$tensor":
                return tensors[content]
            case "$complex":
                return as_complex(tensors[content])
            case "$array":
                return within(content).numpy()
            case "$scalar":
                return within(content).numpy()[()]
            case "$bytes":
                return base64.b64decode(content, validate=True)
            case "$size":
                return torch.Size(_a(int, n) for n in _a(list, content))
            case "$dtype":
                return _DTYPES[content]
        kind = dict if word == "$items" else _DICTS[word[1:]]
        return kind({within(key): within(item) for key, item in _a(list, content)})
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, binascii.Error) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"{word} of something else") from None


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """Pairs of real numbers as complex ones, in memory that is aligned for them: a file's is not.

    Raises:
        RuntimeError: they are none.
    """
    return torch.view_as_complex(pairs.clone())


def _a(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise Refused(f"{value!r:.40} is no {kind.__name__}")
    return value
