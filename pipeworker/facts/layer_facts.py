"""Measured facts of layers, from which a job is planned: seconds and bytes, one layer at a time."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pipeworker.facts.connections import SharedBuffer

_LARGEST = 1 << 62
"""Bytes or seconds that no layer has, and whose sums are numbers."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """The costs of one micro-batch in one layer, on a worker of speed 1.

    Attributes:
        kind: the name of the layer's class.
        parameters: number of elements of its parameters.
        parameter_bytes: bytes of its parameters and buffers.
        gradient_bytes: bytes of the gradients of its parameters; 0 if all are frozen.
        optimizer_bytes: bytes of the optimizer's state for its parameters.
        forward: seconds of a forward that keeps its graph.
        backward: seconds of a whole backward, 0 if no gradient passes it.
        backward_input: seconds of its first part where the backward is split; the part for the
            weights takes the rest. Equal to `backward` if no parameter has a gradient, 0 if only
            parameters have one.
        update: seconds of the gradient's norm and of the optimizer's step for its parameters.
        update_bytes: bytes that the optimizer's step takes for a time.
        saved_bytes: bytes that its graph keeps until the backward, besides parameters, input and
            output. On the CPU with the bytes that the allocator loses between tensors.
        saved_input_bytes: of its input, the bytes that its graph keeps.
        saved_output_bytes: of its output, the bytes that its graph keeps. Of the tensors between
            two layers of a stage the graph keeps the larger of the first one's saved output and
            the second one's saved input.
        working_bytes: bytes that its forward or backward takes for a time, besides all others.
        deferred_bytes: bytes of gradients that a split backward keeps from its first part to its
            second one.
        output_bytes: bytes of the value that it passes to the next layer.
        splits: whether its backward can be run in two parts.
        passes_gradient: whether its output requires a gradient, in a network up to this layer.
        flops: floating-point operations of a forward and a backward, as torch counts them: of
            products of matrices and convolutions. 0 if they are not counted, as of compiled layers.
    """

    kind: str
    parameters: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    forward: float = 0.0
    backward: float = 0.0
    backward_input: float = 0.0
    update: float = 0.0
    update_bytes: int = 0
    saved_bytes: int = 0
    saved_input_bytes: int = 0
    saved_output_bytes: int = 0
    working_bytes: int = 0
    deferred_bytes: int = 0
    output_bytes: int = 0
    splits: bool = True
    passes_gradient: bool = True
    flops: int = 0

    @property
    def is_possible(self) -> bool:
        """Whether all numbers are ones that a layer may have, as those of a file may not be."""
        return _are_possible(self)


@dataclass(frozen=True, slots=True)
class LayerSkip:
    """A skip connection from one layer to a later one, and the bytes of its value."""

    source: int
    target: int
    bytes: int


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """The facts of a network's layers, and of the workers that shall run it.

    Attributes:
        layers: facts by layer, for a micro-batch of `samples` samples.
        input_bytes: bytes of a micro-batch's input.
        target_bytes: bytes of a micro-batch's target.
        loss: seconds of the loss, forward and backward, on the last stage.
        skips: skip connections between layers.
        ties: pairs of layers that share a parameter, with the bytes of its gradient.
        samples: samples of the micro-batch that was measured.
        batch_samples: samples of its mini-batch, over all replicas; 0 if unknown.
        speeds: how fast each worker of a replica computes, against the worker that measured; () if
            all compute alike.
        limits: bytes that each worker may use, None without a limit; () if none has one.
        base_bytes: bytes of a worker's process without layers.
        latency: seconds that a transfer between two workers takes besides its bytes.
        seconds_per_byte: what each of its bytes adds.
        handling: seconds that a worker takes to send or to receive a value, in which it does not
            compute.
        measured: whether seconds were measured; else they are counts of operations.
        loss_saved_bytes: bytes that the loss's graph keeps of a micro-batch, besides the output and
            the target.
        loss_saved_input_bytes: of the output, the bytes that the loss's graph keeps.
        loss_working_bytes: bytes that the loss takes for a time.
        copies: snapshots of parameters and optimizer state that a worker keeps in the memory that
            it computes in.
        maps_frames: whether both ends of a channel map the buffers of the frames that pass.
        updates_at_once: whether an optimizer updates all parameters in one operation, which takes
            the `update_bytes` of all layers at once.
        frozen: the layers that are known, before any is built, to have nothing to train.
        shared_buffers: buffers that are in several layers and may change in a forward.
        replicas: copies of the pipeline that add up their gradients.
        shards_optimizer: whether each replica has a part of the optimizer's state.
        device: the name of what the workers compute on; "" if it is not the same for all.
    """

    layers: tuple[LayerFacts, ...]
    input_bytes: int = 0
    target_bytes: int = 0
    loss: float = 0.0
    skips: tuple[LayerSkip, ...] = ()
    ties: tuple[LayerSkip, ...] = ()
    samples: int = 1
    speeds: tuple[float, ...] = ()
    limits: tuple[int | None, ...] = ()
    base_bytes: int = 0
    latency: float = 0.0
    seconds_per_byte: float = 0.0
    handling: float = 0.0
    measured: bool = True
    loss_saved_bytes: int = 0
    loss_saved_input_bytes: int = 0
    loss_working_bytes: int = 0
    copies: int = 0
    maps_frames: bool = False
    updates_at_once: bool = True
    frozen: tuple[int, ...] = ()
    shared_buffers: tuple[SharedBuffer, ...] = ()
    replicas: int = 1
    shards_optimizer: bool = False
    device: str = ""
    batch_samples: int = 0

    @property
    def is_possible(self) -> bool:
        """Whether all numbers are ones that a network may have, as those of a file may not be."""
        pairs, buffers = [*self.skips, *self.ties], self.shared_buffers
        of_layers = [*(max(pair.source, pair.target) for pair in pairs), *(b.last for b in buffers)]
        if max(of_layers, default=-1) >= len(self.layers) or not all(self.speeds):
            return False
        parts: list[LayerFacts | LayerSkip | SharedBuffer] = [*self.layers, *pairs, *buffers]
        return _are_possible(self) and all(map(_are_possible, parts))

    @property
    def flops_per_sample(self) -> float:
        """The floating-point operations of a forward and a backward of one sample; 0 if unknown."""
        return sum(layer.flops for layer in self.layers) / max(1, self.samples)


def _are_possible(facts: LayerFacts | LayerSkip | SharedBuffer | NetworkFacts) -> bool:
    """Return whether the numbers of an object are neither negative nor too large."""
    values = [getattr(facts, field.name) for field in fields(facts)]
    numbers = [one for value in values for one in (value if isinstance(value, tuple) else [value])]
    return all(0 <= one < _LARGEST for one in numbers if isinstance(one, (int, float)))
