"""Copies between a device's memory and the host's, beside what the device computes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

import torch


class Copies(Protocol):
    """They are made in the order in which they are asked for; nothing here waits on the host.

    Attributes:
        device: whose memory it is.
        least: bytes; what is smaller is not worth a copy.
    """

    device: torch.device
    least: int

    def follow(self) -> None:
        """What is copied from now on comes behind all that the device was given to compute."""

    def out(self, source: torch.Tensor) -> torch.Tensor:
        """To the host's memory. The source must live until a later mark is waited for."""

    def back(self, source: torch.Tensor) -> torch.Tensor:
        """To the device's. The result must live until a later mark is waited for."""

    def mark(self) -> Any:
        """Behind the copies so far."""

    def wait(self, mark: Any) -> None:
        """What the device is given to compute from now on comes behind a mark."""


class HostCopies:
    """On the CPU, where a copy is made when the call returns: for tests."""

    device = torch.device("cpu")
    least = 1

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
    """In a stream of an accelerator's, to and from pinned memory; in its only one where it has one.

    No tensor is recorded in that stream: what is copied is let go of when the stream of what is
    computed has waited, so the allocator has its memory again at once, however far ahead the host
    is.
    """

    least = 1 << 14

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.accelerator.current_stream(device)
        with suppress(RuntimeError):
            self._stream = torch.Stream(device)

    def follow(self) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))

    def out(self, source: torch.Tensor) -> torch.Tensor:
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        with self._stream:
            return target.copy_(source, non_blocking=True)

    def back(self, source: torch.Tensor) -> torch.Tensor:
        # Of the memory of the stream that computes, where it is used and let go of.
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        with self._stream:
            return target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        torch.accelerator.current_stream(self.device).wait_event(mark)


def copies_for(device: torch.device) -> Copies:
    """Between this device and the host."""
    return HostCopies() if device.type == "cpu" else StreamCopies(device)
