"""How a value nests, as plain data: what it is made of goes by number, never by name.

Plain containers have fixed numbers. Named tuples, registered pytree nodes and enums have those that
were agreed on when the job was described (:class:`Kinds`): a peer cannot name a class, so nothing
is imported or called because a peer said so. What an agreed class needs besides its children, its
context, crosses as plain data and is read by the functions the user registered for the class here.

A structure is 0 for a leaf, and ``(number, context, *children)`` for a container; structures that
are equal say the same, down to the types and bits of their keys.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch

from pipeworker.errors import PipeworkerError, ProtocolError
from pipeworker.worker.internals import pytree

Structure = int | tuple[Any, ...]
Coded = str | bytes | tuple[Any, ...] | None

LEAF = 0
PLAIN = (bool, int, float, str, bytes, type(None))
DEEPEST = 128
"""Levels of nesting; Python's own stack is good for several times that."""
MOST_ITEMS = 1 << 17
"""What one container may hold, and the leaves of a value."""

_TUPLE, _LIST, _DICT, _ORDERED, _DEFAULT, _DEQUE = range(1, 7)
_NUMBERS: dict[type, int] = dict(
    zip((tuple, list, dict, OrderedDict, defaultdict, deque), range(1, 7), strict=True)
)
_AGREED = 16
"""The first agreed class has this number."""
_FACTORIES: tuple[Callable[[], Any] | None, ...] = (
    *(None, list, dict, tuple, set, int, float, str, bool, bytes, OrderedDict),
)
"""What a defaultdict may make."""
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, *PLAIN})
_BOOL, _INT, _FLOAT, _ENUM, _OF_LIST, _OF_TUPLE, _OF_DICT = range(7)  # what is coded
_WORD = 1 << 63


class Kinds:
    """The classes that all workers agreed on; a number stands for each."""

    def __init__(self, classes: Iterable[type] = ()) -> None:
        self.classes = tuple(classes)
        self.numbers = {kind: number for number, kind in enumerate(self.classes)}


NONE = Kinds()


def is_named(kind: type) -> bool:
    """Whether these are named tuples."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")


def take_apart(value: Any, kinds: Kinds) -> tuple[list[Any], Structure]:
    """The leaves of a value, and its structure.

    Raises:
        PipeworkerError: it cannot be told to another process.
    """
    leaves: list[Any] = []
    structure = _apart(value, kinds, leaves, DEEPEST)
    if len(leaves) > MOST_ITEMS:
        raise PipeworkerError(
            f"a value of {len(leaves)} parts cannot pass from one stage to the next: make tensors "
            "of them"
        )
    return leaves, structure


def _apart(value: Any, kinds: Kinds, leaves: list[Any], room: int) -> Structure:
    kind = type(value)
    number = _NUMBERS.get(kind)
    children: Sequence[Any]
    context: Any = None
    if number is None:
        if kind in _LEAVES or isinstance(value, torch.Tensor) or not _is_node(kind):
            leaves.append(value)
            return LEAF
        number, children, context = _agreed(value, kind, kinds)
    elif number <= _LIST:
        children = value
    elif number == _DEQUE:
        children, context = tuple(value), value.maxlen
    else:
        children, context = tuple(value.values()), _keys(value, kinds)
        if number == _DEFAULT:
            if value.default_factory not in _FACTORIES:
                raise PipeworkerError(
                    f"a defaultdict of {value.default_factory!r} cannot pass from one stage to the "
                    "next: make it a dict"
                )
            context = (_FACTORIES.index(value.default_factory), context)
    if not room or len(children) > MOST_ITEMS:
        raise PipeworkerError(
            f"a {kind.__name__} cannot pass from one stage to the next: it "
            + ("nests too deeply" if not room else f"has {len(children)} parts")
        )
    if _LEAVES.issuperset(map(type, children)):
        leaves += children
        return number, context, *[LEAF] * len(children)
    return number, context, *[_apart(child, kinds, leaves, room - 1) for child in children]


def _is_node(kind: type) -> bool:
    return kind in pytree.SUPPORTED_NODES or is_named(kind)


def _agreed(value: Any, kind: type, kinds: Kinds) -> tuple[int, Sequence[Any], Coded]:
    """The number of an agreed class, its children and its context."""
    number = kinds.numbers.get(kind)
    if number is None:
        raise PipeworkerError(
            f"a {kind.__module__}.{kind.__qualname__} cannot pass from one stage to the next: when "
            "the job was described, not every worker knew it. Define it at the top of the job file "
            "or of a module that it imports there, and register it there unless it is a named "
            "tuple, or give its parts as a tuple"
        )
    if is_named(kind):
        return _AGREED + number, tuple(value), None
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    dump = pytree.SUPPORTED_SERIALIZED_TYPES[kind].to_dumpable_context
    if dump is not None:
        context = dump(context)
    return _AGREED + number, tuple(children), _coded(context, kinds, DEEPEST)


def put_together(structure: Structure, leaves: Iterator[Any], kinds: Kinds) -> Any:
    """The value of a structure and its leaves.

    Raises:
        PipeworkerError: what the user registered for a class does not take what arrived.
    """
    if not isinstance(structure, tuple):
        return next(leaves)
    number, context, *parts = structure
    children = [
        next(leaves) if part == LEAF else put_together(part, leaves, kinds) for part in parts
    ]
    if number == _LIST:
        return children
    if number == _TUPLE:
        return tuple(children)
    if number == _DICT:
        return dict(zip(_decoded_keys(context, kinds), children, strict=True))
    if number == _ORDERED:
        return OrderedDict(zip(_decoded_keys(context, kinds), children, strict=True))
    if number == _DEFAULT:
        factory, keys = context
        pairs = zip(_decoded_keys(keys, kinds), children, strict=True)
        return defaultdict(_FACTORIES[factory], pairs)
    if number == _DEQUE:
        return deque(children, context)
    kind = kinds.classes[number - _AGREED]
    try:
        return _made(kind, children, decoded(context, kinds))
    except Exception as error:
        raise PipeworkerError(
            f"a {kind.__module__}.{kind.__qualname__} could not be put together from what "
            f"arrived: {type(error).__name__}: {error}"
        ) from error


def _made(kind: type, children: list[Any], context: Any) -> Any:
    if is_named(kind):
        return kind(*children)
    load = pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context
    if load is not None:
        context = load(context)
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, context)


def check(structure: Any, kinds: Kinds, room: int = DEEPEST) -> int:
    """How many leaves a structure has that a peer sent, with tuples for arrays.

    Raises:
        ProtocolError: it is none, or of a class that was not agreed on.
    """
    if type(structure) is int and structure == LEAF:
        return 1
    if type(structure) is not tuple or len(structure) < 2 or type(structure[0]) is not int:
        raise _bad("is not a structure")
    if not room:
        raise _bad("nests too deeply")
    number, context, *parts = structure
    if number in (_TUPLE, _LIST):
        right = context is None
    elif number in (_DICT, _ORDERED):
        right = _are_keys(context, len(parts), kinds)
    elif number == _DEFAULT:
        right = (
            type(context) is tuple
            and len(context) == 2
            and type(context[0]) is int
            and 0 <= context[0] < len(_FACTORIES)
            and _are_keys(context[1], len(parts), kinds)
        )
    elif number == _DEQUE:
        right = context is None or (type(context) is int and len(parts) <= context < _WORD)
    else:
        right = _is_agreed(number - _AGREED, context, len(parts), kinds)
    if not right:
        raise _bad("has a container that is not one")
    if set(map(type, parts)) == {int} and not any(parts):
        return len(parts)
    return sum([check(part, kinds, room - 1) for part in parts])


def _is_agreed(number: int, context: Any, count: int, kinds: Kinds) -> bool:
    if not 0 <= number < len(kinds.classes):
        return False
    kind: Any = kinds.classes[number]
    if is_named(kind):
        return context is None and count == len(kind._fields)
    decoded(context, kinds)
    return kind in pytree.SUPPORTED_NODES


# Keys and contexts: strings, bytes and None stand for themselves, all else has its type with it.


def _keys(value: Iterable[Any], kinds: Kinds) -> tuple[Coded, ...]:
    keys = tuple(value)
    if set(map(type, keys)) <= {str}:
        return keys
    return tuple([_coded(key, kinds, 0) for key in keys])


def _decoded_keys(coded: tuple[Any, ...], kinds: Kinds) -> Sequence[Any]:
    return [key if type(key) is str else decoded(key, kinds, 0) for key in coded]


def _are_keys(coded: Any, count: int, kinds: Kinds) -> bool:
    if type(coded) is not tuple or len(coded) != count:
        return False
    return len(set(_decoded_keys(coded, kinds))) == count


def coded_scalar(value: Any) -> Coded:
    """A plain value with what makes it exact: 1, 1.0 and True are equal, and so are 0.0 and -0.0.

    Its type is one of `PLAIN`.
    """
    kind = type(value)
    if kind is int:
        return _INT, value
    if kind is bool:
        return _BOOL, int(value)
    if kind is float:
        return _FLOAT, value.hex()
    coded: Coded = value
    return coded


def _coded(value: Any, kinds: Kinds, room: int) -> Coded:
    """A key (without room) or a context as plain data."""
    kind = type(value)
    if kind in PLAIN:
        return coded_scalar(value)
    if isinstance(value, Enum) and kind in kinds.numbers and value.name in kind.__members__:
        return _ENUM, kinds.numbers[kind], value.name
    if not room or kind not in (list, tuple, dict, OrderedDict) or len(value) > MOST_ITEMS // 2:
        what = "the context of a registered class has" if room else "a dict has the key"
        raise PipeworkerError(
            f"the output of a stage cannot be described: {what} {_short(value)}, and only plain "
            "values (numbers, strings, bytes, None, enums of the job file) can pass there"
        )
    if kind in (list, tuple):
        items = [_coded(item, kinds, room - 1) for item in value]
        return _OF_LIST if kind is list else _OF_TUPLE, *items
    pairs = [(_coded(key, kinds, 0), _coded(item, kinds, room - 1)) for key, item in value.items()]
    return _OF_DICT, *[half for pair in pairs for half in pair]


def decoded(coded: Any, kinds: Kinds, room: int = DEEPEST) -> Any:
    """The value of what is coded; without room, a plain one alone.

    Raises:
        ProtocolError: it is not what is coded.
    """
    if type(coded) in (str, bytes, type(None)):
        return coded
    if type(coded) is not tuple or not coded or type(coded[0]) is not int:
        raise _bad("has a value that is none")
    tag, *items = coded
    if tag in (_OF_LIST, _OF_TUPLE, _OF_DICT) and room:
        if tag == _OF_LIST:
            return [decoded(item, kinds, room - 1) for item in items]
        if tag == _OF_TUPLE:
            return tuple([decoded(item, kinds, room - 1) for item in items])
        if len(items) % 2:
            raise _bad("has a key without a value")
        keys = _decoded_keys(coded[1::2], kinds)
        found = dict(zip(keys, [decoded(i, kinds, room - 1) for i in items[1::2]], strict=True))
        if len(found) < len(keys):
            raise _bad("has a key twice")
        return found
    if len(items) == 1:
        (item,) = items
        if tag == _INT and type(item) is int:
            return item
        if tag == _BOOL and type(item) is int and item in (0, 1):
            return item == 1
        if tag == _FLOAT and type(item) is str:
            return _float(item)
    elif tag == _ENUM and len(items) == 2 and (type(items[0]), type(items[1])) == (int, str):
        number, name = items
        kind: Any = kinds.classes[number] if 0 <= number < len(kinds.classes) else None
        if kind is not None and issubclass(kind, Enum) and name in kind.__members__:
            return kind.__members__[name]
    raise _bad("has a value that is none")


def _float(text: str) -> float:
    try:
        value: float | None = float.fromhex(text)
    except (ValueError, OverflowError):
        value = None
    if value is None or value.hex() != text:
        raise _bad("has a number that is none")
    return value


def _bad(what: str) -> ProtocolError:
    return ProtocolError(f"what a neighbour sent {what}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
