"""The outline of a network: its kinds of alike layers, and the input of each.

The worker that reads the data makes the outline; the coordinator distributes the kinds over the
workers, which measure them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.facts.layer_facts import LayerFacts, LayerSkip
from pipeworker.facts.limits import LONGEST_NAME, LONGEST_TEXT, check, check_names

_MOST_LAYERS = 1 << 20
_MOST_DIGITS = 64


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of alike layers, and the call of one of them.

    Attributes:
        digest: stands for code, configuration, shapes, input, and what it is measured with.
        layer: the first layer of this kind; the number of layers for the loss.
        input: the packed signature of the value that it is called with.
        popped: the packed signature of a dict of the skip tensors that it pops; b"" if none.
        stashed: names of the skip tensors that it leaves for later layers.
        uses_skips: whether it stashes or pops any tensor.
        counted: facts with numbers of operations instead of seconds, where these were counted.
    """

    digest: str
    layer: int
    input: bytes
    popped: bytes = b""
    stashed: tuple[str, ...] = ()
    uses_skips: bool = False
    counted: LayerFacts | None = None

    def __post_init__(self) -> None:
        check(0 < len(self.digest) <= _MOST_DIGITS, f"a digest of {len(self.digest)} digits")
        check(0 <= self.layer <= _MOST_LAYERS, f"layer {self.layer}")
        check(max(len(self.input), len(self.popped)) <= LONGEST_TEXT, "too long a signature")
        check_names(self.stashed, "names of skips")


@dataclass(frozen=True, slots=True)
class Outline:
    """The outline of a network.

    Attributes:
        kinds: the kinds of its layers, and that of the loss.
        of_layer: the number of each layer's kind.
        loss: the number of the loss's kind; -1 if there is none.
        types: names of the classes that stand as numbers in signatures, in this order.
        samples: samples of the micro-batch that layers are called with.
        input_bytes, target_bytes: bytes of that micro-batch.
        skips, ties: as in :class:`pipeworker.facts.layer_facts.NetworkFacts`.
        batch_samples: samples of the mini-batch, over all replicas.
    """

    kinds: tuple[LayerKind, ...]
    of_layer: tuple[int, ...]
    loss: int = -1
    types: tuple[str, ...] = ()
    samples: int = 1
    input_bytes: int = 0
    target_bytes: int = 0
    skips: tuple[LayerSkip, ...] = ()
    ties: tuple[LayerSkip, ...] = ()
    batch_samples: int = 0

    def __post_init__(self) -> None:
        count, layers = len(self.kinds), len(self.of_layer)
        check(all(0 <= kind < count for kind in self.of_layer), "a layer of no kind")
        check(-1 <= self.loss < count, f"the loss is kind {self.loss}")
        check_names(self.types, "names of types")
        sizes = (self.samples, self.batch_samples, self.input_bytes, self.target_bytes)
        check(min(sizes) >= 0, "a negative size")
        for skip in (*self.skips, *self.ties):
            inside = 0 <= skip.source <= skip.target < layers
            check(inside and skip.bytes >= 0, f"a skip to layer {skip.target}")


@dataclass(frozen=True, slots=True)
class Machine:
    """The device, or the processor, that a worker computes on.

    Attributes:
        name: the product name of the device.
        unit: identifies an accelerator on its host; "" for the CPU.
        limit: bytes of memory that the device, or the host, grants; 0 if unknown.
        base_bytes: bytes that the worker uses without layers.
    """

    name: str
    unit: str = ""
    limit: int = 0
    base_bytes: int = 0

    def __post_init__(self) -> None:
        longest = max(len(self.name), len(self.unit))
        check(longest <= LONGEST_NAME, "too long a name of a device")
        check(min(self.limit, self.base_bytes) >= 0, "a negative size of memory")
