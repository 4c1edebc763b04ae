"""Whose fault it is, caught where it happens.

Every call of the user's code is made inside :func:`users`, or says :func:`raised` itself where a
context manager would cost too much. What comes out of it is the user's. Any other exception is a
defect of ours, and is shown with our frames.
"""

from __future__ import annotations

import os
import traceback
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

import pipeworker
from pipeworker.errors import PeerLost, PipeworkerError, SkipError, UsageError
from pipeworker.wire.messages.failure import Cause, Failure
from pipeworker.wire.messages.limits import MOST_STATUSES
from pipeworker.wire.messages.position import Position

_OURS = f"{Path(pipeworker.__file__).parent}{os.sep}"
_MOST_CHARACTERS = 20_000
_CPU_MEMORY = "DefaultCPUAllocator: "
"""What torch says in a RuntimeError when the host has no memory left."""
_LESS_MEMORY = (
    "\n  out of memory: {}more --microbatches make each smaller, --recompute always or offload "
    "keeps less of them, and more --stages or another --balance give this one fewer layers"
)
_NOT_DETERMINISTIC = "does not have a deterministic implementation"
"""What torch says of a kernel under ``use_deterministic_algorithms``."""
_OTHER_KERNEL = (
    "\n  give the layer another operation, or leave out --deterministic: docs/networks.md says "
    "what it is for"
)
_NO_HOOKS = "saved tensor hooks"
"""What torch says does not go together with ``torch.func``."""
_OTHER_MODE = "\n  --recompute offload moves what graphs save by such hooks: take another mode"
THEIRS = BaseException
"""What the user's code may raise; an interrupt from the keyboard passes through it."""


class Raised(Exception):
    """The user's code raised; the cause is its own exception.

    Attributes:
        who: of the user's: ``layer 3 (Linear)``, ``data()``.
        early: what cannot be loaded or built is wrong; what fails in a step has failed.
        note: what it was given.
    """

    def __init__(self, who: str, error: BaseException, *, early: bool, note: str) -> None:
        super().__init__(f"{who} raised {text(error)}{note and f' ({note})'}")
        self.early = early
        self.error = error


class Left(Raised):
    """The user's code ended its process before anything began, as a parser of arguments does.

    Attributes:
        status: the exit status that it chose.
        said: why, in its own words; what it has printed comes before that.
    """

    error: SystemExit

    def __init__(self, who: str, error: SystemExit) -> None:
        super().__init__(who, error, early=True, note="")
        code = error.code
        plain = code is None or isinstance(code, int)
        self.status = int(code or 0) % MOST_STATUSES if plain else 1
        self.said = "" if plain else str(code)
        self._who = who

    def words(self) -> str:
        """What the user is shown of it."""
        return self.said or f"{self._who} ended with exit status {self.status} and said nothing"


def raised(who: str, error: BaseException, *, early: bool = False, note: str = "") -> NoReturn:
    """Say that the user's code raised; what is an error of ours already stays as it is."""
    if isinstance(error, (PipeworkerError, Raised, KeyboardInterrupt, GeneratorExit)):
        raise error
    if isinstance(error, SystemExit) and early:
        raise Left(who, error) from error
    if isinstance(error, BdbQuit):  # the user has left the debugger
        raise KeyboardInterrupt from error
    raise Raised(who, error, early=early, note=note) from error


@contextmanager
def users(who: str, *, early: bool = False) -> Iterator[None]:
    """Run code of the user's."""
    try:
        yield
    except THEIRS as error:
        raised(who, error, early=early)


def refuse_nothing(given: Any, by: str, who: str, error: BaseException) -> None:
    """Where the user's code raised on a None, it is the layer that returned it who is to blame.

    Raises:
        UsageError: so it is.
    """
    if given is None and isinstance(error, Exception):
        raise UsageError(
            f"{by} returned None, on which {who} raised {text(error)}: the forward of a layer must "
            "return its output"
        ) from None


def layer(index: int, kind: str) -> str:
    """``layer 3 (Linear)``."""
    return f"layer {index} ({kind})" if kind else f"layer {index}"


def failure_of(
    error: BaseException,
    rank: int,
    position: Position,
    layer_class: str = "",
    stage: str = "",
    keeps: str = "",
) -> Failure:
    """Describe `error`, raised while the worker was at `position`.

    Args:
        keeps: what the plan has it keep, for who runs out of memory.
    """
    less = _LESS_MEMORY.format(keeps and f"{keeps}; ")

    def failure(cause: Cause, message: str, shown: str = "") -> Failure:
        return Failure(cause, message, rank, position, layer_class, _cut(shown), stage)

    if isinstance(error, Left):
        return replace(failure(Cause.EXIT, _cut(error.words())), status=error.status)
    if isinstance(error, Raised):
        cause = Cause.USAGE if error.early else Cause.USER
        cure = less if _is_out_of_memory(error.error) else ""
        if isinstance(error.error, RuntimeError) and _NOT_DETERMINISTIC in str(error.error):
            cure = _OTHER_KERNEL
        if isinstance(error.error, RuntimeError) and _NO_HOOKS in str(error.error):
            cure = _OTHER_MODE
        return failure(cause, f"{error}{cure}", user_traceback(error.error))
    if isinstance(error, PeerLost):
        return failure(Cause.PEER, str(error))
    if isinstance(error, UsageError) and not (isinstance(error, SkipError) and error.in_step):
        return failure(Cause.USAGE, str(error))
    if isinstance(error, PipeworkerError):
        return failure(Cause.USER, str(error))
    if isinstance(error, KeyboardInterrupt):
        return failure(Cause.USER, "KeyboardInterrupt", user_traceback(error))
    if _is_out_of_memory(error):
        return failure(Cause.USER, f"{text(error)}{less}")
    whole = "".join(traceback.format_exception(error))
    return failure(Cause.INTERNAL, f"a defect in pipeworker: {text(error)}", whole)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and _CPU_MEMORY in str(error)
    )


def text(error: BaseException) -> str:
    """``ValueError: what it says``."""
    return _cut(f"{type(error).__name__}: {error}".rstrip(": "))


def _cut(text: str) -> str:
    """A message that a tensor or a whole file got into must still fit a frame and a screen."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def user_traceback(error: BaseException) -> str:
    """The traceback without our frames, nor those of the import machinery."""
    shown = traceback.TracebackException.from_exception(error)
    _strip(shown, set())
    return "".join(shown.format())


def _strip(shown: traceback.TracebackException, seen: set[int]) -> None:
    if id(shown) in seen:
        return
    seen.add(id(shown))
    shown.stack = traceback.StackSummary.from_list(
        [
            frame
            for frame in shown.stack
            if not frame.filename.startswith((_OURS, "<frozen importlib"))
        ]
    )
    for other in (shown.__cause__, shown.__context__):
        if other is not None:
            _strip(other, seen)
