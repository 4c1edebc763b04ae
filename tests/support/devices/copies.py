"""Copies to and from a device that are made as late as they may be."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch

from pipeworker.worker.stage.offload import Copies

CPU = torch.device("cpu")
_STALE = 0xAB
"""The byte that fills a target before the copy is made."""


class LateCopies(Copies):
    """Copies that are made when a caller waits for them; their tensors must exist until then.

    Attributes:
        log: ``out 24``, ``back 24`` with their bytes, ``follow``, and ``wait`` where there was
            something to wait for.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._queue: deque[Callable[[], None]] = deque()
        self._done = 0

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu

    def follow(self) -> None:
        self.log.append("follow")

    def out(self, source: torch.Tensor) -> torch.Tensor:
        target = torch.full_like(source, _STALE)
        there, here = weakref.ref(source), weakref.ref(target)

        def copy() -> None:
            if (made := here()) is not None:
                left = there()
                assert left is not None, "freed before it was copied"
                made.copy_(left)

        self._add("out", source, copy)
        return target

    def back(self, source: torch.Tensor) -> torch.Tensor:
        target = torch.full_like(source, _STALE)
        here = weakref.ref(target)

        def copy() -> None:
            made = here()
            assert made is not None, "freed while it was copied to"
            made.copy_(source)

        self._add("back", source, copy)
        return target

    def _add(self, what: str, source: torch.Tensor, copy: Callable[[], None]) -> None:
        self.log.append(f"{what} {source.nbytes}")
        self._queue.append(copy)

    def mark(self) -> int:
        return self._done + len(self._queue)

    def wait(self, mark: int) -> None:
        if self._done < mark:
            self.log.append("wait")
        while self._done < mark:
            self._queue.popleft()()
            self._done += 1
