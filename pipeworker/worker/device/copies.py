"""Copies between a device's memory and the host's, beside what the device computes."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from pipeworker.worker.device.accelerator import Accelerator


class Copies(Protocol):
    """They are made in the order in which they are asked for; nothing here waits on the host.

    Attributes:
        least: bytes; what is smaller is not worth a copy.
    """

    least: int

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is the device's."""

    def follow(self) -> None:
        """What is copied from now on comes behind all that the device was given to compute."""

    def out(self, source: torch.Tensor) -> torch.Tensor:
        """Bytes to the host's memory. The source must live until a later mark is waited for."""

    def back(self, source: torch.Tensor) -> torch.Tensor:
        """Bytes to the device's. The result must live until a later mark is waited for."""

    def mark(self) -> Any:
        """Behind the copies so far."""

    def wait(self, mark: Any) -> None:
        """What the device is given to compute from now on comes behind a mark."""


class HostCopies:
    """On the CPU, where a copy is made when the call returns: for tests."""

    least = 1

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu

    def follow(self) -> None:
        pass

    def out(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def back(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        pass


class StreamCopies:
    """In a stream of an accelerator's, to and from pinned memory.

    No tensor is said to be used in that stream: what is copied is let go of when the stream of what
    is computed has waited, so the allocator has its memory again at once, however far ahead the
    host is.
    """

    def __init__(self, accelerator: Accelerator, least: int = 1 << 14) -> None:
        self.least = least
        self._accelerator = accelerator
        self._stream = accelerator.aside

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._accelerator.holds(tensor)

    def follow(self) -> None:
        self._stream.wait_event(self._accelerator.event(self._accelerator.current))

    def out(self, source: torch.Tensor) -> torch.Tensor:
        return self._copied(source, self._accelerator.pinned(len(source)))

    def back(self, source: torch.Tensor) -> torch.Tensor:
        # Of the memory of the stream that computes, where it is used and let go of.
        return self._copied(source, self._accelerator.empty(len(source)))

    def _copied(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with self._accelerator.using(self._stream):
            self._accelerator.copy(target, source)
        return target

    def mark(self) -> Any:
        return self._accelerator.event(self._stream)

    def wait(self, mark: Any) -> None:
        self._accelerator.current.wait_event(mark)


def copies_for(accelerator: Accelerator | None) -> Copies:
    """Between this one, or the CPU where there is none, and the host."""
    return HostCopies() if accelerator is None else StreamCopies(accelerator)
