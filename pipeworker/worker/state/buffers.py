"""The buffers that a step or an evaluation pass changes, as they were before it.

Weights and optimizer state change in updates alone. But a forward in training mode changes buffers,
such as the running statistics of batch norm, so a step that fails leaves them half changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeworker.worker.blame import user_code
from pipeworker.worker.internals import version_of
from pipeworker.worker.stage.slots import is_same


@dataclass(slots=True)
class _Before:
    """A buffer before the step: the tensor, its version, and a copy if steps change it in place."""

    tensor: torch.Tensor | None
    version: int
    copy: torch.Tensor | None


class BufferGuard:
    """The buffers of some layers, which can be restored if a step fails.

    Only those buffers are copied that an earlier step has changed in place; most models have none.
    Of any other buffer its tensor and its version are kept, which show whether it has changed. The
    kernels of norms change running statistics without a new version, so these are always copied.
    With `copies_all` all buffers are.
    """

    def __init__(self, layers: Iterable[nn.Module], *, copies_all: bool = False) -> None:
        self._places = [
            (module, name)
            for layer in layers
            for module in layer.modules()
            for name, _ in module.named_buffers(recurse=False)
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
        for number, (module, name) in enumerate(self._places):
            tensor: torch.Tensor | None = getattr(module, name, None)
            version, copy = -1, None
            if tensor is not None:
                version = version_of(tensor)
                copy = tensor.detach().clone() if number in self._changing else None
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
            for (module, name), before in zip(self._places, states, strict=False):
                if before.tensor is None:
                    continue
                if before.copy is not None:
                    if not is_same(before.tensor, before.copy):
                        before.tensor.copy_(before.copy)
                elif version_of(before.tensor) != before.version:
                    return f"{type(module).__name__}.{name}"
                if getattr(module, name, None) is not before.tensor:
                    setattr(module, name, before.tensor)
        return ""


class PassGuard:
    """The buffers and the extra state of some layers, as they are before an evaluation pass.

    Most layers change neither in eval mode, but observers of quantization do, and training must not
    depend on the passes: on how many there are, or on the replica that runs them. A pass that is
    interrupted is repeated as a whole by the run that resumes.

    Raises:
        UserCodeError: ``get_extra_state()`` of a module raised.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        layers = [*layers]
        self._buffers = BufferGuard(layers, copies_all=True)
        self._buffers.begin()
        self._extra: list[tuple[nn.Module, Any]] = []
        for module in (module for layer in layers for module in layer.modules()):
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                with user_code("get_extra_state()"):
                    self._extra.append((module, copy.deepcopy(module.get_extra_state())))

    def restore(self) -> None:
        """Restore the layers.

        Raises:
            UserCodeError: ``set_extra_state()`` of a module raised.
        """
        self._buffers.restore()
        for module, before in self._extra:
            with user_code("set_extra_state()"):
                module.set_extra_state(before)
