"""How micro-batches get from stage to stage: over channels, or in memory on one worker.

What a payload takes from a micro-batch at its source, and puts into it at its target, is a pair of
functions. Sends, receives and handovers are made of these, whatever the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeworker.plan.actions import Edge, Payload
from pipeworker.wire.messages.position import Phase
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.stage import Skips, Stage
from pipeworker.worker.stage.values import copied, detached, distinct_tensors
from pipeworker.worker.transport.channel import Receiver, Sender

Take = Callable[[MicroBatch], Any]
Put = Callable[[MicroBatch, Any, Sequence[bool]], None]
"""Is given the micro-batch, the value, and which of its distinct tensors want a gradient."""


def _take_activation(mb: MicroBatch) -> Any:
    value, mb.outgoing = mb.outgoing, None
    return value


def _put_activation(mb: MicroBatch, value: Any, wants: Sequence[bool]) -> None:
    mb.value, mb.wants_grad = value, wants


def _take_target(mb: MicroBatch) -> Any:
    target, mb.target = mb.target, None
    return target


def _put_target(mb: MicroBatch, value: Any, wants: Sequence[bool]) -> None:
    mb.target = value


def _take_gradient(mb: MicroBatch) -> Any:
    gradients, mb.input_gradients = mb.input_gradients, []
    return _packed(gradients)


def _put_gradient(mb: MicroBatch, value: Any, wants: Sequence[bool]) -> None:
    mb.output_gradients = _unpacked(value)


def payload_of(edge: Edge, source: Skips | None, target: Skips | None) -> tuple[Take, Put]:
    """What goes over an edge.

    Args:
        source, target: the skip connections of the stage at either end, where it is known here.
    """
    match edge.payload:
        case Payload.ACTIVATION:
            return _take_activation, _put_activation
        case Payload.TARGET:
            return _take_target, _put_target
        case Payload.GRADIENT:
            return _take_gradient, _put_gradient
    there, here = edge.target, edge.source

    def take_skips(mb: MicroBatch) -> Any:
        assert source
        return _packed([mb.departing.pop(name) for name in source.departing[there]])

    def put_skips(mb: MicroBatch, value: Any, wants: Sequence[bool]) -> None:
        mb.arrived[here] = _unpacked(value), list(wants)

    def take_skip_gradients(mb: MicroBatch) -> Any:
        return _packed(mb.arrived_gradients.pop(there))

    def put_skip_gradients(mb: MicroBatch, value: Any, wants: Sequence[bool]) -> None:
        mb.departed_gradients[here] = _unpacked(value)

    if edge.payload is Payload.SKIP:
        return take_skips, put_skips
    return take_skip_gradients, put_skip_gradients


def _packed(tensors: Sequence[Any]) -> Any:
    """One alone goes bare, which is quicker."""
    return tensors[0] if len(tensors) == 1 else list(tensors)


def _unpacked(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class Flow:
    """One stage of a worker, and its micro-batches of the mini-batch."""

    __slots__ = ("after_backward", "after_forward", "microbatches", "receivers", "stage", "step")

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.step = 0
        self.microbatches: Sequence[MicroBatch] = ()
        self.receivers: list[Receiver] = []
        self.after_forward: list[Handover] = []
        self.after_backward: list[Handover] = []

    def forward(self, m: int) -> None:
        mb = self.microbatches[m]
        self.stage.forward(mb)
        for handover in self.after_forward:
            handover(mb)
        self.stage.ended(mb)

    def recompute(self, m: int) -> None:
        mb = self.microbatches[m]
        self.stage.recompute(mb)
        self.stage.ended(mb)

    def fetch(self, m: int) -> None:
        self.stage.fetch(self.microbatches[m])

    def backward(self, m: int) -> None:
        mb = self.microbatches[m]
        self.stage.backward(mb)
        for handover in self.after_backward:
            handover(mb)
        for receiver in self.receivers:
            receiver.release(m)
        self.stage.ended(mb)

    def backward_input(self, m: int) -> None:
        mb = self.microbatches[m]
        self.stage.backward_input(mb)
        for handover in self.after_backward:
            handover(mb)
        self.stage.ended(mb)

    def backward_weight(self, m: int) -> None:
        mb = self.microbatches[m]
        self.stage.backward_weight(mb)
        for receiver in self.receivers:
            receiver.release(m)
        self.stage.ended(mb)


class Handover:
    """From one stage of a worker to another, in memory."""

    __slots__ = ("_graph", "_put", "_take", "_target")

    def __init__(self, edge: Edge, take: Take, put: Put, target: Flow) -> None:
        self._graph = edge.payload in (Payload.ACTIVATION, Payload.SKIP)
        self._take, self._put, self._target = take, put, target

    def __call__(self, mb: MicroBatch) -> None:
        value = self._take(mb)
        wants: Sequence[bool] = ()
        if self._graph:  # each stage has a graph of its own
            wants = [tensor.requires_grad for tensor in distinct_tensors(value)]
            # The target may work in place, on what else leaves the source as well.
            value = copied(value) if _leaves(mb, value) else detached(value)
        self._put(self._target.microbatches[mb.number], value, wants)


def _leaves(mb: MicroBatch, value: Any) -> bool:
    """Whether something else that leaves the stage has the memory of a value."""
    others = [t for t in mb.departing.values() if t is not None]
    if mb.departing or mb.outgoing is not None:
        others += distinct_tensors(mb.outgoing)
    memory = {tensor.untyped_storage().data_ptr() for tensor in others}
    return any(tensor.untyped_storage().data_ptr() in memory for tensor in distinct_tensors(value))


class Outgoing:
    """A stage's end of a channel that it sends on."""

    __slots__ = ("_flow", "_layer", "_phase", "_take", "sender")

    def __init__(self, edge: Edge, flow: Flow, take: Take, sender: Sender) -> None:
        self._flow, self._take, self.sender = flow, take, sender
        # An output that cannot travel is named by the layer that made it.
        made = edge.payload is Payload.ACTIVATION
        self._layer = flow.stage.last_layer if made else -1
        self._phase = Phase.FORWARD if made else Phase.WAITING

    def __call__(self, m: int) -> None:
        flow = self._flow
        flow.stage.tracker.wait(flow.step, m, self._layer, self._phase)
        self.sender.send(m, self._take(flow.microbatches[m]))

    def wrapped(self, m: int, wrap: Callable[[Any], Any]) -> None:
        """Send what the payload takes, in something."""
        flow = self._flow
        flow.stage.tracker.wait(flow.step, m, self._layer, self._phase)
        self.sender.send(m, wrap(self._take(flow.microbatches[m])))


class Incoming:
    """A stage's end of a channel that it receives on."""

    __slots__ = ("_flow", "_put", "receiver")

    def __init__(self, flow: Flow, put: Put, receiver: Receiver) -> None:
        self._flow, self._put, self.receiver = flow, put, receiver

    def __call__(self, m: int) -> None:
        flow, receiver = self._flow, self.receiver
        flow.stage.tracker.wait(flow.step, m)
        value = receiver.receive(m)
        self._put(flow.microbatches[m], value, receiver.wants_grad)

    def receive(self, m: int) -> Any:
        """What has come, before it is put anywhere."""
        flow = self._flow
        flow.stage.tracker.wait(flow.step, m)
        return self.receiver.receive(m)

    def put(self, m: int, value: Any) -> None:
        self._put(self._flow.microbatches[m], value, self.receiver.wants_grad)
