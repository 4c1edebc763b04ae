"""Reads the mini-batches, on the first stage alone, and cuts them into micro-batches."""

from __future__ import annotations

import math
import reprlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch

from pipeworker.errors import UsageError
from pipeworker.plan.shares import block, sizes
from pipeworker.wire.messages.step import Batch
from pipeworker.worker.internals import pytree
from pipeworker.worker.stage import rng
from pipeworker.worker.step.epoch import END, Epoch, checked
from pipeworker.worker.transport.frame import replica

_MOST = 2**63
_MOST_SIGNATURES = 1024
_PLAIN = (int, float, complex, str, bytes)
_TARGETS = ("labels", "label", "targets", "target", "y")
_LINE = 64  # bytes: memory of a mini-batch and of a part of it is aligned alike to that


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """One mini-batch, cut: `inputs` and `targets` by micro-batch, of one replica or of all."""

    batch: Batch
    inputs: list[Any]
    targets: list[Any]


class Reader:
    """Mini-batches from ``data()``.

    Args:
        data: the job file's ``data``: an iterable, or a function that returns one, or a
            map-style dataset of mini-batches.
        microbatches: M; a mini-batch of fewer samples gives as many micro-batches.
        epochs: passes over the data, behind which :meth:`read` returns None; None: without end.
        said: how a message about what was given begins.
        seed_of: the seed of an epoch's random stream, from `seed` and the epoch.
        accelerator: its generator, if the worker has one.
        replica: which of `replicas` it reads for: all read all, and keep their own micro-batches.
    """

    def __init__(
        self,
        data: Any,
        *,
        microbatches: int,
        seed: int,
        epochs: int | None,
        said: str = "data() gave",
        seed_of: Callable[[int, int], int] = rng.data_seed,
        accelerator: rng.Generator | None = None,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self._data = data
        self._replica, self._replicas = replica, replicas
        self._said = said
        self._name = said.partition("(")[0]
        self._seed_of = seed_of
        self._microbatches = microbatches
        self._seed = seed
        self._epochs = epochs
        self._stream = rng.Stream(accelerator)
        self._epoch: Epoch | None = None
        self._signatures: dict[Any, int] = {}
        self._next_signature = 0
        self._peeked: MicroBatches | None = None

    def first(self) -> MicroBatches:
        """What the first :meth:`read` will give."""
        self._peeked = self._peeked or self.read()
        assert self._peeked  # data that is empty has raised
        return self._peeked

    def read(self) -> MicroBatches | None:
        """The next mini-batch; None when the data was given as often as it is to be.

        Raises:
            UsageError: the data is empty or not pairs of tensors that agree in dim 0.
            Raised: what the data raised.
        """
        if self._peeked is not None:
            peeked, self._peeked = self._peeked, None
            return peeked
        with self._stream.active():
            epoch, last = self._epoch or self._begin(0), (self._epochs or _MOST) - 1
            if epoch.number > last:  # where a run that goes on stood
                return None
            item = epoch.take()
            if item is END and epoch.count:
                if epoch.number == last:
                    return None
                epoch = self._begin(epoch.number + 1)
                item = epoch.take()
            if item is END and epoch.stateful:
                # What a source that keeps a state goes on from may be the end of the last epoch.
                epoch = self._begin(epoch.number)
                item = epoch.take()
            if item is END:
                raise UsageError(self._why_empty(epoch.number))
        return self.cut(item)

    def _begin(self, number: int, position: Mapping[str, Any] = MappingProxyType({})) -> Epoch:
        self._stream.restart(self._seed_of(self._seed, number))
        self._epoch = Epoch(self._data, self._name, number, self._stream, position)
        return self._epoch

    def once(self) -> Iterator[MicroBatches]:
        """The mini-batches of one epoch; behind it nobody has drawn from generators of their own.

        What another pass gives does not depend on this one, nor what shares such a generator.
        """
        yield from iter(self.read, None)
        assert self._epoch
        self._epoch.rewind()

    @property
    def length(self) -> int:
        """Mini-batches of an epoch; 0 where the data does not say."""
        return self._epoch.length if self._epoch else 0

    def position(self, *, held: bool) -> dict[str, Any]:
        """Where reading stands, as a plain value.

        Args:
            held: the last mini-batch is not used yet; the position is before it.
        """
        if self._epoch is None:
            return {"epoch": 0, "read": 0}
        with self._stream.active():
            return self._epoch.position(held or self._peeked is not None)

    def restore(self, position: Mapping[str, Any]) -> None:
        """Go on where reading stood, before the first :meth:`read`.

        Raises:
            UsageError: it is no position, or not one in this data.
            Raised: what the data raised.
        """
        position = checked(position)
        number, read = position["epoch"], position["read"]
        with self._stream.active():
            epoch = self._epoch
            peeked = self._peeked if not number and "source" not in position else None
            self._peeked = None
            if epoch and peeked and (epoch.one_shot or "began" not in position):
                self._peeked = peeked if not read else None
            else:
                epoch = self._begin(number, position)
            if "source" not in position:
                epoch.skip(read - epoch.count)

    def _why_empty(self, epoch: int) -> str:
        if epoch == 0:
            return (
                f"{self._name}() is empty: it must yield at least one (input, target) mini-batch, "
                "each time it is started"
            )
        name, cure = self._name, "have it make a fresh iterator each time it is called"
        if not callable(self._data):
            cure = f"make {name} a function, so that each epoch gets a fresh iterator"
        return f"{name}() was exhausted and gave nothing when started again: {cure}"

    def cut(self, item: Any, said: str | None = None, *, whole: bool = False) -> MicroBatches:
        """A mini-batch as micro-batches.

        Args:
            whole: with the micro-batches of all replicas.

        Raises:
            UsageError: it is not a pair of tensors that agree in dim 0; the message begins with
                `said`.
        """
        said = said or self._said
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise UsageError(f"{said} a {_no_pair(item)}")
        samples = _batch_size(item, said)
        count = min(self._microbatches, samples)
        mine, digest = range(count), 0
        if self._replicas > 1 and not whole:
            mine, digest = block(count, self._replicas, self._replica), _digest(item)
        inputs, targets = (_split(half, count, mine) for half in item)
        epoch = self._epoch.number if self._epoch else 0
        batch = Batch(self._signature(item), samples, count, epoch, digest)
        return MicroBatches(batch, inputs, targets)

    def _signature(self, item: Any) -> int:
        """A number for the structure, shapes and dtypes of a mini-batch."""
        leaves, structure = pytree.tree_flatten(item)
        looks = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)
            for leaf in leaves
        )
        if len(self._signatures) > _MOST_SIGNATURES:
            self._signatures.clear()
        key = (structure, looks)
        if key not in self._signatures:
            _check_leaves(leaves, self._said)
            self._signatures[key] = self._next_signature
            self._next_signature += 1
        return self._signatures[key]


def share(samples: int, microbatches: int) -> list[float]:
    """Each micro-batch's share of the samples."""
    return [size / samples for size in sizes(samples, microbatches)] if samples else []


def _no_pair(item: Any) -> str:
    """What a mini-batch is that is no pair, and what to do."""
    kind, must = type(item).__name__, "it must be a pair (input, target)"
    if isinstance(item, (tuple, list)):
        return f"{kind} of {len(item)}: {must}"
    if not isinstance(item, Mapping):
        return f"{kind}: {must}"
    target = next((name for name in item if name in _TARGETS), "target")
    return (
        f"{kind} of {reprlib.repr(list(item))[1:-1]}: {must}, what the first layer and loss are "
        f"given of it, as (dict(batch), batch[{target!r}])"
    )


def _check_leaves(leaves: Sequence[Any], said: str) -> None:
    """Refuse what can be neither cut nor sent, where it is easily mended.

    Raises:
        UsageError: there is such a leaf.
    """
    for leaf in leaves:
        kind = type(leaf)
        if kind.__module__ == "numpy" and not isinstance(leaf, _PLAIN):
            raise UsageError(
                f"{said} a numpy {kind.__name__}: make it a tensor, torch.from_numpy(array)"
            )
        if isinstance(leaf, Mapping):  # a class of its own, which nobody has registered
            raise UsageError(f"{said} a {kind.__name__}: make it a plain dict, dict(batch)")


def _batch_size(item: Any, said: str) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(item) if isinstance(leaf, torch.Tensor)]
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(item[0])):
        _check_leaves(pytree.tree_leaves(item), said)
        raise UsageError(f"{said} an input without a tensor")
    for tensor in tensors:
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else "sparse"
            raise UsageError(f"{said} a {kind} tensor, which cannot be cut into micro-batches")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise UsageError(
            f"{said} a tensor without dims: dim 0 of every tensor is the batch; a DataLoader makes "
            "batches of samples"
        )
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise UsageError(f"{said} tensors that disagree in dim 0, the batch: {shapes}")
    (samples,) = sizes
    if samples == 0:
        raise UsageError(f"{said} a mini-batch without samples")
    return int(samples)


def _digest(item: Any) -> int:
    """A number for all that a mini-batch holds: replicas that have read the same have the same."""
    leaves, structure = pytree.tree_flatten(item)
    found = zlib.crc32(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found = zlib.crc32(f"{leaf.dtype}{tuple(leaf.shape)}".encode(), found)
            plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
            content: Any = plain.reshape(-1).view(torch.uint8).numpy()
            found = zlib.crc32(content, found)
        elif isinstance(leaf, (str, bytes, bool, int, float, complex)) or leaf is None:
            found = zlib.crc32(repr(leaf).encode(), found)
    return found


def _split(value: Any, count: int, mine: range) -> list[Any]:
    """Cut every tensor of a nested value along dim 0; plain values go to every micro-batch.

    Of so many micro-batches some are given, and only their samples are copied.

    What is cut is a copy: ``data()`` may use its memory again for the next mini-batch, which is
    read while this one is still needed, and a first layer may work in place. Each piece counts its
    own changes in place.
    """
    if isinstance(value, torch.Tensor):
        return _pieces(value, count, mine)
    leaves, structure = pytree.tree_flatten(value)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    pieces = {key: _pieces(leaf, count, mine) for key, leaf in tensors.items()}  # each once
    cut = [pieces.get(id(leaf)) or [leaf] * len(mine) for leaf in leaves]
    numbers = range(len(mine))
    return [pytree.tree_unflatten([piece[m] for piece in cut], structure) for m in numbers]


def _pieces(tensor: torch.Tensor, count: int, mine: range) -> list[torch.Tensor]:
    whole = tensor.detach()
    if len(mine) == count:
        pieces = [piece.data for piece in replica(whole).tensor_split(count)]
    else:
        pieces = _part(whole, sizes(len(whole), count), mine)
    return [piece.requires_grad_() for piece in pieces] if tensor.requires_grad else pieces


def _part(tensor: torch.Tensor, lengths: Sequence[int], mine: range) -> list[torch.Tensor]:
    """Some pieces of these lengths, with the alignment that they have in a copy of the whole."""
    if not mine:
        return []
    starts = list(accumulate(lengths, initial=0))
    begin, end = starts[mine.start], starts[mine.stop]
    first = 0  # a copy of the whole, where rows do not follow each other in memory
    if tensor.is_contiguous():
        row = max(1, tensor[0].nbytes)
        first = begin - begin % (_LINE // math.gcd(row, _LINE))
        tensor = tensor[:end]
    copy = replica(tensor[first:])
    return [copy[starts[m] - first : starts[m + 1] - first].data for m in mine]


def joined(outputs: Sequence[Any]) -> Any:
    """The outputs of micro-batches as the whole mini-batch's: tensors one after the other.

    Raises:
        UsageError: a tensor has no dim 0, or they differ in what else they hold.
    """
    leaves, structures = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise UsageError("predict(): the model's output has another structure in each micro-batch")

    def whole(parts: Sequence[Any]) -> Any:
        if isinstance(parts[0], torch.Tensor):
            if not all(part.dim() for part in parts):
                raise UsageError(
                    "predict(): the model's output has a tensor without dims; dim 0 is the batch"
                )
            shapes = {part.shape[1:] for part in parts}
            if len(shapes) > 1:
                sizes = " and ".join(str(list(shape)) for shape in sorted(shapes))
                raise UsageError(
                    "predict(): the model's output has a tensor that is not of one size in all "
                    f"micro-batches: {sizes} but for the batch"
                )
            return torch.cat(list(parts))
        if any(type(part) is not type(parts[0]) or not _equal(part, parts[0]) for part in parts):
            raise UsageError(
                f"predict(): the model's output has a {type(parts[0]).__name__} that is not the "
                "same in each micro-batch"
            )
        return parts[0]

    wholes = [whole(parts) for parts in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(wholes, structures[0])


def _equal(one: Any, other: Any) -> bool:
    """Whether two plain values are equal, as far as they say so with one truth value."""
    try:
        return bool(one == other)
    except (TypeError, ValueError):
        return False
