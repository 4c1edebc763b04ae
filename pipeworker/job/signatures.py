"""Checks of the signatures of a job's functions before anything runs, without a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_PATTERN = {
    "model": (),
    "data": (),
    "evaluation": (),
    "loss": ("output", "target"),
    "metrics": ("output", "target"),
    "optimizer": ("params",),
    "scheduler": ("optimizer",),
    "before_update": ("params",),
    "tokens": ("batch",),
    "on_step": ("row",),
    "on_evaluation": ("row",),
    "on_checkpoint": ("path",),
}
"""The arguments with which each name of a job is called."""
NAMES = tuple(_PATTERN)
_MAY_START = ("data", "evaluation")
"""Names that may take the number of mini-batches to skip."""
_MAY_BE_CLASSES = ("model", "data", "evaluation", "optimizer", "scheduler")
"""Names whose call returns an instance."""


def pattern(name: str) -> str:
    """Return how a name of a job is called: ``loss(output, target)``."""
    return f"{name}({', '.join(_PATTERN[name])})"


def with_start(data: Callable[..., Any]) -> Callable[[int], Any] | None:
    """Return `data` as a function of the mini-batches to skip; None if it is called without.

    It takes their number in a parameter ``start``, or in the only one that it requires. A ``start``
    that ``functools.partial`` has set, or whose default is another number than 0, means the place
    in a data set.
    """
    found = signature(data)
    parameter = found.parameters.get("start") if found else None
    if found is None or (parameter is not None and parameter.kind in _ANY_NUMBER):
        return None
    if parameter is not None and _has_own_value(data, parameter):
        parameter = None
    if parameter is not None and parameter.kind is not parameter.POSITIONAL_ONLY:
        return (lambda start: data(start=start)) if _binds(found, start=0) else None
    return data if not _binds(found) and _binds(found, 0) and not isinstance(data, type) else None


def _is_set(function: Callable[..., Any], name: str) -> bool:
    """Return whether ``functools.partial`` has set a parameter of a function."""
    return isinstance(function, partial) and name in function.keywords


def _has_own_value(data: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    if _is_set(data, parameter.name):
        return True
    default = parameter.default
    if default is parameter.empty or default is None:
        return False
    return type(default) is not int or default != 0


def _binds(found: inspect.Signature, *positional: Any, **named: Any) -> bool:
    try:
        found.bind(*positional, **named)
    except TypeError:
        return False
    return True


def signature(function: Any) -> inspect.Signature | None:
    """Return the signature of a callable, or None if it has none that can be read."""
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except Exception:  # built-in callables have none, and __signature__ may be anything
        return None


def job_error(name: str, value: Any) -> str:
    """Return why a name of a job cannot be called, or is a class instead of an instance; or ""."""
    if not callable(value) or (isinstance(value, nn.Module) and name == "model"):
        return ""
    how, fits = pattern(name), accepts(value, len(_PATTERN[name]))
    fits = fits or (name == "scheduler" and takes_steps(value))
    if name in _MAY_START:
        how, fits = f"{how} or {name}(start)", fits or with_start(value) is not None
    if not isinstance(value, type):
        return "" if fits else f"is {format_signature(value)}; make it callable as {how}"
    if name not in _MAY_BE_CLASSES:
        made = f"{name} = {value.__name__}()"
        return f"is the class {value.__name__}; give an instance, {made}, or a function {how}"
    if value is nn.Sequential:
        return "is the class Sequential; give an instance that has layers, nn.Sequential(...)"
    if fits:
        return ""
    if _PATTERN[name]:
        shown = format_signature(value)
        return f"is the class {shown}; give a function, callable as {how}"
    return f"is the class {format_signature(value)}; give an instance, or a function that makes one"


def takes_steps(scheduler: Any) -> bool:
    """Return whether a ``scheduler`` is called with the number of steps as well.

    It has an argument of the name ``steps``, or is a function that requires a second argument. One
    that has a default value of its own is not the number of steps, whatever it is, nor is one that
    ``functools.partial`` has set.
    """
    found = signature(scheduler)
    if found is None or _is_set(scheduler, "steps"):
        return False
    if _takes_named_steps(found):
        return True
    required = accepts(scheduler, 2) and not accepts(scheduler, 1)
    return required and not isinstance(scheduler, type)


def call_scheduler(scheduler: Any, optimizer: Any, steps: int) -> Any:
    """Call a ``scheduler`` with the arguments that it takes."""
    if not takes_steps(scheduler):
        return scheduler(optimizer)
    found = signature(scheduler)
    if found is not None and _takes_named_steps(found):
        return scheduler(optimizer, steps=steps)
    return scheduler(optimizer, steps)


def _takes_named_steps(scheduler: inspect.Signature) -> bool:
    """Return whether an optimizer and ``steps`` are all the arguments that it requires."""
    return "steps" in list(scheduler.parameters)[1:] and _binds(scheduler, None, steps=0)


def needs_arguments(entry: Callable[..., Any]) -> str:
    """Return the message for a callable among the layers that needs arguments."""
    if isinstance(entry, type):
        return (
            f"is the class {format_signature(entry)}, and one there is built without arguments; "
            "give an instance, or a function that builds one"
        )
    what = "function" if inspect.isroutine(entry) else "callable"
    return (
        f"is the {what} {format_signature(entry)}, and one there has one argument, or none if it "
        "builds a layer; give a module with this in its forward, or a function without arguments "
        "if it builds one"
    )


def lacked_arguments(entry: Callable[..., Any], error: TypeError) -> bool:
    """Return whether a call without arguments probably raised `error` because there were none.

    A built-in function has no signature, and a call of it leaves no frame in the traceback.
    """
    last = error.__traceback__
    return signature(entry) is None and (last is None or last.tb_next is None)


def accepts(function: Callable[..., Any], count: int) -> bool:
    """Return whether a callable accepts `count` positional arguments, or has no signature."""
    found = signature(function)
    if found is None:
        return True
    return _binds(found, *[None] * count)


def format_signature(function: Any) -> str:
    """Return ``scale(x, factor)``, or ``scale(x, ...)`` if there are optional parameters."""
    found = signature(function)
    if found is None:
        return _name(function)
    needed, more = [], ""
    for name, parameter in found.parameters.items():
        if parameter.default is parameter.empty and parameter.kind not in _ANY_NUMBER:
            needed.append(name)
        else:
            more = "..."
    return f"{_name(function)}({', '.join([*needed, *filter(None, [more])])})"


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
