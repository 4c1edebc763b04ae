"""Hooks that a forward adds to modules within its units, as libraries do to collect values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipeworker.worker.internals import forward_hooks_of

Outputs = list[tuple[str, Any]]
"""Names of modules within a unit, and what each returned, in order."""


def hooked_in(unit: nn.Module) -> list[str]:
    """Return the names of the modules within a unit that have hooks."""
    return [name for name, one in unit.named_modules() if name and forward_hooks_of(one)]


@contextmanager
def outputs_within(unit: nn.Module, names: Sequence[str]) -> Iterator[Outputs]:
    """Collect what modules within a unit return."""
    outputs: Outputs = []
    handles = [
        unit.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: outputs.append((name, out))
        )
        for name in names
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def call_hooks(unit: nn.Module, outputs: Outputs) -> None:
    """Call the hooks of modules within a hollow unit with what the real ones returned."""
    for name, out in outputs:
        inner = unit.get_submodule(name)
        for hook in list(forward_hooks_of(inner).values()):
            hook(inner, (), out)


def forget_library_hooks(module: nn.Module) -> None:
    """Remove the hooks that transformers has added in an earlier forward; the next adds them."""
    for one in module.modules():
        one.__dict__.pop("_output_capturing_hooks_installed", None)
        hooks = forward_hooks_of(one)
        for key, hook in list(hooks.items()):
            if str(getattr(hook, "__module__", "")).partition(".")[0] == "transformers":
                del hooks[key]
