"""Copies of the state that a step or an evaluation pass changes in layers, as it was before.

Weights and optimizer state change in updates alone. But a forward in training mode changes buffers,
such as the running statistics of batch norm, and extra state, so a step that fails leaves them half
changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeworker.worker.blame import user_code
from pipeworker.worker.internals import buffers_of, version_of
from pipeworker.worker.stage.slots import get_slot, is_same, is_small, set_slot


@dataclass(slots=True)
class _Before:
    """A buffer before the step: the tensor, its version, and a copy if steps change it in place."""

    tensor: torch.Tensor | None
    version: int
    copy: torch.Tensor | None


class StepGuard:
    """The buffers and the extra state of some layers, which can be restored if a step fails.

    Only those buffers are copied that are small, or that an earlier step has changed in place. Of
    any other buffer its tensor and its version are kept, which show whether it has changed. The
    kernels of norms change running statistics without a new version, so these are always copied.
    Weights that a forward changes, as those of ``nn.Embedding(max_norm=...)``, are found and not
    restored. With `copies_all` all buffers are copied, and weights are not looked at.
    """

    def __init__(self, layers: Iterable[nn.Module], *, copies_all: bool = False) -> None:
        # Each module once.
        self._modules = [*dict.fromkeys(one for layer in layers for one in layer.modules())]
        self._places = [(module, name) for module in self._modules for name in buffers_of(module)]
        self._changing = {
            number
            for number, (module, _) in enumerate(self._places)
            if copies_all or getattr(module, "running_mean", None) is not None
        }
        self._weights = [
            (module, name, parameter)
            for module in (() if copies_all else self._modules)
            for name, parameter in module.named_parameters(recurse=False)
        ]
        self._forget()

    def _forget(self) -> None:
        self._before: list[_Before] = []
        self._extra: list[tuple[nn.Module, Any]] = []
        self._versions: list[int] = []

    def begin(self) -> None:
        """Keep the state as it is before a step.

        Raises:
            UserCodeError: ``get_extra_state()`` of a module raised.
        """
        self._forget()
        for number, place in enumerate(self._places):
            tensor: torch.Tensor | None = get_slot(place)
            version, copied = -1, None
            if tensor is not None:
                version = version_of(tensor)
                if number in self._changing or is_small(place, tensor):
                    copied = tensor.detach().clone()
            self._before.append(_Before(tensor, version, copied))
        for module in self._modules:
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                with user_code("get_extra_state()"):
                    self._extra.append((module, copy.deepcopy(module.get_extra_state())))
        self._versions = [version_of(parameter) for _, _, parameter in self._weights]

    def end(self) -> None:
        """Note that the step is whole, and which buffers it has changed in place."""
        for number, before in enumerate(self._before):
            if before.tensor is not None and version_of(before.tensor) != before.version:
                self._changing.add(number)
        self._forget()

    def restore(self) -> str:
        """Restore the state if a step has begun and has not ended.

        Returns:
            The name of a weight, or of a buffer that no step before had changed, which cannot be
            restored; "" if there is none.

        Raises:
            UserCodeError: ``set_extra_state()`` of a module raised.
        """
        changed = self._restore_buffers()
        for module, state in self._extra:
            with user_code("set_extra_state()"):
                module.set_extra_state(state)
        for (module, name, parameter), version in zip(self._weights, self._versions, strict=False):
            if version_of(parameter) != version:
                changed = changed or _name(module, name)
        self._forget()
        return changed

    def _restore_buffers(self) -> str:
        with torch.no_grad():
            for place, before in zip(self._places, self._before, strict=False):
                if before.tensor is not None and before.copy is not None:
                    if before.tensor.shape != before.copy.shape:
                        before.tensor.resize_(before.copy.shape)
                    if not is_same(before.tensor, before.copy):
                        before.tensor.copy_(before.copy)
                elif before.tensor is not None and version_of(before.tensor) != before.version:
                    return _name(*place)
                if get_slot(place) is not before.tensor:
                    set_slot(place, before.tensor)
        return ""


def _name(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__}.{name}"
