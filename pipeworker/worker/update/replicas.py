"""The gradients of a stage in one order of elements, of which each replica adds up a part.

Each replica accumulates its micro-batches in their order; then the replicas' gradients are added in
the order of the replicas, on whichever replica: ``((g0 + g1) + g2) + ...``. A parameter that a
replica has not used contributes nothing there, and has no gradient if no replica has used it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.plan.partition import block, pieces, sizes
from pipeworker.worker.stage.values import set_strides, strides_of


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to ``stop - 1`` of the vector, or the parameter, with an index."""

    index: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


_SMALL = 1 << 14
"""Elements below which a segment is copied together with its small neighbours to be sent."""


class Layout:
    """The elements of a stage's parameters in one order, the same on all replicas.

    There is one vector per dtype and device; it has all parameters of these, in model order. It is
    never made: a piece of it is sent from, and received into, the tensors themselves.

    Attributes:
        parameters: the parameters that require grad, in model order.
        parts: by replica, the pieces that it adds up.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], replicas: int) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        sizes_of: dict[tuple[torch.dtype, torch.device], int] = {}
        self._places: list[Piece] = []  # by parameter
        for parameter in self.parameters:
            kind = parameter.dtype.to_real(), parameter.device
            start = sizes_of.get(kind, 0)
            sizes_of[kind] = start + parameter.numel() * (2 if parameter.is_complex() else 1)
            self._places.append(Piece(list(sizes_of).index(kind), start, sizes_of[kind]))
        self._kinds = list(sizes_of)
        self.parts = [
            [
                piece
                for kind, count in enumerate(sizes_of.values())
                for piece in _pieces(kind, block(count, replicas, replica))
            ]
            for replica in range(replicas)
        ]
        self._runs = {piece: self._runs_of(piece) for part in self.parts for piece in part}
        self._flat: list[torch.Tensor | None] = []
        """The elements of each parameter's tensor, of shape ``[elements]``, or None."""

    def _runs_of(self, piece: Piece) -> list[list[Piece]]:
        """Return the segments of a piece, with small neighbours together."""
        runs: list[list[Piece]] = []
        small = False
        for index, place in enumerate(self._places):
            start, stop = max(place.start, piece.start), min(place.stop, piece.stop)
            if place.index != piece.index or start >= stop:
                continue
            segment = Piece(index, start - place.start, stop - place.start)
            before, small = small, segment.size < _SMALL
            if small and before:
                runs[-1].append(segment)
            else:
                runs.append([segment])
        return runs

    def read(self, piece: Piece) -> list[torch.Tensor]:
        """Return the elements of a piece, a tensor of shape ``[elements]`` for each run.

        A parameter without a tensor counts as zeros. Large segments are views.
        """
        found = []
        for run in self._runs[piece]:
            parts = [self._segment(segment, piece.index) for segment in run]
            found.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return found

    def _segment(self, segment: Piece, kind: int) -> torch.Tensor:
        flat = self._flat[segment.index]
        if flat is None:
            dtype, device = self._kinds[kind]
            return torch.zeros(segment.size, dtype=dtype, device=device)
        return flat[segment.start : segment.stop]

    def write(self, piece: Piece, values: Sequence[torch.Tensor]) -> None:
        """Copy the elements of a piece to where :meth:`read` finds them, if that is anywhere."""
        for run, value in zip(self._runs[piece], values, strict=True):
            start = 0
            for segment in run:
                goal = self._flat[segment.index]
                if goal is not None:
                    source = value[start : start + segment.size]
                    goal[segment.start : segment.stop].copy_(source)
                start += segment.size

    def add(
        self,
        piece: Piece,
        values: Sequence[Sequence[torch.Tensor]],
        present: Sequence[Sequence[bool]],
    ) -> list[torch.Tensor]:
        """Add up a piece over all replicas, into new tensors.

        Args:
            piece: the piece to add up.
            values: by replica, what :meth:`read` has returned there.
            present: by replica, for each parameter whether it has a gradient.
        """
        found = []
        for number, run in enumerate(self._runs[piece]):
            terms = [value[number] for value in values]
            if all(has[segment.index] for has in present for segment in run):
                found.append(_sum(terms))
                continue
            total, start = torch.zeros_like(terms[0]), 0
            for segment in run:
                here = slice(start, start + segment.size)
                start += segment.size
                both = zip(terms, present, strict=True)
                if used := [term[here] for term, has in both if has[segment.index]]:
                    total[here] = _sum(used)
            found.append(total)
        return found


class Gradients(Layout):
    """The gradients of a stage's parameters, while replicas add them up."""

    def begin(self) -> list[bool]:
        """Return, for each parameter, whether it has a gradient here.

        Raises:
            UsageError: a gradient is sparse.
        """
        self._flat = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise UsageError(
                    f"the gradient of {name} is sparse, and --replicas needs dense ones; make it "
                    "dense, as by nn.Embedding(sparse=False)"
                )
            self._flat.append(_flat_gradient(parameter))
        return [flat is not None for flat in self._flat]

    def make(self, present: Sequence[bool]) -> None:
        """Make the gradients that other replicas have and this one lacks, to be written to.

        `present` is, for each parameter, whether any replica has a gradient.
        """
        for index, (parameter, has) in enumerate(zip(self.parameters, present, strict=True)):
            if has and parameter.grad is None:
                parameter.grad = torch.empty(
                    parameter.shape, dtype=parameter.dtype, device=parameter.device
                )
                self._flat[index] = _flat_gradient(parameter)

    def end(self) -> None:
        """Forget the tensors of this step."""
        self._flat = []


class Weights(Layout):
    """Weights that one replica has updated, to be sent to all others."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__([("", parameter) for parameter in parameters], 1)
        for parameter in parameters:
            if parameter.is_conj():  # an optimizer has assigned a view, which has no real numbers
                parameter.data = parameter.detach().resolve_conj()
        self._flat = [_flat(parameter.detach()) for parameter in parameters]

    def strides(self) -> dict[int, list[int]]:
        """Return the strides of the weights that are not contiguous, by their indices."""
        return strides_of(self.parameters)

    def set_strides(self, strides: Mapping[int, Sequence[int]]) -> None:
        """Give the weights the strides that they have where they were updated, before a write."""
        for index in set_strides(self.parameters, strides):
            self._flat[index] = _flat(self.parameters[index].detach())

    def end(self) -> None:
        """Store the weights that were written, where their memory is in another order."""
        for parameter, flat in zip(self.parameters, self._flat, strict=True):
            real = _real(parameter.detach())
            if flat is not None and real.data_ptr() != flat.data_ptr():
                real.copy_(flat.view(real.shape))


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


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as real numbers, of shape ``[elements]``: a view, if any."""
    return _real(tensor).reshape(-1)


def _flat_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the elements of a gradient, whose memory is in their order from now on."""
    if parameter.grad is None:
        return None
    plain = parameter.grad.resolve_conj().resolve_neg().contiguous()
    if plain is not parameter.grad:
        parameter.grad = plain
    return _flat(parameter.grad.detach())


def _sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add up in order, several into a new tensor."""
    if len(values) == 1:
        return values[0]
    total = values[0] + values[1]
    for one in values[2:]:
        total += one
    return total
