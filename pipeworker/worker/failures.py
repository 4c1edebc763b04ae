"""Turns an exception of a worker into a Failure: whose fault, where, and what the user sees."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pipeworker
from pipeworker.errors import PeerLost, PipeworkerError, SkipError, UsageError
from pipeworker.wire.messages import Cause, Failure, Phase, Position

_OURS = f"{Path(pipeworker.__file__).parent}{os.sep}"
_MOST_CHARACTERS = 20_000
_USER_PHASES = frozenset(
    {
        Phase.LOADING,
        Phase.BUILDING,
        Phase.READING,
        Phase.FORWARD,
        Phase.RECOMPUTE,
        Phase.BACKWARD,
        Phase.LOSS,
        Phase.UPDATE,
        Phase.EVALUATION,
        Phase.SURVEY,
    }
)


IN_LAYERS = frozenset({Phase.FORWARD, Phase.RECOMPUTE, Phase.EVALUATION})
"""Where a layer is given an input."""


def failure_of(
    error: BaseException, rank: int, position: Position, layer_class: str, note: str = ""
) -> Failure:
    """Describe `error`, raised while the worker was at `position`.

    Args:
        note: what the layer was given, added to the message.
    """
    shown = note and f" ({note})"
    in_step = position.step > 0 and position.phase in IN_LAYERS
    if isinstance(error, UsageError) and not (isinstance(error, SkipError) and in_step):
        return Failure(Cause.USAGE, str(error), rank, position, layer_class)
    if isinstance(error, PeerLost):
        return Failure(Cause.PEER, str(error), rank, position, layer_class)
    if isinstance(error, PipeworkerError):
        return Failure(Cause.USER, str(error), rank, position, layer_class)
    text = _cut(f"{type(error).__name__}: {error}".rstrip(": "))
    if position.phase not in _USER_PHASES:
        return Failure(
            Cause.INTERNAL,
            f"a defect in pipeworker: {text}",
            rank,
            position,
            layer_class,
            _cut("".join(traceback.format_exception(error))),
        )
    # A job file that cannot be loaded or built is wrong; one that fails in a step has failed.
    early = position.phase in (Phase.LOADING, Phase.BUILDING)
    message = f"{subject(position, layer_class)} raised {text}{shown}"
    cause = Cause.USAGE if early else Cause.USER
    return Failure(cause, message, rank, position, layer_class, _cut(user_traceback(error)))


def _cut(text: str) -> str:
    """A message that a tensor or a whole file got into must still fit a frame and a screen."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def subject(position: Position, layer_class: str) -> str:
    """Who raised."""
    match position.phase:
        case Phase.LOADING:
            return "the job file"
        case Phase.READING:
            return "data()"
        case Phase.LOSS:
            return "loss()"
        case Phase.UPDATE:
            return "the optimizer"
        case Phase.EVALUATION if position.layer < 0:
            return "evaluation()" if position.microbatch < 0 else "loss() or metrics()"
    if position.layer >= 0:
        name = f"layer {position.layer}" + (f" ({layer_class})" if layer_class else "")
        return f"building {name}" if position.phase is Phase.BUILDING else name
    return "model()" if position.phase is Phase.BUILDING else "the job"


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
