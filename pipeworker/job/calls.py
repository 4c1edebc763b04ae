"""Whether what the user brought can be called as it will be: by its signature, without a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
}
"""What each name of a job is called with."""
NAMES = tuple(_PATTERN)
_GIVES_WHAT_IT_BUILDS = ("model", "data", "evaluation", "optimizer", "scheduler")
"""Names that may be classes: an instance is what their call is to give."""


def pattern(name: str) -> str:
    """How a name of a job is called: ``loss(output, target)``."""
    return f"{name}({', '.join(_PATTERN[name])})"


def signature(function: Any) -> inspect.Signature | None:
    """Of anything that is called; None where nobody can tell."""
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except Exception:  # built-in callables have none, and what says its own may say anything
        return None


def problem(name: str, value: Any) -> str:
    """Why a name of a job cannot be called as it will be; empty where it can, or nobody can tell.

    A class is refused where its instance is meant.
    """
    if isinstance(value, nn.Sequential) and name == "model":
        return ""
    how, fits = pattern(name), takes(value, len(_PATTERN[name]))
    if not isinstance(value, type):
        return "" if fits else f"is {shown(value)}: it must be callable as {how}"
    if name not in _GIVES_WHAT_IT_BUILDS:
        made = f"{name} = {value.__name__}()"
        return f"is the class {value.__name__}: give an instance, {made}, or a function {how}"
    if value is nn.Sequential:
        return "is the class Sequential: give an instance that has layers, nn.Sequential(...)"
    if fits:
        return ""
    if _PATTERN[name]:
        return f"is the class {shown(value)}: it must be callable as {how}, so give a function"
    return f"is the class {shown(value)}: give an instance, or a function that makes one"


def problem_of_layer(entry: Callable[..., Any]) -> str:
    """Why a callable among the layers builds none; empty where it may, or nobody can tell."""
    return "" if takes(entry, 0) else cannot_build(entry)


def cannot_build(entry: Callable[..., Any]) -> str:
    """What to say of a callable among the layers that needs arguments, and what to do."""
    if isinstance(entry, type):
        return (
            f"is the class {shown(entry)}, and one there is built without arguments: give an "
            "instance, or a function that builds one"
        )
    what = "function" if inspect.isroutine(entry) else "callable"
    module = _module_for(_name(entry))
    cure = "a module with this in its forward, or a function without arguments if it builds one"
    return (
        f"is the {what} {shown(entry)}, and one there is called without arguments, to build a "
        f"layer: give {f'nn.{module}()' if module else cure}"
    )


def is_refused(entry: Callable[..., Any], error: TypeError) -> bool:
    """Whether a call without arguments raised this because there were none, as far as one can tell.

    Of a built-in function nobody knows what it takes, and a call of it leaves no frame.
    """
    last = error.__traceback__
    return signature(entry) is None and (last is None or last.tb_next is None)


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether it can be called with so many positional arguments, as far as one can tell."""
    found = signature(function)
    if found is None:
        return True
    try:
        found.bind(*[None] * count)
    except TypeError:
        return False
    return True


def shown(function: Any) -> str:
    """``scale(x, factor)``, or ``scale(x, ...)`` where there is more that may be left out."""
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


def _module_for(name: str) -> str:
    """torch's module that does what its function of this name does; empty where there is none."""
    wanted = name.replace("_", "")
    return next((each for each in dir(nn) if each.lower() == wanted and each[0].isupper()), "")
