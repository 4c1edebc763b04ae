"""The structure of nested values as plain data, in which numbers stand for classes.

Plain containers have fixed numbers. Named tuples, registered pytree nodes and enums have the
numbers of the job's :class:`TypeRegistry`, so nothing is imported or called because a peer asked
for it. The data that an agreed class needs besides its children, its context, crosses as a
structure and its plain leaves, and is read by the functions that the user registered.

A structure is 0 for a leaf, and ``(number, context, *children)`` for a container. Equal structures
are equal down to the types and bits of their keys.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import torch

from pipeworker.errors import PipeworkerError, ProtocolError, with_article
from pipeworker.worker.internals import pytree
from pipeworker.worker.transport.layout import DTYPES, cannot_pass

Structure = int | tuple[Any, ...]
Encoded = str | bytes | tuple[Any, ...] | None
"""A plain value in an exact form: strings, bytes and None as they are, others with their type."""

LEAF = 0
PLAIN_TYPES = (bool, int, float, str, bytes, type(None), complex, slice, range, torch.dtype)
MAX_DEPTH = 128
"""Levels of nesting; Python's own stack has room for several times that."""
MAX_ITEMS = 1 << 17
"""The most items of one container, and the most leaves of a value."""

_TUPLE, _LIST, _DICT, _ORDERED, _DEFAULT, _DEQUE = range(1, 7)
_TYPES = (tuple, list, dict, OrderedDict, defaultdict, deque)
_NUMBERS: dict[type, int] = {kind: number for number, kind in enumerate(_TYPES, 1)}
_FIRST_AGREED = 16
"""The number of the first agreed class."""
_FACTORIES: tuple[type | None, ...]
_FACTORIES = None, list, dict, tuple, set, int, float, str, bool, bytes, OrderedDict
"""The default factories that a defaultdict may have."""
_LEAF_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, *PLAIN_TYPES})
# The tags of encoded values.
_BOOL, _INT, _FLOAT, _ENUM, _KEYS, _LONG, _COMPLEX, _SLICE, _RANGE, _DTYPE = range(10)
_MADE_OF_PARTS: dict[int, tuple[int, set[type]]] = {
    _COMPLEX: (2, {str}),
    _SLICE: (3, {tuple, type(None)}),
    _RANGE: (3, {tuple}),
}
"""The number of parts of an encoded value, and their types, by its tag."""
_WORD = 1 << 63
_NODES = getattr(pytree, "SUPPORTED_NODES", ())  # a torch without it is named after all imports
_OF_TORCH = [kind for kind in _NODES if kind.__module__ == "torch.return_types"]
"""The classes of what functions of torch return, as ``torch.max(x, 1)``."""


class TypeRegistry:
    """The classes on which all workers agreed, and torch's own; a number stands for each."""

    def __init__(self, classes: Iterable[type] = ()) -> None:
        self.classes = (*classes, *_OF_TORCH)
        self.numbers = {kind: number for number, kind in enumerate(self.classes)}


NO_TYPES = TypeRegistry()


def is_namedtuple(kind: type) -> bool:
    """Return whether a class is one of named tuples."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")


def flatten(
    value: Any, types: TypeRegistry, depth_left: int = MAX_DEPTH
) -> tuple[list[Any], Structure]:
    """Return the leaves of a value and its structure."""
    leaves: list[Any] = []
    structure = _flatten(value, types, leaves, depth_left)
    if len(leaves) > MAX_ITEMS:
        raise cannot_pass(f"a value of {len(leaves)} parts", "make tensors of them")
    return leaves, structure


def _flatten(value: Any, types: TypeRegistry, leaves: list[Any], depth_left: int) -> Structure:
    kind = type(value)
    number = _NUMBERS.get(kind)
    children: Sequence[Any]
    context: Any = None
    if number is None:
        if (
            kind in _LEAF_TYPES
            or isinstance(value, torch.Tensor)
            or not (kind in pytree.SUPPORTED_NODES or is_namedtuple(kind))
        ):
            leaves.append(value)
            return LEAF
        number, children, context = _flatten_agreed(value, kind, types, max(0, depth_left - 1))
    elif number <= _LIST:
        children = value
    elif number == _DEQUE:
        children, context = tuple(value), value.maxlen
    else:
        children, context = tuple(value.values()), _encode_keys(value, types)
        if number == _DEFAULT:
            if value.default_factory not in _FACTORIES:
                raise cannot_pass(f"a defaultdict of {value.default_factory!r}", "make it a dict")
            context = (_FACTORIES.index(value.default_factory), context)
    if not depth_left or len(children) > MAX_ITEMS:
        reason = "it nests too deeply" if not depth_left else f"it has {len(children)} parts"
        raise cannot_pass(with_article(kind.__name__), reason)
    if _LEAF_TYPES.issuperset(map(type, children)):
        leaves += children
        return number, context, *[LEAF] * len(children)
    return number, context, *[_flatten(child, types, leaves, depth_left - 1) for child in children]


def _flatten_agreed(
    value: Any, kind: type, types: TypeRegistry, depth_left: int
) -> tuple[int, Sequence[Any], Any]:
    """Return the number of an agreed class, and the value's children and context."""
    number = types.numbers.get(kind)
    if number is None:
        raise cannot_pass(
            with_article(f"{kind.__module__}.{kind.__qualname__}"),
            "when the job was described, not every worker knew it. Define it at the top of the job "
            "file or of a module that it imports there, and register it there unless it is a named "
            "tuple, or give its parts as a tuple",
        )
    if is_namedtuple(kind):
        return _FIRST_AGREED + number, tuple(value), None
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    dump = pytree.SUPPORTED_SERIALIZED_TYPES[kind].to_dumpable_context
    if dump is not None:
        context = dump(context)
    leaves, structure = flatten(context, types, depth_left)
    encoded = [_encode(leaf, types, "the context of a registered class has") for leaf in leaves]
    return _FIRST_AGREED + number, tuple(children), (structure, *encoded)


def unflatten(structure: Structure, leaves: Iterator[Any], types: TypeRegistry) -> Any:
    """Return the value of a structure and its leaves."""
    if not isinstance(structure, tuple):
        return next(leaves)
    number, context, *parts = structure
    children = [next(leaves) if part == LEAF else unflatten(part, leaves, types) for part in parts]
    if number == _LIST:
        return children
    if number == _TUPLE:
        return tuple(children)
    if number == _DEQUE:
        return deque(children, context)
    if number < _FIRST_AGREED:
        factory, keys = context if number == _DEFAULT else (0, context)
        pairs = zip(_decode_keys(keys, types), children, strict=True)
        if number == _DEFAULT:
            return defaultdict(_FACTORIES[factory], pairs)
        return dict(pairs) if number == _DICT else OrderedDict(pairs)
    kind = types.classes[number - _FIRST_AGREED]
    try:
        return _unflatten_agreed(kind, children, context, types)
    except Exception as error:
        name = with_article(f"{kind.__module__}.{kind.__qualname__}")
        raise PipeworkerError(
            f"{name} could not be made of what arrived: {type(error).__name__}: {error}"
        ) from error


def _unflatten_agreed(kind: type, children: list[Any], encoded: Any, types: TypeRegistry) -> Any:
    if is_namedtuple(kind):
        return kind(*children)
    if kind is torch.Size:  # of which torch's pytree makes a tuple
        return torch.Size(children)
    structure, *leaves = encoded
    context = unflatten(structure, iter([decode(leaf, types) for leaf in leaves]), types)
    load = pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context
    if load is not None:
        context = load(context)
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, context)


def count_leaves(structure: Any, types: TypeRegistry, depth_left: int = MAX_DEPTH) -> int:
    """Check a structure that a peer sent, with tuples for arrays; return its number of leaves."""
    if type(structure) is int and structure == LEAF:
        return 1
    if type(structure) is not tuple or len(structure) < 2 or type(structure[0]) is not int:
        raise _invalid("is not a structure")
    if not depth_left:
        raise _invalid("nests too deeply")
    number, context, *parts = structure
    if number in (_TUPLE, _LIST):
        valid = context is None
    elif number in (_DICT, _ORDERED):
        valid = _are_keys(context, len(parts), types)
    elif number == _DEFAULT:
        valid = (
            type(context) is tuple
            and len(context) == 2
            and type(context[0]) is int
            and 0 <= context[0] < len(_FACTORIES)
            and _are_keys(context[1], len(parts), types)
        )
    elif number == _DEQUE:
        valid = context is None or (type(context) is int and len(parts) <= context < _WORD)
    else:
        valid = _is_agreed(number - _FIRST_AGREED, context, len(parts), types, depth_left - 1)
    if not valid:
        raise _invalid("has an invalid container")
    if set(map(type, parts)) == {int} and not any(parts):
        return len(parts)
    return sum([count_leaves(part, types, depth_left - 1) for part in parts])


def _is_agreed(number: int, context: Any, count: int, types: TypeRegistry, depth_left: int) -> bool:
    if not 0 <= number < len(types.classes):
        return False
    kind: Any = types.classes[number]
    if is_namedtuple(kind):
        return context is None and count == len(kind._fields)
    if type(context) is not tuple or not context:
        return False
    structure, *leaves = context
    for leaf in leaves:
        decode(leaf, types)
    known = kind in pytree.SUPPORTED_NODES
    return known and count_leaves(structure, types, depth_left) == len(leaves)


# Keys, and the leaves of contexts.


def _encode_keys(value: Iterable[Any], types: TypeRegistry) -> tuple[Encoded, ...]:
    keys = tuple(value)
    if set(map(type, keys)) <= {str}:
        return keys
    return tuple([_encode(key, types, "a dict has the key") for key in keys])


def _decode_keys(encoded: tuple[Any, ...], types: TypeRegistry) -> Sequence[Any]:
    return [key if type(key) is str else decode(key, types) for key in encoded]


def _are_keys(encoded: Any, count: int, types: TypeRegistry) -> bool:
    if type(encoded) is not tuple or len(encoded) != count:
        return False
    try:
        return len(set(_decode_keys(encoded, types))) == count
    except TypeError:  # before Python 3.12 a slice has no hash
        return False


def encode_scalar(value: Any) -> Encoded:
    """Return a value of one of :data:`PLAIN_TYPES` in its exact form.

    1, 1.0 and True are equal in Python, as are 0.0 and -0.0; their exact forms differ.
    """
    kind = type(value)
    if kind is int:  # msgpack has 64 bits
        return (_INT, value) if -_WORD <= value < _WORD else (_LONG, hex(value))
    if kind is bool:
        return _BOOL, int(value)
    if kind is float:
        return _FLOAT, value.hex()
    if kind is complex:
        return _COMPLEX, (value.real.hex(), value.imag.hex())
    if kind in (slice, range):
        parts = value.start, value.stop, value.step
        if not {*map(type, parts)} <= {int, type(None)}:
            raise cannot_pass(f"a {kind.__name__} of {_short(value)}", "use integers and None")
        return _SLICE if kind is slice else _RANGE, tuple(map(encode_scalar, parts))
    if kind is torch.dtype:
        name = str(value).removeprefix("torch.")
        if name not in DTYPES:
            raise cannot_pass(f"the dtype {value}", "it is that of a quantized tensor")
        return _DTYPE, name
    encoded: Encoded = value
    return encoded


def _encode(value: Any, types: TypeRegistry, place: str) -> Encoded:
    """Return a key, or a leaf of a context, in its exact form."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        return encode_scalar(value)
    if kind is tuple:
        return _KEYS, tuple(_encode(item, types, place) for item in value)
    if isinstance(value, Enum) and kind in types.numbers and value.name in kind.__members__:
        return _ENUM, types.numbers[kind], value.name
    raise PipeworkerError(
        f"the output of a stage cannot be described: {place} {_short(value)}, and only plain "
        "values (numbers, strings, bytes, None, tuples of them, enums of the job file) can pass"
    )


def decode(encoded: Any, types: TypeRegistry, depth_left: int = MAX_DEPTH) -> Any:
    """Return the value of an exact form that a peer sent."""
    if type(encoded) in (str, bytes, type(None)):
        return encoded
    if type(encoded) is not tuple or not encoded or type(encoded[0]) is not int:
        raise _invalid("has an invalid value")
    tag, *items = encoded
    if len(items) == 1:
        (item,) = items
        if tag == _INT and type(item) is int:
            return item
        if tag == _BOOL and type(item) is int and item in (0, 1):
            return item == 1
        if tag == _LONG and type(item) is str:
            return _decode_long(item)
        if tag == _FLOAT and type(item) is str:
            return _decode_float(item)
        if tag == _DTYPE and type(item) is str and item in DTYPES:
            return DTYPES[item]
        if type(item) is tuple and depth_left:
            if tag == _KEYS:
                return tuple(decode(one, types, depth_left - 1) for one in item)
            if tag in _MADE_OF_PARTS:
                return _decode_parts(tag, item, types)
    elif tag == _ENUM and len(items) == 2 and (type(items[0]), type(items[1])) == (int, str):
        number, name = items
        kind: Any = types.classes[number] if 0 <= number < len(types.classes) else None
        if kind is not None and issubclass(kind, Enum) and name in kind.__members__:
            return kind.__members__[name]
    raise _invalid("has an invalid value")


def _decode_parts(tag: int, parts: tuple[Any, ...], types: TypeRegistry) -> Any:
    count, kinds = _MADE_OF_PARTS[tag]
    if len(parts) == count and {*map(type, parts)} <= kinds:
        if tag == _COMPLEX:
            return complex(*map(_decode_float, parts))
        numbers = [decode(part, types, 0) for part in parts]
        if {*map(type, numbers)} <= {int, type(None)}:
            with suppress(TypeError, ValueError):
                return slice(*numbers) if tag == _SLICE else range(*numbers)
    raise _invalid("has an invalid value")


def _decode_long(text: str) -> int:
    with suppress(ValueError):
        value = int(text, 16)
        if hex(value) == text and not -_WORD <= value < _WORD:
            return value
    raise _invalid("has an invalid number")


def _decode_float(text: str) -> float:
    with suppress(ValueError, OverflowError):
        value = float.fromhex(text)
        if value.hex() == text:
            return value
    raise _invalid("has an invalid number")


def _invalid(reason: str) -> ProtocolError:
    return ProtocolError(f"the data of a neighbour {reason}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
