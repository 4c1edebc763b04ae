"""The gradients of a stage as flat vectors, of which each replica adds up a part.

Each replica adds its micro-batches in their order, as ever; then the replicas' gradients are added
in the order of the replicas, wherever that is done: ``((g0 + g1) + g2) + ...``. A parameter that a
replica has not used counts for nothing there, and stays without a gradient where none has used it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.plan.shares import block, sizes

_PIECE = 1 << 20
"""Elements that are sent at once: while one is added up the next is on its way."""
_MOST_PIECES = 64
"""Of a part: a channel makes its sender wait when many more are under way."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to ``stop - 1`` of the vector of a kind."""

    kind: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter's gradient is."""

    kind: int
    start: int
    stop: int


class Gradients:
    """What the parameters of a stage have, laid out alike on all replicas.

    A vector has the gradients of all parameters of a dtype, in model order.

    Args:
        named: the parameters that require grad; names are for messages.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], replicas: int) -> None:
        self._names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._kinds: list[tuple[torch.dtype, torch.device]] = []
        self._sizes: list[int] = []
        self._places: list[_Place] = []
        for parameter in self.parameters:
            kind = _real(parameter.detach()).dtype, parameter.device
            if kind not in self._kinds:
                self._kinds.append(kind)
                self._sizes.append(0)
            index = self._kinds.index(kind)
            start = self._sizes[index]
            self._sizes[index] += _real(parameter.detach()).numel()
            self._places.append(_Place(index, start, self._sizes[index]))
        self.parts = [
            [p for kind, n in enumerate(self._sizes) for p in _pieces(kind, block(n, replicas, r))]
            for r in range(replicas)
        ]
        """By replica, what it adds up."""
        self._vectors: list[torch.Tensor] = []

    def pack(self) -> list[bool]:
        """Copy the gradients into the vectors; returns which there are.

        Raises:
            UsageError: one is sparse.
        """
        self._fill([parameter.grad for parameter in self.parameters])
        return [parameter.grad is not None for parameter in self.parameters]

    def pack_weights(self) -> None:
        """Copy the parameters themselves."""
        self._fill(self.parameters)

    def _fill(self, values: Sequence[torch.Tensor | None]) -> None:
        self.room()
        for name, value, place in zip(self._names, values, self._places, strict=True):
            mine = self._vectors[place.kind][place.start : place.stop]
            if value is None:
                mine.zero_()
            elif value.layout is not torch.strided:
                raise UsageError(
                    f"the gradient of {name} is sparse, which --replicas cannot add up: make it "
                    "dense, as with nn.Embedding(sparse=False)"
                )
            else:
                real = _real(value.detach())
                mine.view(real.shape).copy_(real)

    def room(self) -> None:
        """Make vectors that are put into, piece by piece."""
        self._vectors = [
            torch.empty(size, dtype=dtype, device=device)
            for size, (dtype, device) in zip(self._sizes, self._kinds, strict=True)
        ]

    def piece(self, piece: Piece) -> torch.Tensor:
        """A view of the vector."""
        return self._vectors[piece.kind][piece.start : piece.stop]

    def add(
        self, piece: Piece, given: Sequence[torch.Tensor], there: Sequence[Sequence[bool]]
    ) -> torch.Tensor:
        """Add up a piece, in place; returns it.

        Args:
            given: by replica, what it has; this one's own is :meth:`piece`.
            there: by replica, the parameters that it has a gradient of.
        """
        total = self.piece(piece)
        if all(map(all, there)):
            _sum(total, given)
            return total
        for number, place in enumerate(self._places):
            start, stop = max(place.start, piece.start), min(place.stop, piece.stop)
            if place.kind != piece.kind or start >= stop:
                continue
            here = slice(start - piece.start, stop - piece.start)
            used = [g[here] for g, has in zip(given, there, strict=True) if has[number]]
            if used:
                _sum(total[here], used)
        return total

    def put(self, piece: Piece, total: torch.Tensor) -> None:
        """Another replica has added this one up."""
        self.piece(piece).copy_(total)

    def unpack(self, there: Sequence[bool]) -> None:
        """Put the sums where the optimizer looks.

        Args:
            there: whether any replica has a gradient, by parameter.
        """
        for parameter, place, has in zip(self.parameters, self._places, there, strict=True):
            if not has:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            self._put_back(parameter.grad, place)
        self._vectors = []

    def unpack_weights(self) -> None:
        """Put what another replica has made of the parameters into them."""
        for parameter, place in zip(self.parameters, self._places, strict=True):
            self._put_back(parameter.detach(), place)
        self._vectors = []

    def _put_back(self, value: torch.Tensor, place: _Place) -> None:
        real = _real(value)
        real.copy_(self._vectors[place.kind][place.start : place.stop].view(real.shape))


def shards(parameters: Sequence[nn.Parameter], replicas: int) -> list[list[nn.Parameter]]:
    """By replica, the parameters that it updates: about as many elements each, in model order.

    The largest first, each to the one that has the least so far, as ZeRO's implementation in torch
    deals them out (Rajbhandari et al. 2020).
    """
    owner: dict[int, int] = {}
    loads = [0] * replicas
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        least = loads.index(min(loads))
        owner[id(parameter)] = least
        loads[least] += parameter.numel()
    return [[p for p in parameters if owner[id(p)] == r] for r in range(replicas)]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The real numbers of one that may be complex."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _pieces(kind: int, part: range) -> list[Piece]:
    count = min(_MOST_PIECES, -(-len(part) // _PIECE))
    if not count:
        return []
    ends = accumulate(sizes(len(part), count), initial=part.start)
    return [Piece(kind, start, stop) for start, stop in pairwise(ends)]


def _sum(total: torch.Tensor, given: Sequence[torch.Tensor]) -> None:
    """Add up in the order given, of which one may be the memory of the result."""
    if len(given) == 1:
        total.copy_(given[0])
        return
    found = given[0] + given[1] if len(given) > 2 else torch.add(given[0], given[1], out=total)
    for one in given[2:]:
        found += one
    if found is not total:
        total.copy_(found)
