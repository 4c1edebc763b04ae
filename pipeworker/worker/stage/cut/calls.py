"""Calls of torch's functions outside of units, and the tensors in their arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import pipeworker
from pipeworker.errors import UsageError, a_type
from pipeworker.worker.internals import is_fake, pytree, without_fake_modes
from pipeworker.worker.stage.cut.plan import Number
from pipeworker.worker.stage.cut.units import stride_of
from pipeworker.worker.transport.structure import PLAIN_TYPES, encode_scalar, is_namedtuple

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_SHIFTS = ("lshift", "rshift", "matmul")
_IN_PLACE = frozenset({"__setitem__", *(f"__i{name}__" for name in (*_OPERATORS, *_SHIFTS))})
_NOT_SHOWN = tuple(f"{Path(str(package.__file__)).parent}/" for package in (torch, pipeworker))


_METADATA = frozenset(
    {"size", "dim", "numel", "__len__", "stride", "is_floating_point", "is_complex"}
    | {"get_device", "element_size", "nelement", "ndimension", "__hash__"}
)
"""Functions that read a tensor's shape, dtype or device, and no number of it."""
_TENSORS = frozenset({"T", "mT", "H", "mH", "data", "grad", "real", "imag"})
"""Attributes of a tensor that are tensors."""
_EMPTY = frozenset(f"{name}empty{end}" for name in ("", "new_") for end in ("", "_strided")) | {
    "empty_like",
    "empty_permuted",
}
"""Functions that return memory without numbers of its own."""
_MAY_DRAW = ("rrelu", "rrelu_", "scaled_dot_product_attention", "multi_head_attention_forward")
_UNKNOWN = "an unknown line"


def name_of(func: Any) -> str:
    """Return the name of a function of torch, or ""."""
    return getattr(func, "__name__", "")


def reads_metadata(func: Any) -> bool:
    """Return whether a function of torch reads no number: only a shape, say, or a dtype.

    Whether a mode is told of it depends on whether the tensor is fake.
    """
    name = name_of(func)
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _TENSORS
    return name in _METADATA


def may_draw(name: str) -> bool:
    """Return whether a function of torch, by its name, draws random numbers if its rate is not 0.

    The rate may be one of the input, and be 0 when a plan is made.
    """
    return "dropout" in name or name in _MAY_DRAW


def clear_new(func: Any, made: Any) -> None:
    """Set what a function of torch leaves as the memory was to 0, so that runs can be compared."""
    if name_of(func) in _EMPTY and isinstance(made, torch.Tensor) and not is_fake(made):
        with torch.no_grad():
            made.zero_()


def is_in_place(name: str) -> bool:
    """Return whether a function of torch changes its first argument, by its name."""
    return name in _IN_PLACE or (name.endswith("_") and not name.startswith("__"))


def changed_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function of torch, by its name, is called to change: a tensor or several."""
    return kwargs["out"] if "out" in kwargs else args[0] if is_in_place(name) else None


def first_uses(
    func: Any, args: tuple[Any, ...], tensors: Sequence[torch.Tensor], unused: dict[int, str]
) -> dict[str, bool]:
    """Return the names of the buffers in `unused` that a call uses, and whether it overwrites each.

    They are removed from `unused`, which has the names by the id of each buffer.
    """
    if not unused or reads_metadata(func):
        return {}
    is_copy = name_of(func) == "copy_"
    return {
        name: is_copy and tensor is args[0] and sum(one is tensor for one in tensors) == 1
        for tensor in tensors
        if (name := unused.pop(id(tensor), ""))
    }


def with_places(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an indexing with the places that masks select instead of the masks.

    A mask that depends on the input alone has numbers, so it is known how many elements of a
    stand-in it selects. torch computes ``tensor[mask]`` as ``tensor[mask.nonzero(as_tuple=True)]``.
    """
    if name != "__getitem__" or not any(map(_is_mask, _indices(args))):
        return args
    with without_fake_modes():
        places = [
            place
            for one in _indices(args)
            for place in (one.nonzero(as_tuple=True) if _is_mask(one) else (one,))
        ]
    return args[0], tuple(places)


def _indices(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[1] if isinstance(args[1], tuple) else args[1:]


def _is_mask(index: Any) -> bool:
    is_bool = isinstance(index, torch.Tensor) and index.dtype is torch.bool
    return is_bool and index.dim() > 0 and not is_fake(index)


def is_hidden(func: Any) -> bool:
    """Return whether torch's own code for fake tensors calls a function of torch.

    No mode has seen the function that the model has called: TorchScript runs it.
    """
    frame = sys._getframe(1) if type(func).__name__ == "OpOverload" else None
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_SHOWN):
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False


def line_of_the_user() -> str:
    """Return the file and line of the user's or a library's code that called torch now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_SHOWN):
        frame = frame.f_back
    if frame.f_back is None:  # the command of a process, which is pipeworker's
        return _UNKNOWN
    return _line(frame.f_code, frame.f_lineno)


def line_of_error(error: BaseException) -> str:
    """Return the last file and line of the user's or a library's code that raised an error."""
    found = _UNKNOWN
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(_NOT_SHOWN):
            found = _line(code, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _line(code: CodeType, number: int) -> str:
    """Return ``net.py:8``; code of ``exec`` or of a notebook's cell has no file."""
    path = Path(code.co_filename)
    if path.is_file():
        return f"{path.name}:{number}"
    return f"line {number} of code that has no file ({path.name}, in {code.co_name})"


class Counting(TorchFunctionMode):
    """Passes each call of a function of torch outside of units to a run."""

    def __init__(self, operation: Callable[..., Any]) -> None:
        super().__init__()
        self._operation = operation

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._operation(func, args, kwargs or {})


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a nested value, in order, as ``tree_leaves`` in less time."""
    kind = type(value)
    if kind is tuple or kind is list:
        return [leaf for item in value for leaf in leaves_of(item)]
    if kind is dict:
        return [leaf for item in value.values() for leaf in leaves_of(item)]
    is_container = kind in pytree.SUPPORTED_NODES or is_namedtuple(kind)
    return pytree.tree_leaves(value) if is_container else [value]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested value, in order, each as often as it occurs."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def key_of(leaf: Any, lasting: Sequence[Container[int]]) -> Any:
    """Return what stands for an argument in a key: the id of a tensor that lasts, or its shape."""
    if isinstance(leaf, torch.Tensor):
        lasts = any(id(leaf) in ids for ids in lasting)
        return id(leaf) if lasts else (leaf.shape, leaf.dtype)
    if isinstance(leaf, slice):  # it has no hash before Python 3.12
        return slice, leaf.start, leaf.stop, leaf.step
    return type(leaf), leaf


def descriptions(leaves: Sequence[Any], name: str) -> tuple[Any, ...]:
    """Return each leaf of a value as plain data.

    Of a tensor it is shape, dtype, `requires_grad`, and strides, or None if it is contiguous.
    """
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            dtype = str(leaf.dtype).removeprefix("torch.")
            found.append((tuple(leaf.shape), dtype, leaf.requires_grad, stride_of(leaf)))
        elif type(leaf) in PLAIN_TYPES:
            found.append(encode_scalar(leaf))
        else:
            kind = type(leaf).__name__
            advice = "cut the model by hand, as a list of layers"
            if is_dataclass(leaf):
                advice = f"register it (torch.export.register_dataclass({kind})), or {advice}"
            elif tensors_of([*getattr(leaf, "__dict__", {}).values()]):
                advice = f"register it (torch.utils._pytree.register_pytree_node), or {advice}"
            raise UsageError(
                f"{name}: returns or is called with {a_type(leaf)}, of which a pipeline cannot "
                f"tell what it holds; {advice}"
            )
    return tuple(found)


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that an input stands for."""
    if hasattr(batch, "keys"):
        return (), {key: batch[key] for key in batch.keys()}  # noqa: SIM118
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def numbers_of(tensors: Sequence[torch.Tensor], numbers: dict[int, Number]) -> Iterator[Number]:
    """Yield the numbers of those tensors that have one."""
    for tensor in tensors:
        number = numbers.get(id(tensor))
        if number is not None:
            yield number
