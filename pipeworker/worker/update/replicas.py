"""The gradients of a stage as flat vectors, of which each replica adds up a part.

Each replica accumulates its micro-batches in their order; then the replicas' gradients are added in
the order of the replicas, on whichever replica: ``((g0 + g1) + g2) + ...``. A parameter that a
replica has not used contributes nothing there, and has no gradient if no replica has used it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.plan.partition import block, pieces, sizes


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to ``stop - 1`` of the vector with index `kind`."""

    kind: int
    start: int
    stop: int


class Gradients:
    """The gradients or weights of a stage's parameters, with the same layout on all replicas.

    There is one vector per dtype and device; it holds all parameters of these, in model order.

    Attributes:
        parameters: the parameters that require grad, in model order.
        parts: by replica, the pieces that it adds up.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], replicas: int) -> None:
        self._names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        self._slices: list[Piece] = []
        for parameter in self.parameters:
            real = _real(parameter.detach())
            kind = real.dtype, real.device
            start = self._sizes.get(kind, 0)
            self._sizes[kind] = start + real.numel()
            self._slices.append(Piece(list(self._sizes).index(kind), start, self._sizes[kind]))
        totals = list(self._sizes.values())
        self.parts = [
            [p for kind, n in enumerate(totals) for p in _pieces(kind, block(n, replicas, r))]
            for r in range(replicas)
        ]
        self._vectors: list[torch.Tensor] = []

    def pack(self) -> list[bool]:
        """Copy the gradients into the vectors; return, for each parameter, whether it has one.

        Raises:
            UsageError: a gradient is sparse.
        """
        self.fill([parameter.grad for parameter in self.parameters])
        return [parameter.grad is not None for parameter in self.parameters]

    def fill(self, values: Sequence[torch.Tensor | None]) -> None:
        """Copy values of the parameters' shapes into the vectors; None counts as zeros."""
        self.allocate()
        for name, value, where in zip(self._names, values, self._slices, strict=True):
            vector = self.piece(where)
            if value is None:
                vector.zero_()
            elif value.layout is not torch.strided:
                raise UsageError(
                    f"the gradient of {name} is sparse, and --replicas needs dense ones; make it "
                    "dense, as by nn.Embedding(sparse=False)"
                )
            else:
                real = _real(value.detach())
                vector.view(real.shape).copy_(real)

    def allocate(self) -> None:
        """Allocate the vectors, to be filled piece by piece."""
        self._vectors = [
            torch.empty(size, dtype=dtype, device=device)
            for (dtype, device), size in self._sizes.items()
        ]

    def piece(self, piece: Piece) -> torch.Tensor:
        """Return a view of a piece, of shape [stop - start]."""
        return self._vectors[piece.kind][piece.start : piece.stop]

    def add(
        self, piece: Piece, values: Sequence[torch.Tensor], present: Sequence[Sequence[bool]]
    ) -> torch.Tensor:
        """Add up a piece over all replicas, in place; return the view of it.

        Args:
            piece: the piece to add up.
            values: by replica, its values, of shape [stop - start]; this replica's are the view
                that :meth:`piece` returns.
            present: by replica, for each parameter whether it has a gradient.
        """
        total = self.piece(piece)
        if all(map(all, present)):
            _sum(total, values)
            return total
        for number, where in enumerate(self._slices):
            start, stop = max(where.start, piece.start), min(where.stop, piece.stop)
            if where.kind != piece.kind or start >= stop:
                continue
            here = slice(start - piece.start, stop - piece.start)
            used = [g[here] for g, has in zip(values, present, strict=True) if has[number]]
            if used:
                _sum(total[here], used)
        return total

    def unpack(self, present: Sequence[bool]) -> None:
        """Copy the sums into the parameters' ``grad``; free the vectors.

        `present` is, for each parameter, whether any replica has a gradient.
        """
        for parameter, where, has in zip(self.parameters, self._slices, present, strict=True):
            if not has:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            self._put_back(parameter.grad, where)
        self._vectors = []

    def unpack_weights(self) -> None:
        """Copy the vectors, with other replicas' updates, into the parameters; free the vectors."""
        for parameter, where in zip(self.parameters, self._slices, strict=True):
            self._put_back(parameter.detach(), where)
        self._vectors = []

    def _put_back(self, value: torch.Tensor, where: Piece) -> None:
        real = _real(value)
        real.copy_(self.piece(where).view(real.shape))


def shards(parameters: Sequence[nn.Parameter], replicas: int) -> list[list[nn.Parameter]]:
    """Return, by replica, the parameters that it updates: about as many elements each.

    The largest parameter is assigned first, each to the replica with the fewest elements so far, as
    torch's implementation of ZeRO does (Rajbhandari et al. 2020). Each list is in model order.
    """
    owner: dict[int, int] = {}
    loads = [0] * replicas
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        least = loads.index(min(loads))
        owner[id(parameter)] = least
        loads[least] += parameter.numel()
    return [[p for p in parameters if owner[id(p)] == r] for r in range(replicas)]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that may be complex as real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _pieces(kind: int, part: range) -> list[Piece]:
    ends = accumulate(sizes(len(part), pieces(len(part))), initial=part.start)
    return [Piece(kind, start, stop) for start, stop in pairwise(ends)]


def _sum(total: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    """Add up in order into `total`, whose memory may be that of one of the values."""
    if len(values) == 1:
        total.copy_(values[0])
        return
    found = values[0] + values[1] if len(values) > 2 else torch.add(values[0], values[1], out=total)
    for one in values[2:]:
        found += one
    if found is not total:
        total.copy_(found)
