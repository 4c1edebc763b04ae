"""A check that no layer writes into a tensor that it has returned, before the next stage has it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pipeworker.errors import PipeworkerError
from pipeworker.worker.internals import counter_of, version_of


class Unchanged:
    """Tensors that must not change until :meth:`check`; their memory is not kept alive.

    torch counts changes in place, as it does to check the tensors that a graph has saved.
    """

    __slots__ = ("_counters", "_source")

    def __init__(self, source: str, tensors: Iterable[torch.Tensor]) -> None:
        self._source = source
        self._counters = [(counter_of(tensor), version_of(tensor)) for tensor in tensors]

    def check(self) -> None:
        """Raise PipeworkerError if a tensor was changed: another value may have been sent."""
        if any(version_of(counter) != version for counter, version in self._counters):
            raise PipeworkerError(
                f"{self._source}: was changed in place after its layer had returned it, and before "
                "another stage had read it; have the layer return a tensor that it does not write "
                "to again, as out.clone()"
            )


def counted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose changes are counted: a copy of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor
