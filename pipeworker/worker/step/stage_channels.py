"""How micro-batches pass between stages: over channels, or in memory between stages of one worker.

Each payload has a pair of functions: one extracts it from a micro-batch at its source, the other
inserts it into the micro-batch at its target. Sends, receives and local transfers are made of these
pairs, whatever the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeworker.facts.position import Phase
from pipeworker.plan.actions import Edge, Payload
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.skips import StageSkips
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.stage.values import distinct_tensors, map_tensors
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.layout import aligned_copy

Extract = Callable[[MicroBatch], Any]
Insert = Callable[[MicroBatch, Any, Sequence[bool]], None]
"""Takes the micro-batch, the value, and which of its distinct tensors want a gradient."""


def _extract_activation(mb: MicroBatch) -> Any:
    value, mb.outgoing = mb.outgoing, None
    return value


def _insert_activation(mb: MicroBatch, value: Any, wants_grad: Sequence[bool]) -> None:
    mb.value, mb.wants_grad = value, wants_grad


def _extract_target(mb: MicroBatch) -> Any:
    target, mb.target = mb.target, None
    return target


def _insert_target(mb: MicroBatch, value: Any, wants_grad: Sequence[bool]) -> None:
    mb.target = value


def _extract_gradient(mb: MicroBatch) -> Any:
    gradients, mb.input_gradients = mb.input_gradients, []
    return _pack(gradients)


def _insert_gradient(mb: MicroBatch, value: Any, wants_grad: Sequence[bool]) -> None:
    mb.output_gradients = _unpack(value)


def payload_functions(edge: Edge, source: StageSkips | None) -> tuple[Extract, Insert]:
    """Return the functions that extract and insert the payload of an edge.

    An activation is the output of a stage: nested tensors of shape ``[n, ...]``, where n is the
    number of samples of the micro-batch. Its gradients have the shapes of its distinct tensors.
    `source` are the skip connections of the stage at the source, if it is on this worker.
    """
    match edge.payload:
        case Payload.ACTIVATION:
            return _extract_activation, _insert_activation
        case Payload.TARGET:
            return _extract_target, _insert_target
        case Payload.GRADIENT:
            return _extract_gradient, _insert_gradient
    at_target, at_source = edge.target, edge.source

    def extract_skips(mb: MicroBatch) -> Any:
        assert source
        return _pack([mb.departing.pop(name) for name in source.departing[at_target]])

    def insert_skips(mb: MicroBatch, value: Any, wants_grad: Sequence[bool]) -> None:
        mb.arrived[at_source] = _unpack(value), list(wants_grad)

    def extract_skip_gradients(mb: MicroBatch) -> Any:
        return _pack(mb.arrived_gradients.pop(at_target))

    def insert_skip_gradients(mb: MicroBatch, value: Any, wants_grad: Sequence[bool]) -> None:
        mb.departed_gradients[at_source] = _unpack(value)

    if edge.payload is Payload.SKIP:
        return extract_skips, insert_skips
    return extract_skip_gradients, insert_skip_gradients


def _pack(tensors: Sequence[Any]) -> Any:
    """Return a single tensor bare, which is quicker to send, and several as a list."""
    return tensors[0] if len(tensors) == 1 else list(tensors)


def _unpack(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class StageChannels:
    """A stage of a worker, its micro-batches of the mini-batch by number, and its transfers.

    Attributes:
        receivers: channels whose buffers the stage needs until its backward.
        after_forward, after_backward: local transfers of what a forward or backward produces.
    """

    __slots__ = ("after_backward", "after_forward", "microbatches", "receivers", "stage", "step")

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.step = 0
        self.microbatches: dict[int, MicroBatch] = {}
        self.receivers: list[Receiver] = []
        self.after_forward: list[LocalTransfer] = []
        self.after_backward: list[LocalTransfer] = []

    def forward_data(self, m: int) -> None:
        """Run the forward of stage 0, whose input comes from the data and wants no gradient."""
        mb = self.microbatches[m]
        mb.wants_grad = [False] * len(distinct_tensors(mb.value))
        self.forward(m)

    def forward(self, m: int) -> None:
        mb = self.microbatches[m]
        self.stage.forward(mb)
        for transfer in self.after_forward:
            transfer(mb)
        self.stage.end_action(mb)

    def recompute(self, m: int) -> None:
        mb = self.microbatches[m]
        self.stage.recompute(mb)
        self.stage.end_action(mb)

    def fetch(self, m: int) -> None:
        self.stage.fetch(self.microbatches[m])

    def backward(self, m: int) -> None:
        mb = self.microbatches[m]
        self.stage.backward(mb)
        for transfer in self.after_backward:
            transfer(mb)
        for receiver in self.receivers:
            receiver.release(m)
        self.stage.end_action(mb)

    def backward_input(self, m: int) -> None:
        mb = self.microbatches[m]
        self.stage.backward_input(mb)
        for transfer in self.after_backward:
            transfer(mb)
        self.stage.end_action(mb)

    def backward_weight(self, m: int) -> None:
        mb = self.microbatches[m]
        self.stage.backward_weight(mb)
        for receiver in self.receivers:
            receiver.release(m)
        self.stage.end_action(mb)


class LocalTransfer:
    """The transfer of a payload between two stages of one worker, in memory."""

    __slots__ = ("_extract", "_in_graph", "_insert", "_target")

    def __init__(self, edge: Edge, extract: Extract, insert: Insert, target: StageChannels) -> None:
        self._in_graph = edge.payload in (Payload.ACTIVATION, Payload.SKIP)
        self._extract, self._insert, self._target = extract, insert, target

    def __call__(self, mb: MicroBatch) -> None:
        value = self._extract(mb)
        wants_grad: Sequence[bool] = ()
        if self._in_graph:  # each stage has a graph of its own
            wants_grad = [tensor.requires_grad for tensor in distinct_tensors(value)]
            # The target may work in place, also on memory that leaves the source in another value.
            change = aligned_copy if _shares_memory(mb, value) else torch.Tensor.detach
            value = map_tensors(change, value)
        self._insert(self._target.microbatches[mb.number], value, wants_grad)


def _shares_memory(mb: MicroBatch, value: Any) -> bool:
    """Return whether another value that leaves the stage shares memory with `value`."""
    others = [t for t in mb.departing.values() if t is not None]
    if mb.departing or mb.outgoing is not None:
        others += distinct_tensors(mb.outgoing)
    memory = {tensor.untyped_storage().data_ptr() for tensor in others}
    return any(tensor.untyped_storage().data_ptr() in memory for tensor in distinct_tensors(value))


class Outgoing:
    """A stage's end of a channel on which it sends."""

    __slots__ = ("_channels", "_extract", "_layer", "_phase", "sender")

    def __init__(
        self, edge: Edge, channels: StageChannels, extract: Extract, sender: Sender
    ) -> None:
        self._channels, self._extract, self.sender = channels, extract, sender
        # An output that cannot be sent is reported with the layer that made it.
        is_output = edge.payload is Payload.ACTIVATION
        self._layer = channels.stage.last_layer if is_output else -1
        self._phase = Phase.FORWARD if is_output else Phase.WAITING

    def __call__(self, m: int) -> None:
        channels = self._channels
        channels.stage.tracker.wait(channels.step, m, self._layer, self._phase)
        self.sender.send(m, self._extract(channels.microbatches[m]))

    def send_wrapped(self, m: int, wrap: Callable[[Any], Any]) -> None:
        """Send ``wrap(payload)`` in place of the payload of micro-batch `m`."""
        channels = self._channels
        channels.stage.tracker.wait(channels.step, m, self._layer, self._phase)
        self.sender.send(m, wrap(self._extract(channels.microbatches[m])))


class Incoming:
    """A stage's end of a channel on which it receives."""

    __slots__ = ("_channels", "_insert", "receiver")

    def __init__(self, channels: StageChannels, insert: Insert, receiver: Receiver) -> None:
        self._channels, self._insert, self.receiver = channels, insert, receiver

    def __call__(self, m: int) -> None:
        channels, receiver = self._channels, self.receiver
        channels.stage.tracker.wait(channels.step, m)
        value = receiver.receive(m)
        self._insert(channels.microbatches[m], value, receiver.wants_grad)

    def receive(self, m: int) -> Any:
        """Return the value that was sent for micro-batch `m`, without inserting it."""
        channels = self._channels
        channels.stage.tracker.wait(channels.step, m)
        return self.receiver.receive(m)

    def insert(self, m: int, value: Any) -> None:
        """Insert a payload into micro-batch `m`."""
        self._insert(self._channels.microbatches[m], value, self.receiver.wants_grad)
