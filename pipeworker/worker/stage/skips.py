"""Skip connections: ``stash`` and ``pop`` in a layer's forward, and the table they use.

On a stage, the table of one micro-batch holds the tensors that its layers stash and those that
other stages sent. Elsewhere, in a plain ``nn.Sequential``, each thread has one table, and the same
calls work. The interface follows torchgpipe's skippable modules (Kim et al. 2020, section 3.3).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipeworker.errors import SkipError, a_type
from pipeworker.facts.connections import Skip
from pipeworker.worker.internals import alias_of, version_of

_SAME_NAME = "by a name that is the same in every process (one made at import is not)"


@dataclass(frozen=True, slots=True)
class StageSkips:
    """The skip tensors that cross a stage's boundary: sorted names by the other stage, in order."""

    arriving: Mapping[int, Sequence[str]]
    departing: Mapping[int, Sequence[str]]

    @staticmethod
    def of(routes: Sequence[Skip], stage: int) -> StageSkips | None:
        """Return the skips of a stage; None if none of its layers stashes or pops."""
        if not any(stage in (route.source, route.target) for route in routes):
            return None
        arriving: dict[int, list[str]] = {}
        departing: dict[int, list[str]] = {}
        for route in sorted(routes):
            if route.source == stage != route.target:
                departing.setdefault(route.target, []).append(route.name)
            elif route.target == stage != route.source:
                arriving.setdefault(route.source, []).append(route.name)
        return StageSkips(arriving, departing)


class Table:
    """The tensors of one micro-batch, received ones included, that are not popped yet."""

    def __init__(self, received: Mapping[str, torch.Tensor | None] | None = None) -> None:
        self._stashed = {
            name: (tensor, version_of(tensor))
            for name, tensor in (received or {}).items()
            if tensor is not None
        }

    def stash(self, name: str, tensor: torch.Tensor) -> None:
        """Keep an alias of a tensor: this call then fixes where its gradient is added."""
        if name in self._stashed:
            raise SkipError(
                f"stash({name!r}, ...): stashed twice before it is popped; use another name or a "
                "namespace"
            )
        alias = alias_of(tensor) if tensor.layout is torch.strided else tensor  # not sent anyway
        self._stashed[name] = alias, version_of(alias)

    def pop(self, name: str) -> torch.Tensor:
        """Remove and return a tensor, unless it was changed in place."""
        try:
            tensor, version = self._stashed.pop(name)
        except KeyError:
            raise SkipError(
                f"pop({name!r}): no layer stashed it, or it was popped already; stash it before, "
                f"{_SAME_NAME}"
            ) from None
        if version_of(tensor) != version:
            raise SkipError(
                f"pop({name!r}): changed in place after it was stashed; stash a clone of it"
            )
        return tensor

    def leave(self, names: Sequence[str], *, strict: bool = True) -> dict[str, torch.Tensor | None]:
        """Remove and return the tensors that this stage sends to others; no other may remain.

        Without `strict`, None takes the place of a missing one: a layer may stash in training only.
        """
        left = [name for name in self._stashed if name not in names]
        if left:
            raise SkipError(
                f"stash({left[0]!r}, ...): stashed or received here, and not popped; pop it, "
                f"{_SAME_NAME}"
            )
        return {name: self.pop(name) if strict or name in self._stashed else None for name in names}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make ``stash`` and ``pop`` use this table inside the context."""
        outer, _local.table = _local.table, self
        scope, _local.scope = _local.scope, ""
        try:
            yield
        finally:
            _local.table, _local.scope = outer, scope


class Recorder(Table):
    """A table that records what layers stash and pop, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, str]] = []
        self.popped: dict[str, torch.Tensor] = {}
        """The tensors of earlier layers that this layer popped."""

    def begin_layer(self) -> list[tuple[str, str]]:
        """Begin a layer; return the list of its events, to be filled."""
        self.events, self.popped = [], {}
        return self.events

    @property
    def stashed(self) -> dict[str, torch.Tensor]:
        """The tensors that this layer stashed and did not pop."""
        names = [name for event, name in self.events if event == "stash"]
        return {name: self._stashed[name][0] for name in names if name in self._stashed}

    def replace(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the tensors that this layer stashed."""
        for name, tensor in self.stashed.items():
            new = function(tensor)
            self._stashed[name] = new, version_of(new)

    def stash(self, name: str, tensor: torch.Tensor) -> None:
        self.events.append(("stash", name))
        self._stashed.pop(name, None)  # a wrong use is reported once all uses are known
        super().stash(name, tensor)

    def pop(self, name: str) -> torch.Tensor:
        self.events.append(("pop", name))
        tensor = super().pop(name)
        if ("stash", name) not in self.events:
            self.popped[name] = tensor
        return tensor


class _Local(threading.local):
    def __init__(self) -> None:
        self.table = Table()
        self.scope = ""


_local = _Local()


def stash(name: str, tensor: torch.Tensor) -> None:
    """Keep a tensor for a later layer, which gets it from :func:`pop`.

    Call it inside a layer's ``forward``. The later layer may be on any stage: the tensor is sent
    there directly, and its gradient comes back. In a plain ``nn.Sequential`` it works the same.

    Args:
        name: name of the tensor; after it is popped once, the name is free again. See
            :func:`namespace` for repeated blocks.
        tensor: a tensor of any shape and dtype; it must not be changed in place before the pop.

    Raises:
        SkipError: the name is in use.
    """
    if not isinstance(name, str):
        raise SkipError(f"stash({name!r}, ...): the name is {a_type(name)}; give a string")
    if not isinstance(tensor, torch.Tensor):
        raise SkipError(f"stash({name!r}, ...): the value is {a_type(tensor)}; give a tensor")
    _local.table.stash(_local.scope + name, tensor)


def pop(name: str) -> torch.Tensor:
    """Return the tensor that an earlier layer stashed under this name.

    Raises:
        SkipError: no layer stashed it, it was popped already, or it was changed in place since.
    """
    return _local.table.pop(f"{_local.scope}{name}")


@contextmanager
def namespace(name: str) -> Iterator[None]:
    """Prefix the names used inside, so that the names of repeated blocks differ.

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
