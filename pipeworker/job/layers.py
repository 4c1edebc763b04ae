"""The layers of a job's model: found, checked and named, and each built when its stage is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import BuiltinFunctionType
from typing import Any

from torch import nn

from pipeworker.errors import UsageError, a_type
from pipeworker.facts.layer_names import LayerNames
from pipeworker.job import signatures

Entry = nn.Module | Callable[[], nn.Module]
_SCRIPTED = "return the module itself, before torch.jit"
_INSTEAD = {
    "OptimizedModule": "return the module itself, before torch.compile, and use --compile",
    **dict.fromkeys(("RecursiveScriptModule", "ScriptModule", "TopLevelTracedModule"), _SCRIPTED),
}
"""The value to return instead of a whole model that torch has compiled, by its class's name."""


def is_sequence(model: Any) -> bool:
    """Return whether a model is a sequence of layers.

    An ``nn.Sequential`` with parameters or buffers of its own, or with another forward, also one
    that was assigned to the object, is more: it is cut as any other module, because no layer would
    have these.
    """
    if isinstance(model, nn.Sequential):
        own = [*model.parameters(recurse=False), *model.buffers(recurse=False)]
        forward = vars(model).get("forward", type(model).forward)
        return forward is nn.Sequential.forward and not own
    return not isinstance(model, nn.Module) or isinstance(model, (nn.ModuleList, nn.ModuleDict))


def entries(
    model: Any, cut: Callable[[Any], Mapping[str, nn.Module] | None] = lambda model: None
) -> dict[str, Entry]:
    """Return the layers of a model by their names; those given as callables are not built yet.

    `cut` returns the layers of a model that is no sequence of them, and None for any other.
    """
    if instead := _INSTEAD.get(type(model).__name__):
        raise UsageError(f"model() returned {a_type(model)}, which cannot be divided; {instead}")
    layers: dict[str, Entry]
    if (parts := cut(model)) is not None:
        layers = {**parts}
    elif isinstance(model, nn.Sequential):
        named = model.named_modules(remove_duplicate=False)
        layers = {name: layer for name, layer in named if name and "." not in name}
    elif isinstance(model, (list, tuple)):
        layers = {str(index): entry for index, entry in enumerate(model)}
    else:
        wanted = "an nn.Module or a list of layers"
        if isinstance(model, (nn.ModuleList, nn.ModuleDict)):  # modules without a forward
            values = "" if isinstance(model, nn.ModuleList) else ".values()"
            wanted = f"a list of layers: list(layers{values})"
        raise UsageError(f"model() returned {a_type(model)}; return {wanted}")
    if not layers:
        raise UsageError("model() returned no layers; return at least one for each stage")
    for index, entry in enumerate(layers.values()):
        if not callable(entry):
            raise UsageError(
                f"layer {index} of model() is {a_type(entry)}; make it an nn.Module or a function "
                "that builds one"
            )
        if isinstance(entry, nn.Module) or signatures.accepts(entry, 0):
            continue
        if isinstance(entry, type) or not signatures.accepts(entry, 1):
            raise UsageError(f"layer {index} of model() {signatures.needs_arguments(entry)}")
    return {name: _as_layer(entry) for name, entry in layers.items()}


def prefixes(layers: Collection[str], names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the prefixes of layers, some of whose names the job replaces.

    Raises:
        UsageError: a name is in no layer.
    """
    wholes = {layer: names.get(layer, layer) for layer in layers}
    parts: dict[str, dict[str, str]] = {layer: {} for layer in layers}
    for name, other in names.items():
        layer, _, key = name.partition(".")
        if layer not in parts:
            raise UsageError(
                f"names: {name!r} is in no layer of model(); begin it with the name of a layer"
            )
        if key:
            parts[layer][key] = other
    return tuple(
        LayerNames.of_renamed(whole, parts[layer]) if parts[layer] else whole
        for layer, whole in wholes.items()
    )


class _Function(nn.Module):
    """A layer that calls a function of one argument."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


def _as_layer(entry: Entry) -> Entry:
    """Return an entry; a function with an argument, which builds no layer, becomes one."""
    is_builtin = isinstance(entry, BuiltinFunctionType)
    if isinstance(entry, nn.Module) or (signatures.accepts(entry, 0) and not is_builtin):
        return entry
    kind: type[nn.Module] = type(
        getattr(entry, "__name__", "function").strip("<>"), (_Function,), {}
    )
    return kind(entry)


def build(entry: Entry, index: int) -> nn.Module:
    """Return the layer of an entry. The caller has seeded the random generators."""
    if isinstance(entry, nn.Module):
        return entry
    try:
        built = entry()
    except TypeError as error:
        if not signatures.lacked_arguments(entry, error):
            raise
        raise UsageError(f"layer {index} of model() {signatures.needs_arguments(entry)}") from None
    if not isinstance(built, nn.Module):
        raise UsageError(
            f"layer {index} of model() was built as {a_type(built)}; build an nn.Module"
        )
    return built
