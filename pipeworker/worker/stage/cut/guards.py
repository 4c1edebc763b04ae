"""Checks that refuse code between units which the stages would not compute as one process does.

They are made while a plan is made, on the calls of torch's functions outside of units; the check of
buffers, behind every forward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError, a_type
from pipeworker.worker.internals import (
    base_of,
    has_backward_hooks,
    is_fake,
    is_transforming,
    saved_tensor_hooks,
    storage_key,
    storage_uses,
    version_of,
)
from pipeworker.worker.stage.cut.calls import line_of_the_user, tensors_of
from pipeworker.worker.stage.cut.objects import held_within
from pipeworker.worker.stage.cut.trace import is_object

_BY_HAND = "or cut the model by hand, as a list of layers"
_RESHAPING = frozenset(
    f"{name}_"
    for name in ("unsqueeze", "squeeze", "t", "transpose", "swapaxes", "swapdims", "resize")
) | {"as_strided_", "detach_", "requires_grad_", "set_", "resize_as_", "__set__", "__delete__"}
"""Functions that change more of a tensor than its numbers."""
_DONE_TO_ATTRIBUTES = {"__set__": "sets an attribute of", "__delete__": "deletes an attribute of"}
_ALONE = 2
"""The result of :func:`storage_uses` for a tensor whose storage no other one uses."""


def refused(layer: int, unit: str, reason: str, remedy: str) -> UsageError:
    """Return the error for a forward that cannot be cut, with the line that called torch."""
    return UsageError(
        f"layer {layer} ({unit}): the model's forward {reason}, at {line_of_the_user()}; {remedy}, "
        f"{_BY_HAND}"
    )


def buffers_within(module: nn.Module, units: Iterable[nn.Module]) -> dict[int, str]:
    """Return the names of the buffers within the units of a module, by id."""
    inside = {id(buffer) for unit in units for buffer in unit.buffers()}
    return {id(b): name for name, b in module.named_buffers() if id(b) in inside}


class OuterBuffers:
    """The buffers of a module outside of its units, which keep nothing for a later forward."""

    def __init__(self, module: nn.Module, units: Iterable[nn.Module]) -> None:
        inside = buffers_within(module, units)
        self._found: list[tuple[str, nn.Module, str, torch.Tensor, int]] = []
        for name, buffer in module.named_buffers():
            if id(buffer) not in inside:
                folder, _, key = name.rpartition(".")
                owner = module.get_submodule(folder)
                self._found.append((name, owner, key, buffer, version_of(buffer)))

    def unsaved(self, saved: Container[int]) -> dict[int, str]:
        """Return the names, by id, of those that are not `saved`."""
        return {id(one): name for name, _, _, one, _ in self._found if id(one) not in saved}

    def check(
        self, overwritten: Container[str], is_filled: Callable[[torch.Tensor], bool] | None = None
    ) -> None:
        """Reject a change of one that is not in `overwritten`, or one by values of layers."""
        for name, owner, key, buffer, version in self._found:
            is_same = getattr(owner, key, None) is buffer
            may_change = name in overwritten or version_of(buffer) == version
            if not is_same or not may_change or (is_filled is not None and is_filled(buffer)):
                raise changes_buffer(name)


def changes_buffer(name: str) -> UsageError:
    """Return the error for a forward that changes a buffer outside of units."""
    return UsageError(
        f"model(): its forward changes the buffer {name!r} outside of the modules that its layers "
        "are made of; move it into one of them, or return a list of layers"
    )


class Guards:
    """The checks of one run of a hollow module's forward.

    `where` returns the layer that the forward is in, and what messages call it.

    Attributes:
        refusal: the first error that a check has raised: the forward, or torch, may catch it.
    """

    refusal: UsageError | None = None

    def __init__(
        self, module: nn.Module, units: Sequence[nn.Module], where: Callable[[], tuple[int, str]]
    ) -> None:
        self._where = where
        self._buffers = buffers_within(module, units)
        self._hooks = saved_tensor_hooks()
        own = {id(one) for unit in units for one in unit.modules()}
        for name, one in module.named_modules():
            if id(one) not in own and has_backward_hooks(one):
                raise UsageError(
                    f"model(): {name or 'the module'} has a hook on its backward, and its layers "
                    f"may be on several stages; put the hook on one of them, {_BY_HAND}"
                )

    def refused(self, reason: str, remedy: str) -> UsageError:
        """Return the error for what the forward does now."""
        found = refused(*self._where(), reason, remedy)
        self.refusal = self.refusal or found
        return found

    def check_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Reject a tensor that comes from a unit on a way that is not seen."""
        if any(map(is_fake, tensors)):
            raise self.refused(
                "uses a tensor that a unit keeps in an attribute or an object of its own, or that "
                "a transform as vmap or a compiled function makes",
                "have the unit return it",
            )

    def tainted(self, name: str, tensors: Sequence[torch.Tensor], parameter: str) -> None:
        """Check a call whose arguments depend on parameters, before it is done.

        `parameter` is the name of the first one, if that is a parameter itself.
        """
        self.check_buffers(tensors)
        if name in ("grad", "backward"):
            remedy = "do it in a module with parameters, which runs as a whole"
            raise self.refused("takes a gradient through its layers", remedy)
        if name in _RESHAPING:
            done = _DONE_TO_ATTRIBUTES.get(name, f"calls {name} on")
            if parameter:
                remedy = "do it in model(), or within one layer"
                raise self.refused(f"{done} the parameter {parameter!r}", remedy)
            raise self.refused(f"{done} an activation", "make a new tensor")
        self.check_context()

    def check_context(self) -> None:
        """Reject a checkpoint, or other hooks on saved tensors, or inference mode around layers."""
        if torch.is_inference_mode_enabled():  # its tensors have no version
            raise self.refused("calls layers in torch.inference_mode()", "use torch.no_grad()")
        if saved_tensor_hooks() != self._hooks:
            raise self.refused(
                "makes a checkpoint, or has hooks on saved tensors",
                "leave checkpoints to --recompute",
            )

    def check_transform(self) -> None:
        """Reject a transform around a layer, whose tensors stages do not exchange."""
        if is_transforming():
            raise self.refused(
                "is within a transform of torch.func, as vmap or grad", "have a layer call that"
            )

    def check_state(self, leaves: Sequence[Any]) -> None:
        """Reject an argument that a call advances: where others are computed, it stays behind."""
        for leaf in leaves:
            if isinstance(leaf, (Iterator, torch.Generator)):
                raise self.refused(
                    f"calls a function or a module with {a_type(leaf)}, which only the stage that "
                    "computes the call would advance",
                    "pass what it yields, or draw from torch's own generator",
                )

    def check_held(self, leaves: Sequence[Any], activations: Container[int]) -> None:
        """Reject a function that holds an activation, which other stages have a stand-in for."""
        for leaf in filter(is_object, leaves):
            if any(
                isinstance(one, torch.Tensor) and id(one) in activations
                for one in held_within(leaf)
            ):
                raise self.refused(
                    "registers a hook that holds an activation", "do it within a layer"
                )

    def check_changed(
        self, name: str, changed: Iterable[torch.Tensor], known: Iterable[torch.Tensor]
    ) -> None:
        """Reject a change of a tensor that is no activation, of which stages would not learn."""
        storages = {storage_key(tensor) for tensor in known if not is_fake(tensor)}
        if any(not is_fake(one) and storage_key(one) not in storages for one in changed):
            raise self.refused(
                f"has {name} fill a tensor with numbers of an activation",
                "use what it returns without `out`, or call it within a layer",
            )

    def filled(self, tensor: torch.Tensor, *, resizes: bool) -> None:
        """Check a tensor of the input, or a new one, that gets numbers of an activation."""
        if resizes:
            raise self.refused("has a function resize its argument `out`", "use what it returns")
        if base_of(tensor) is not None or storage_uses(tensor) > _ALONE:
            raise self.refused(
                "fills a tensor that is a view or has one with numbers of an activation",
                "fill the whole tensor by one that has no view",
            )

    def check_buffers(self, tensors: Sequence[torch.Tensor]) -> None:
        """Reject a call on a buffer of a unit: stages do not exchange the numbers of buffers."""
        for tensor in tensors:
            if name := self._buffers.get(id(tensor)):
                raise self.refused(
                    f"uses the buffer {name!r} outside of the module that computes with it",
                    "have that module return what is needed of it",
                )

    @contextmanager
    def functions(self, depends: Callable[[Sequence[torch.Tensor]], bool]) -> Iterator[None]:
        """Reject calls of ``torch.autograd.Function.apply`` on tensors that `depends` rejects."""
        original = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if depends(tensors_of((args, kwargs))):
                raise self.refused(
                    f"calls the autograd.Function {cls.__name__} between its layers",
                    "call it within a layer",
                )
            return original.__get__(None, cls)(*args, **kwargs)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.autograd.Function.apply = original  # type: ignore[method-assign]
