"""The reader of mini-batches, on the first stage alone; it splits them into micro-batches."""

from __future__ import annotations

import reprlib
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any

import torch

from pipeworker.errors import UsageError, a_type
from pipeworker.facts.step import Batch
from pipeworker.job.file import JobFile
from pipeworker.job.options import Options
from pipeworker.plan.partition import block, sizes
from pipeworker.worker.data.epoch import END, Epoch, Way, validate_position
from pipeworker.worker.data.splitting import split_value
from pipeworker.worker.data.tokens import count_tokens
from pipeworker.worker.internals import pytree
from pipeworker.worker.stage import rng
from pipeworker.worker.stage.values import bits_of, distinct_tensors

_MOST = 2**63
_MOST_SIGNATURES = 1024
_PLAIN = (int, float, complex, str, bytes)
_TARGETS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """One mini-batch, split: nested tensors of shape ``[n, ...]`` by micro-batch.

    n is the number of samples of the micro-batch. They are those of one replica, or of all. The
    `name` is that of the evaluation set which has the mini-batch, empty if it has none; `length`
    is the number of mini-batches of that set, 0 if unknown.
    """

    batch: Batch
    inputs: list[Any]
    targets: list[Any]
    name: str = ""
    length: int = 0


@dataclass(eq=False)
class Reader:
    """The mini-batches of ``data()``, split into micro-batches.

    Each replica reads every mini-batch and keeps its own micro-batches. :meth:`read` returns None
    after `epochs` passes over the data. Error messages begin with `error_prefix`. `tokens` is the
    job's function that counts the tokens of a mini-batch. `lends` is whether inputs, and whether
    targets, may be parts of what the data gave: the caller copies them before it reads the next
    mini-batch, and does not change them. `apart` is whether the data may have a loader that another
    reader reads at the same time.
    """

    data: Any
    _: KW_ONLY
    microbatches: int
    seed: int
    epochs: int | None
    error_prefix: str = "data(): gave"
    seed_of: Callable[[int, int], int] = rng.data_seed
    accelerator: rng.Generator | None = None
    replica: int = 0
    replicas: int = 1
    tokens: Callable[[Any], Any] | None = None
    lends: tuple[bool, bool] = (False, False)
    apart: bool = False

    def __post_init__(self) -> None:
        self._name = self.error_prefix.partition("(")[0]
        self._stream = rng.Stream(self.accelerator)
        self._epoch: Epoch | None = None
        self._signatures: dict[Any, int] = {}
        self._next_signature = 0
        self._peeked: MicroBatches | None = None
        self._has_checked_lists = False

    def peek(self) -> MicroBatches:
        """Return the first mini-batch without consuming it."""
        self._peeked = self.read()  # which returns the one from an earlier peek
        assert self._peeked  # empty data has raised
        return self._peeked

    def measure(self) -> int:
        """Begin the first epoch without reading; return its :attr:`length`."""
        if self._epoch is None:
            with self._stream.active():
                self._begin(0)
        return self.length

    def read(self) -> MicroBatches | None:
        """Return the next mini-batch, or None after the last epoch."""
        if self._peeked is not None:
            peeked, self._peeked = self._peeked, None
            return peeked
        with self._stream.active():
            epoch, last = self._epoch or self._begin(0), (self.epochs or _MOST) - 1
            if epoch.number > last:  # of a resumed run
                return None
            item = epoch.next_batch()
            if item is END and epoch.count:
                if epoch.number == last:
                    return None
                epoch = self._begin(epoch.number + 1)
                item = epoch.next_batch()
            if item is END and epoch.stateful:
                # A stateful source may have resumed at the end of the previous epoch.
                epoch = self._begin(epoch.number)
                item = epoch.next_batch()
            if item is END:
                raise UsageError(self._why_empty(epoch.number))
        return self.split(item)

    def _begin(
        self, number: int, position: Mapping[str, Any] = MappingProxyType({}), way: Way = Way.SKIP
    ) -> Epoch:
        self._epoch = None  # no process of its loader is left when the next ones are forked
        self._stream.restart(self.seed_of(self.seed, number))
        self._epoch = Epoch(
            self.data, self._name, number, self._stream, position, way, apart=self.apart
        )
        return self._epoch

    def iterate_epoch(self) -> Generator[MicroBatches, None, None]:
        """Yield the mini-batches of one epoch, then restore the user's own generators.

        So neither another pass nor other code with such a generator depends on this pass, of which
        the caller may read a part only.
        """
        try:
            yield from iter(self.read, None)
        finally:
            self.rewind()

    def rewind(self) -> None:
        """Restore the user's own generators to their states at the beginning of the epoch."""
        if self._epoch is not None:  # else its beginning has failed
            self._epoch.rewind()

    @property
    def length(self) -> int:
        """The number of mini-batches of an epoch; 0 if the data has no length."""
        return self._epoch.length if self._epoch else 0

    def position(self, *, prefetched: bool) -> dict[str, Any]:
        """Return the reading position as plain data; before the last mini-batch if `prefetched`."""
        if self._epoch is None:
            return {"epoch": 0, "read": 0}
        with self._stream.active():
            return self._epoch.position(prefetched or self._peeked is not None)

    def restore(self, position: Mapping[str, Any]) -> None:
        """Resume reading at a position; call it before the first :meth:`read`."""
        position = validate_position(position)
        number, read = position["epoch"], position["read"]
        with self._stream.active():
            peeked = self._peeked if not number and "source" not in position else None
            self._peeked = None
            plain = position.keys() == {"epoch", "read"}
            if self._epoch and peeked and (self._epoch.one_shot or plain):
                self._peeked = peeked if not read else None
                self._epoch.skip(read - self._epoch.count)
            else:
                any(self._resume(number, position, way).reached for way in Way)

    def _resume(self, number: int, position: Mapping[str, Any], way: Way) -> Epoch:
        epoch = self._begin(number, position, way)
        if number and epoch.lacks_generators:
            self._begin(number).next_batch()  # makes them, as that of an earlier epoch did
            epoch = self._begin(number, position, way)
        return epoch

    def expect(self, count: int | None) -> None:
        """Note that at most `count` mini-batches will be read from now on; None if unknown."""

    def note_copy(self, position: Mapping[str, Any]) -> None:
        """Note that a copy of the state is being made, which will continue at a position."""

    def close(self) -> None:
        """End what reads, as the processes of a loader: the job is over."""
        self._epoch = None

    def _why_empty(self, epoch: int) -> str:
        if epoch == 0:
            where = self.error_prefix.rpartition(":")[0]
            return (
                f"{where}: is empty; yield at least one (input, target) mini-batch each time it is "
                "started"
            )
        name, remedy = self._name, "have it make a fresh iterator each time it is called"
        if not callable(self.data):
            remedy = f"make {name} a function, so that each epoch gets a fresh iterator"
        return f"{name}(): was exhausted, and gave nothing when started again; {remedy}"

    def split(
        self, item: Any, error_prefix: str | None = None, *, whole: bool = False
    ) -> MicroBatches:
        """Split a pair of nested tensors, ``[samples, ...]``, as ``torch.tensor_split`` does.

        With `whole` the micro-batches of all replicas are returned, and tokens are not counted:
        the mini-batch is one of an evaluation or a prediction.
        """
        samples, signature = self.check(item, error_prefix)
        count = min(self.microbatches, samples)
        own, digest = range(count), 0
        if self.replicas > 1 and not whole:
            own, digest = block(count, self.replicas, self.replica), _digest(item)
        lent = _sole_owners(item) if any(self.lends) and not whole else frozenset()
        lengths = sizes(samples, count)
        inputs, targets = (
            split_value(value, lengths, own, lent if lends else frozenset())
            for value, lends in zip(item, self.lends, strict=True)
        )
        epoch = self._epoch.number if self._epoch else 0
        tokens = 0 if whole else count_tokens(item, self.tokens)
        batch = Batch(signature, samples, count, epoch, digest, tokens)
        return MicroBatches(batch, inputs, targets)

    def check(self, item: Any, error_prefix: str | None = None) -> tuple[int, int]:
        """Return the samples and the signature of a mini-batch, if :meth:`split` can split it."""
        prefix = error_prefix or self.error_prefix
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise UsageError(f"{prefix} {_not_a_pair_message(item)}")
        samples = _batch_size(item, prefix)
        if samples > 1 and self.microbatches > 1 and not self._has_checked_lists:
            for half in item:
                _check_lists(half, samples, prefix)
            self._has_checked_lists = True  # by chance, a later one may have as many samples
        return samples, self._signature(item)

    def _signature(self, item: Any) -> int:
        """Return a number that stands for the structure, shapes and dtypes of a mini-batch."""
        leaves, structure = pytree.tree_flatten(item)
        types = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)
            for leaf in leaves
        )
        if len(self._signatures) > _MOST_SIGNATURES:
            self._signatures.clear()
        key = (structure, types)
        if key not in self._signatures:
            _check_leaves(leaves, self.error_prefix)
            self._signatures[key] = self._next_signature
            self._next_signature += 1
        return self._signatures[key]


def reader_options(job: JobFile, options: Options, replica: int, replicas: int) -> dict[str, Any]:
    """Return the arguments of the :class:`Reader` of a job's data.

    `replica` and `replicas` are 0 and 1 if the first replica reads for all.
    """
    return {
        "microbatches": options.microbatches,
        "seed": options.seed,
        "epochs": options.passes,
        "error_prefix": "step(batch): was given" if options.own_loop else "data(): gave",
        "replica": replica,
        "replicas": replicas,
        "tokens": job.tokens,
    }


def sample_shares(samples: int, microbatches: int) -> list[float]:
    """Return the share of the samples that each micro-batch has, by micro-batch."""
    return [size / samples for size in sizes(samples, microbatches)] if samples else []


def _not_a_pair_message(item: Any) -> str:
    """Return the end of the error message for a mini-batch that is no pair."""
    kind, must = a_type(item), "make it a pair (input, target)"
    if isinstance(item, (tuple, list)):
        how = ", as (batch[:-1], batch[-1]), in a collate_fn" if len(item) > 2 else ""
        return f"{kind} of {len(item)}; {must}{how}"
    if not isinstance(item, Mapping):
        return f"{kind}; {must}"
    target = next((name for name in item if name in _TARGETS), "target")
    return (
        f"{kind} of {reprlib.repr(list(item))[1:-1]}; {must}, what the first layer and loss are "
        f"given of it, as (dict(batch), batch[{target!r}])"
    )


def _check_leaves(leaves: Sequence[Any], prefix: str) -> None:
    """Reject leaves that can be neither split nor sent and that the user can easily convert."""
    for leaf in leaves:
        kind = type(leaf)
        if kind.__module__ == "numpy" and not isinstance(leaf, _PLAIN):
            raise UsageError(
                f"{prefix} a numpy {kind.__name__}; make it a tensor, torch.from_numpy(array)"
            )
        held = [] if kind is torch.Tensor else getattr(leaf, "__dict__", {}).values()
        if any(isinstance(value, torch.Tensor) for value in held):
            raise UsageError(
                f"{prefix} {a_type(leaf)} that holds tensors, which would not be split; make it a "
                "tuple or a dict of them"
            )
        if isinstance(leaf, Mapping):  # a class that is not registered with pytree
            raise UsageError(f"{prefix} {a_type(leaf)}; make it a plain dict, dict(batch)")


def _check_lists(value: Any, samples: int, prefix: str) -> None:
    """Reject lists that seem to have a plain value for each sample: they are not split."""
    if type(value) in (list, tuple) and len(value) == samples and not distinct_tensors(value):
        raise UsageError(
            f"{prefix} a {type(value).__name__} of {samples} plain values beside tensors of "
            f"{samples} samples; if they are one for each sample, put them into a tensor, which is "
            "split into micro-batches; if not, put them into a dict, which each micro-batch gets"
        )
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            _check_lists(part, samples, prefix)


def _batch_size(item: Any, prefix: str) -> int:
    tensors = distinct_tensors(item)
    if not distinct_tensors(item[0]):
        _check_leaves(pytree.tree_leaves(item), prefix)
        raise UsageError(
            f"{prefix} an input without a tensor, {a_type(item[0])}; make it a tensor, or a dict "
            "of tensors"
        )
    for tensor in tensors:
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else "sparse"
            raise UsageError(f"{prefix} a {kind} tensor, which cannot be split; make it dense")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise UsageError(
            f"{prefix} a tensor without dims; dim 0 of every tensor is the batch, as a DataLoader "
            "makes it: of samples, return DataLoader(samples, batch_size=...)"
        )
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) > 1:
        shapes = [*dict.fromkeys(str(tuple(tensor.shape)) for tensor in tensors)]
        shown = ", ".join([*shapes[:8], *(["…"] if len(shapes) > 8 else [])])
        raise UsageError(
            f"{prefix} tensors that disagree in dim 0, the batch: {shown}; make it the same in "
            "all: transpose a tensor whose batch is another dim, stack the tensors of single "
            "samples, padded to one length, and make a tensor without a batch, as a mask, in "
            "forward"
        )
    (samples,) = sizes
    if samples == 0:
        raise UsageError(f"{prefix} a mini-batch without samples; leave it out")
    return int(samples)


def _sole_owners(item: Any) -> frozenset[int]:
    """Return the ids of the tensors of a pair whose memory no other tensor of it has."""
    tensors = [tensor for half in item for tensor in distinct_tensors(half)]
    addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    uses = Counter(addresses)
    both = zip(tensors, addresses, strict=True)
    return frozenset(id(tensor) for tensor, address in both if uses[address] == 1)


def _digest(item: Any) -> int:
    """Return a checksum of the content of a mini-batch, to compare what replicas have read."""
    leaves, structure = pytree.tree_flatten(item)
    checksum = zlib.crc32(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            checksum = zlib.crc32(f"{leaf.dtype}{tuple(leaf.shape)}".encode(), checksum)
            checksum = zlib.crc32(bits_of(leaf).cpu().numpy().data, checksum)
        elif isinstance(leaf, (str, bytes, bool, int, float, complex)) or leaf is None:
            checksum = zlib.crc32(repr(leaf).encode(), checksum)
    return checksum
