"""The passage of micro-batches between stages: over channels, or in memory on one worker.

Each payload has a pair of functions: one extracts it from a micro-batch at its source, the other
inserts it into the micro-batch at its target. Sends, receives and local transfers are made of these
pairs, whatever the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeworker.facts.position import Phase
from pipeworker.plan.actions import Edge, Payload
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.skips import StageSkips
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.stage.values import distinct_tensors, is_dense, map_tensors
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.layout import aligned_copy, check_dense, have_common_elements
from pipeworker.worker.transport.unchanged import Unchanged, counted

Handler = Callable[[int], None]
"""Performs an action for the micro-batch of a number."""
Transfer = Callable[[MicroBatch], None]
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


def _payload_functions(edge: Edge, source: StageSkips | None) -> tuple[Extract, Insert]:
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


@dataclass(slots=True, eq=False)
class StageChannels:
    """A stage of a worker, its micro-batches of the mini-batch by number, and its transfers.

    Attributes:
        receivers: channels whose buffers the stage needs until its backward.
        forward_receivers: those of them that receive before the forward.
        after_forward, after_backward: local transfers of what a forward or backward produces.
    """

    stage: Stage
    microbatches: dict[int, MicroBatch] = field(default_factory=dict)
    receivers: list[Receiver] = field(default_factory=list)
    forward_receivers: list[Receiver] = field(default_factory=list)
    after_forward: list[Transfer] = field(default_factory=list)
    after_backward: list[Transfer] = field(default_factory=list)

    def forward(self, m: int) -> None:
        unchanged = self.microbatches[m].unchanged
        if unchanged is not None:
            unchanged.check()
        self._act(self.stage.forward, m, self.after_forward)

    def forward_alone(self, m: int) -> None:
        """Run a forward that no backward follows, and keep nothing of it."""
        self.forward(m)
        mb = self.microbatches[m]
        mb.value, mb.output, mb.arrived = None, None, {}
        for receiver in self.forward_receivers:
            receiver.release(m)

    def recompute(self, m: int) -> None:
        self._act(self.stage.recompute, m)

    def fetch(self, m: int) -> None:
        """Start to copy back from the host's memory what the graph of the forward saved."""
        saved = self.microbatches[m].offloaded
        assert saved
        saved.fetch()

    def backward(self, m: int) -> None:
        self._act(self.stage.backward, m, self.after_backward, self.receivers)

    def backward_input(self, m: int) -> None:
        self._act(self.stage.backward_input, m, self.after_backward)

    def backward_weight(self, m: int) -> None:
        self._act(self.stage.backward_weight, m, receivers=self.receivers)

    def _act(
        self,
        act: Callable[[MicroBatch], None],
        m: int,
        transfers: Sequence[Transfer] = (),
        receivers: Sequence[Receiver] = (),
    ) -> None:
        mb = self.microbatches[m]
        act(mb)
        for transfer in transfers:
            transfer(mb)
        for receiver in receivers:
            receiver.release(m)
        self.stage.end_action(mb)


def local_transfer(edge: Edge, source: StageChannels, target: StageChannels) -> Transfer:
    """Return the transfer of a payload between two stages of one worker, in memory."""
    extract, insert = _payload_functions(edge, source.stage.skips)
    in_graph = edge.payload in (Payload.ACTIVATION, Payload.SKIP)
    last_layer = source.stage.name_of(source.stage.last_layer)

    def transfer(mb: MicroBatch) -> None:
        value = extract(mb)
        wants_grad: Sequence[bool] = ()
        if in_graph:  # each stage has a graph of its own
            for tensor in distinct_tensors(value):
                if not is_dense(tensor):
                    check_dense(tensor)  # raises what a channel between workers raises
            value = map_tensors(counted, value)
            wants_grad = [tensor.requires_grad for tensor in distinct_tensors(value)]
            # The target may work in place, also on memory that leaves the source in another value.
            copies = _shares_memory(mb, value)
            change = aligned_copy if copies else torch.Tensor.detach
            if edge.payload is Payload.ACTIVATION:
                tensors, arriving = distinct_tensors(value), target.microbatches[mb.number]
                arriving.common = have_common_elements(tensors)
                what = f"the output of {last_layer} for micro-batch {mb.number}"
                arriving.unchanged = None if copies else Unchanged(what, tensors)
            value = map_tensors(change, value)
        insert(target.microbatches[mb.number], value, wants_grad)

    return transfer


def _shares_memory(mb: MicroBatch, value: Any) -> bool:
    """Return whether another value that leaves the stage shares memory with `value`.

    So may the input that the stage keeps for a recompute: a layer may return it, or a view.
    """
    kept = (mb.value, mb.arrived) if mb.recompute else ()
    others = distinct_tensors([*mb.departing.values(), mb.outgoing, kept])
    memory = {tensor.untyped_storage().data_ptr() for tensor in others}
    return any(tensor.untyped_storage().data_ptr() in memory for tensor in distinct_tensors(value))


def send_handler(edge: Edge, channels: StageChannels, sender: Sender) -> Handler:
    """Return the handler that sends a stage's payloads."""
    extract, _ = _payload_functions(edge, channels.stage.skips)
    tracker = channels.stage.tracker
    layer, phase = -1, Phase.WAITING
    if edge.payload is Payload.ACTIVATION:
        # An output that cannot be sent is reported with the layer that made it.
        layer, phase = channels.stage.last_layer, Phase.FORWARD

    def send(m: int) -> None:
        tracker.wait(channels.stage.step, m, layer, phase)
        sender.send(m, extract(channels.microbatches[m]))

    return send


def receive_handler(edge: Edge, channels: StageChannels, receiver: Receiver) -> Handler:
    """Return the handler that receives payloads for a stage."""
    _, insert = _payload_functions(edge, None)
    tracker = channels.stage.tracker

    def receive(m: int) -> None:
        tracker.wait(channels.stage.step, m)
        value, mb = receiver.receive(m), channels.microbatches[m]
        insert(mb, value, receiver.wants_grad)
        if edge.payload is Payload.ACTIVATION:
            mb.common = receiver.common

    return receive


def waiting_handler(channels: StageChannels, perform: Callable[[], None]) -> Handler:
    """Return the handler of an action that waits, or may wait, for other workers."""

    def handle(_: int) -> None:
        channels.stage.tracker.wait(channels.stage.step)
        perform()

    return handle
