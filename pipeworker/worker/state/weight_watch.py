"""Which weights forwards change in place: these cannot be copied while a step runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from pipeworker.worker.internals import version_of
from pipeworker.worker.stage.values import checksums


class WeightWatch:
    """The tensors that forwards change in place, as ``nn.Embedding(max_norm=...)`` does.

    Weights and optimizer state usually change in updates alone. The versions of those that a
    snapshot has are compared before the next update: a version that is another one is a
    forward's work. Until one step was watched, every tensor may be such; in that step the numbers
    are compared too, because ``weight.data.mul_(mask)`` leaves no trace in the version.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changing: set[int] | None = None
        """Addresses of such tensors; None before the first step was watched."""
        self._step = -1
        self._copied_later: list[_Watched] = []
        self._copied_at_once: list[_Watched] = []
        self._torn: list[int] = []

    def may_change(self, tensor: torch.Tensor) -> bool:
        """Return whether a forward may change a tensor, so that it must be copied at once."""
        return self._changing is None or tensor.data_ptr() in self._changing

    def begin(
        self, step: int, later: Sequence[torch.Tensor], at_once: Sequence[torch.Tensor]
    ) -> None:
        """Watch the tensors of the snapshot of `step`, of which some are copied later."""
        is_first = self._changing is None
        with self._lock:
            self._step = step
            self._copied_later = [(t, version_of(t), ()) for t in later]
            self._copied_at_once = [
                (t, version_of(t), checksums(t) if is_first else ()) for t in at_once
            ]

    def end(self) -> int:
        """Stop watching, because an update is about to change the tensors.

        Returns:
            The step whose snapshot is torn; -1 if it is not, or there is none.
        """
        torn = -1
        with self._lock:
            if self._step >= 0:
                changed = _changed(self._copied_later)
                if changed:
                    torn = self._step
                    self._torn.append(torn)
                changed |= _changed(self._copied_at_once)
                self._changing = changed | (self._changing or set())
            self._step, self._copied_later, self._copied_at_once = -1, [], []
        return torn

    def torn(self) -> list[int]:
        """Return the steps of the snapshots in which a forward changed a tensor copied later."""
        with self._lock:
            return [*self._torn, *([self._step] if _changed(self._copied_later) else [])]


_Watched = tuple[torch.Tensor, int, tuple[int, ...]]
"""A tensor, its version, and its checksum if its numbers are compared."""


def _changed(watched: Sequence[_Watched]) -> set[int]:
    return {
        tensor.data_ptr()
        for tensor, version, numbers in watched
        if version_of(tensor) != version or (numbers and checksums(tensor) != numbers)
    }
