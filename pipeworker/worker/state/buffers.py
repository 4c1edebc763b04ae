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


class BufferGuard:
    """The buffers of some layers, which can be restored if a step fails.

    Only those buffers are copied that are small, or that an earlier step has changed in place. Of
    any other buffer its tensor and its version are kept, which show whether it has changed. The
    kernels of norms change running statistics without a new version, so these are always copied.
    With `copies_all` all buffers are.
    """

    def __init__(self, layers: Iterable[nn.Module], *, copies_all: bool = False) -> None:
        self._places = [
            (module, name) for module in _modules(layers) for name in buffers_of(module)
        ]
        self._changing = {
            number
            for number, (module, _) in enumerate(self._places)
            if copies_all or getattr(module, "running_mean", None) is not None
        }
        self._before: list[_Before] | None = None

    def begin(self) -> None:
        """Keep the buffers as they are before a step."""
        self._before = []
        for number, place in enumerate(self._places):
            tensor: torch.Tensor | None = get_slot(place)
            version, copy = -1, None
            if tensor is not None:
                version = version_of(tensor)
                if number in self._changing or is_small(place, tensor):
                    copy = tensor.detach().clone()
            self._before.append(_Before(tensor, version, copy))

    def end(self) -> None:
        """Note that the step is whole, and which buffers it has changed in place."""
        for number, before in enumerate(self._before or ()):
            if before.tensor is not None and version_of(before.tensor) != before.version:
                self._changing.add(number)
        self._before = None

    def restore(self) -> str:
        """Restore the buffers if a step has begun and has not ended.

        Returns:
            The name of a buffer that cannot be restored, because no step before had changed it; ""
            if there is none.
        """
        states, self._before = self._before or [], None
        with torch.no_grad():
            for place, before in zip(self._places, states, strict=False):
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


class StepGuard:
    """The state of some layers before a step, which is restored if the step fails.

    It is their buffers and extra state. Weights that a forward changes, as those of
    ``nn.Embedding(max_norm=...)``, are found and not restored.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._modules = _modules(layers)
        self._buffers = BufferGuard(self._modules)
        self._weights = [
            (module, name, parameter)
            for module in self._modules
            for name, parameter in module.named_parameters(recurse=False)
        ]
        self._extra: _ExtraStates | None = None
        self._versions: list[int] = []

    def begin(self) -> None:
        """Keep the state as it is before a step.

        Raises:
            UserCodeError: ``get_extra_state()`` of a module raised.
        """
        self._buffers.begin()
        self._extra = _ExtraStates(self._modules)
        self._versions = [version_of(parameter) for _, _, parameter in self._weights]

    def end(self) -> None:
        """Note that the step is whole: its update comes next."""
        self._buffers.end()
        self._extra, self._versions = None, []

    def restore(self) -> str:
        """Restore the state if a step has begun and has not ended.

        Returns:
            The name of a buffer or weight that cannot be restored; "" if there is none.

        Raises:
            UserCodeError: ``set_extra_state()`` of a module raised.
        """
        changed = self._buffers.restore()
        if self._extra is not None:
            self._extra.restore()
        for (module, name, parameter), version in zip(self._weights, self._versions, strict=False):
            if version_of(parameter) != version:
                changed = changed or _name(module, name)
        self._extra, self._versions = None, []
        return changed


class PassGuard:
    """The buffers and the extra state of some layers, as they are before an evaluation pass.

    Most layers change neither in eval mode, but observers of quantization do, and training must not
    depend on the passes: on how many there are, or on the replica that runs them. A pass that is
    interrupted is repeated as a whole by the run that resumes.

    Raises:
        UserCodeError: ``get_extra_state()`` of a module raised.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        modules = _modules(layers)
        self._buffers = BufferGuard(modules, copies_all=True)
        self._buffers.begin()
        self._extra = _ExtraStates(modules)

    def restore(self) -> None:
        """Restore the layers.

        Raises:
            UserCodeError: ``set_extra_state()`` of a module raised.
        """
        self._buffers.restore()
        self._extra.restore()


class _ExtraStates:
    """Copies of the extra state of the modules that have some."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._states: list[tuple[nn.Module, Any]] = []
        for module in modules:
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                with user_code("get_extra_state()"):
                    self._states.append((module, copy.deepcopy(module.get_extra_state())))

    def restore(self) -> None:
        for module, state in self._states:
            with user_code("set_extra_state()"):
                module.set_extra_state(state)


def _modules(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return all modules of some layers, each once."""
    return [*dict.fromkeys(module for layer in layers for module in layer.modules())]


def _name(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__}.{name}"
