"""``stash`` and ``pop``: what a layer's forward says, and the table it says it to.

On a stage, the table of one micro-batch holds what its layers stash and what other stages sent.
Elsewhere, in a plain ``nn.Sequential``, there is one table a thread, and the same calls work.

A stashed tensor is an alias of its own in the graph. The gradients of a tensor that is both passed
on and stashed are then added in an order that the call of ``stash`` fixes, whichever stages the two
ways lead through.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from pipeworker.errors import SkipError
from pipeworker.worker.internals import alias_of, version_of


class Table:
    """What is stashed and not yet popped, for one micro-batch.

    Args:
        received: what other stages stashed for this one.
    """

    def __init__(self, received: Mapping[str, torch.Tensor | None] | None = None) -> None:
        self._held = {
            name: (tensor, version_of(tensor))
            for name, tensor in (received or {}).items()
            if tensor is not None
        }

    def stash(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._held:
            raise SkipError(
                f"{name!r} is stashed twice before it is popped: use another name or a namespace"
            )
        alias = alias_of(tensor)
        self._held[name] = alias, version_of(alias)

    def pop(self, name: str) -> torch.Tensor:
        try:
            tensor, version = self._held.pop(name)
        except KeyError:
            raise SkipError(
                f"{name!r} is popped, but nobody stashed it, or it was popped already. "
                "(A name must be the same in every process: one that is made when a module is "
                "imported, by uuid say, is not)"
            ) from None
        if version_of(tensor) != version:
            raise SkipError(
                f"{name!r} was changed in place after it was stashed: stash a clone of it"
            )
        return tensor

    def leave(self, names: Sequence[str], *, strict: bool = True) -> dict[str, torch.Tensor | None]:
        """Take out what this stage sends to others; nothing else may be left.

        Without `strict`, None stands for what is not there: a layer may skip in training alone.

        Raises:
            SkipError: something is missing, left over or changed.
        """
        left = [name for name in self._held if name not in names]
        if left:
            raise SkipError(f"{left[0]!r} is stashed or received here, and not popped")
        return {name: self.pop(name) if strict or name in self._held else None for name in names}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let ``stash`` and ``pop`` use this table."""
        outer, _local.table = _local.table, self
        scope, _local.scope = _local.scope, ""
        try:
            yield
        finally:
            _local.table, _local.scope = outer, scope


class Recorder(Table):
    """Notes what layers stash and pop, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, str]] = []

    def stash(self, name: str, tensor: torch.Tensor) -> None:
        self.events.append(("stash", name))
        self._held.pop(name, None)  # what is wrong is said when all is known
        super().stash(name, tensor)

    def pop(self, name: str) -> torch.Tensor:
        self.events.append(("pop", name))
        return super().pop(name)


class _Local(threading.local):
    def __init__(self) -> None:
        self.table = Table()
        self.scope = ""


_local = _Local()


def stash(name: str, tensor: torch.Tensor) -> None:
    """Keep a tensor for a later layer, which gets it from :func:`pop`.

    Called inside a layer's ``forward``. The later layer may be on any stage: the tensor goes there
    directly, and its gradient comes back. In a plain ``nn.Sequential`` it works the same.

    Args:
        name: popped once, after that free again. See :func:`namespace` for repeated blocks.

    Raises:
        SkipError: the name is held already.
    """
    if not isinstance(name, str):
        raise SkipError(f"a stash is named by a string, not by a {type(name).__name__}")
    if not isinstance(tensor, torch.Tensor):
        raise SkipError(f"stash({name!r}, ...) takes a tensor, not a {type(tensor).__name__}")
    _local.table.stash(_local.scope + name, tensor)


def pop(name: str) -> torch.Tensor:
    """The tensor that an earlier layer stashed under this name.

    Raises:
        SkipError: nobody stashed it, it was popped already, or it was changed in place since.
    """
    return _local.table.pop(f"{_local.scope}{name}")


@contextmanager
def namespace(name: str) -> Iterator[None]:
    """Names inside are this namespace's own, so that blocks built alike do not meet.

    Namespaces nest::

        class Down(nn.Module):
            def __init__(self, level):
                super().__init__()
                self.level = level

            def forward(self, x):
                with pipeworker.namespace(f"level{self.level}"):
                    pipeworker.stash("x", x)
                return pool(x)
    """
    outer = _local.scope
    _local.scope = f"{outer}{name}/"
    try:
        yield
    finally:
        _local.scope = outer
