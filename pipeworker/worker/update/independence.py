"""Whether an optimizer updates each parameter by itself, as it must for any number of stages."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeworker.errors import a_type

_STEPS = 6
_SIZE = 4
_LARGE = 100.0
"""Gradients of this size exceed what an optimizer bounds their common norm by."""


def note_of(optimizer: torch.optim.Optimizer) -> str:
    """Return a note for the user on an optimizer that combines parameters, or ""."""
    kind = type(optimizer).__name__
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.Adafactor) and any(map(_lacks_eps, groups)):
        return (
            f"{kind}: takes eps from the type of the first parameter of a stage, so the numbers "
            "depend on the number of stages; give it a number, as in eps=(1e-30, 1e-3)"
        )
    if not combines_parameters(optimizer):
        return ""
    return (
        f"{kind}: combines the parameters that it is given, which are those of a stage, so the "
        "numbers depend on the number of stages"
    )


def note_on_draws(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return a note for the user on optimizers, one of which draws random numbers in its step."""
    kinds = " or ".join(dict.fromkeys(type(one).__name__ for one in optimizers))
    return (
        f"{kinds}: draws random numbers in its step, in the order of the parameters of a stage, so "
        "the numbers depend on the number of stages; add noise to gradients in "
        "before_update(params), whose random numbers do not"
    )


def note_on_implementation(optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """Return a note for the user if a stage's parameters decide how each one is updated, or "".

    On an accelerator torch updates all parameters of a group together, unless one of them is of
    another class or elsewhere; Adagrad does not if a gradient is sparse. The two ways round
    differently. Call this while the parameters have their gradients.
    """
    is_accelerator = device.type not in ("cpu", "mps")
    for group in optimizer.param_groups:
        together = group.get("foreach", False)
        is_default = together is None and not group.get("fused") and is_accelerator
        is_default &= not isinstance(optimizer, torch.optim.Adafactor)  # one by one by default
        for parameter in group["params"]:
            reason = ""
            if isinstance(optimizer, torch.optim.Adagrad) and (together or is_default):
                reason = "has a sparse gradient" if _is_sparse(parameter.grad) else ""
            if is_default and parameter.requires_grad:
                if type(parameter) not in (nn.Parameter, torch.Tensor):
                    reason = f"is {a_type(parameter)}"
                elif parameter.device.type != device.type:
                    reason = f"is not on {device.type}"
            if reason:
                return (
                    f"{type(optimizer).__name__}: torch chooses its implementation by the "
                    f"parameters of a stage, of which one {reason}, so the numbers may depend on "
                    "the number of stages; give it foreach=False"
                )
    return ""


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.is_sparse


def _lacks_eps(group: dict[str, Any]) -> bool:
    """Return whether a group of Adafactor has parameters of several types, and no eps for them."""
    return group["eps"][0] is None and len({p.dtype for p in group["params"]}) > 1


def combines_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer updates a parameter otherwise if there is another one beside it.

    Two optimizers of its class with its settings are tried, on one small parameter and on two. An
    optimizer of torch is not tried, because all of them update each parameter by itself; nor is
    one of the user's own code, which may count its steps in a variable, or one whose constructor
    takes more than its settings.
    """
    kind = type(optimizer)
    if not _is_of_a_package(kind):
        return False

    def first_of(count: int) -> torch.Tensor:
        """Return the first of `count` parameters on the CPU after some steps."""
        torch.default_generator.manual_seed(0)
        parameters = [nn.Parameter(torch.zeros(_SIZE, _SIZE, device="cpu")) for _ in range(count)]
        gradients = [_LARGE * torch.randn(_SIZE, _SIZE, device="cpu") for _ in range(count)]
        known = inspect.signature(kind).parameters
        settings = {name: value for name, value in optimizer.defaults.items() if name in known}
        made = kind(parameters, **settings)
        for step in range(_STEPS):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            torch.default_generator.manual_seed(step)
            made.step()
        return parameters[0].detach()

    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            return not torch.equal(first_of(1), first_of(2))
        except Exception:  # the user's class may do anything: what it does here says nothing
            return False


def _is_of_a_package(kind: type) -> bool:
    """Return whether a class is of an installed package other than torch."""
    try:
        parts = Path(inspect.getfile(kind)).parts
    except (TypeError, OSError):  # it was made by exec(), in a notebook for example
        return False
    is_of_torch = kind.__module__.partition(".")[0] == "torch"
    return not is_of_torch and not {"site-packages", "dist-packages"}.isdisjoint(parts)
