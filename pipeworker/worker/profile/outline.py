"""The outline of a network, drawn while its layers are called one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipeworker.facts.connections import Tie
from pipeworker.facts.layer_facts import LayerSkip
from pipeworker.facts.layer_names import layer_of, split_numbered
from pipeworker.facts.outline import LayerKind, Outline
from pipeworker.facts.step import Batch
from pipeworker.worker.profile.alike import digest, key_of
from pipeworker.worker.profile.measure import LayerCall
from pipeworker.worker.profile.signature import ValueSignature, input_ranges
from pipeworker.worker.stage.cut.part import Part
from pipeworker.worker.stage.skips import Recorder
from pipeworker.worker.stage.values import bytes_of, distinct_tensors, map_tensors
from pipeworker.worker.transport.layout import aligned_copy
from pipeworker.worker.transport.structure import TypeRegistry

Examine = Callable[[LayerKind, nn.Module, LayerCall], LayerKind]
"""Called with the first layer of each kind; returns the kind, with counts or as it is."""


@dataclass(slots=True)
class Drawing:
    """An outline while it is drawn: :meth:`call` takes the place of a call of each layer.

    Attributes:
        table: what layers stash and pop; it is active while they are called.
        types: classes that may pass between layers, by name.
        surroundings: a digest of what else costs depend on.
        ties: tied weights of the network.
        examine: called once for each kind.
        reuses: whether a layer that is like an earlier one is not called: on fake tensors its
            output is that of the earlier one.
        calls_all: whether such a layer is called all the same: what it stashes, and which buffers
            it changes, may depend on its name or its number, and alike layers differ in these.
        last: the output of the last layer called, without its graph.
        output: its packed signature.
    """

    types: Mapping[str, type]
    surroundings: str
    ties: Sequence[Tie] = ()
    examine: Examine | None = None
    reuses: bool = True
    calls_all: bool = False
    table: Recorder = field(default_factory=Recorder, init=False)
    last: Any = None
    output: bytes = b""
    _kinds: list[LayerKind] = field(default_factory=list)
    _of_layer: list[int] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)
    _outputs: dict[str, Any] = field(default_factory=dict)
    _registry: TypeRegistry = field(init=False)
    _input_bytes: int = 0
    _inputs: dict[Any, tuple[int, int, int]] = field(default_factory=dict)
    _stashed: dict[str, tuple[int, int]] = field(default_factory=dict)
    _skips: list[LayerSkip] = field(default_factory=list)
    _tied: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._registry = TypeRegistry(self.types.values())

    def begin(self, value: Any, stand_in: Any) -> None:
        """Begin with the network's input, and with what stands for it in the calls of layers."""
        tensors = distinct_tensors(value)
        self._input_bytes = bytes_of(tensors)
        self._inputs = input_ranges(tensors, distinct_tensors(stand_in))

    def call(self, index: int, layer: nn.Module, value: Any) -> Any:
        """Call a layer, or the earlier one that it is like; return the output.

        Raises:
            Exception: whatever the layer raises.
        """
        self._note_ties(index, layer)
        signature = alike = self._signature(value)
        is_part = isinstance(layer, Part)
        if is_part and index:  # the first item says which layers were before
            alike = self._signature(value[1:])
        found = digest(self.surroundings, key_of(layer), alike.pack())
        if found in self._outputs:
            output = self._outputs[found]
        else:
            kept = value
            if self.examine is not None and not self.reuses:  # the layer may change its input
                kept = map_tensors(lambda tensor: aligned_copy(tensor.detach()), value)
            output = layer(value)
            if self.table.events:
                popped = self._signature(list(self.table.popped.values()))
                found = digest(found, popped.pack(), len(self.table.events))
            elif self.reuses and not self.calls_all and not is_part:
                self._outputs[found] = output
            if found not in self._numbers:
                self._numbers[found] = len(self._kinds)
                self._kinds.append(self._kind(found, index, layer, signature, kept))
            self._note_skips(index)
        self._of_layer.append(self._numbers[found])
        self.output = self._signature(output).pack()
        self.last = map_tensors(
            lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), output
        )
        return output

    def outline(self) -> Outline:
        """Return the outline, when all layers have been called."""
        ties = []
        for tie in self.ties:
            first, *others = tie.names
            size = self._tied.get(first, 0)
            ties += [LayerSkip(layer_of(first), layer_of(name), size) for name in others]
        return Outline(
            tuple(self._kinds),
            tuple(self._of_layer),
            types=tuple(self.types),
            input_bytes=self._input_bytes,
            skips=tuple(self._skips),
            ties=tuple(ties),
        )

    def _signature(self, value: Any) -> ValueSignature:
        return ValueSignature.of(value, self._registry, self._inputs)

    def _kind(
        self, found: str, index: int, layer: nn.Module, signature: ValueSignature, value: Any
    ) -> LayerKind:
        """Return the kind of a layer that was just called with `value`."""
        popped, stashed = self.table.popped, tuple(self.table.stashed)
        uses_skips = bool(self.table.events)
        packed = self._signature(popped).pack() if popped else b""
        kind = LayerKind(found, index, signature.pack(), packed, stashed, uses_skips)
        if self.examine is None:
            return kind
        wanted = {name: (_without_graph(t), t.requires_grad) for name, t in popped.items()}
        value = map_tensors(_without_graph, value)
        call = LayerCall(index, value, signature.wants_grad, wanted, stashed, uses_skips)
        return self.examine(kind, layer, call)

    def _note_skips(self, index: int) -> None:
        for name in self.table.popped:
            source, size = self._stashed.pop(name)
            self._skips.append(LayerSkip(source, index, size))
        for name, tensor in self.table.stashed.items():
            self._stashed[name] = index, bytes_of(tensor)

    def _note_ties(self, index: int, layer: nn.Module) -> None:
        """Note the sizes of the layer's parameters that are tied to those of later layers."""
        firsts = [tie.names[0] for tie in self.ties if layer_of(tie.names[0]) == index]
        if firsts:
            sizes = {name: parameter.nbytes for name, parameter in layer.named_parameters()}
            self._tied.update({name: sizes.get(split_numbered(name)[1], 0) for name in firsts})


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its graph.

    In a pass on fake tensors the input of a cut module is real, and a detached one would not be.
    """
    return tensor.detach() if tensor.requires_grad else tensor


def with_loss(outline: Outline, output: bytes, target: Any, batch: Batch) -> Outline:
    """Return an outline with the kind of the loss, for the `target` of a micro-batch."""
    tensors = distinct_tensors(target)
    shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    layers = len(outline.of_layer)
    surroundings = [kind.digest for kind in outline.kinds]
    loss = LayerKind(digest("loss", surroundings, output, shapes), layers, output)
    return dataclasses.replace(
        outline,
        kinds=(*outline.kinds, loss),
        loss=len(outline.kinds),
        samples=-(-batch.samples // batch.microbatches),
        batch_samples=batch.samples,
        target_bytes=bytes_of(tensors),
    )
