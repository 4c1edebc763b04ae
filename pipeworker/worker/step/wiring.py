"""The ends of a worker's channels: to other stages, in memory, to replicas, for tied weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from pipeworker.host.task_thread import TaskThread
from pipeworker.plan.actions import Edge, Payload
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import CHANNEL_CAPACITY, GRADIENTS_AHEAD, is_bounded
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.step.batch_feed import BatchScatter
from pipeworker.worker.step.reduction import Reduction
from pipeworker.worker.step.stage_channels import (
    Handler,
    StageChannels,
    local_transfer,
    receive_handler,
    send_handler,
    waiting_handler,
)
from pipeworker.worker.transport import frame as frames
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.links.link import Link
from pipeworker.worker.transport.structure import NO_TYPES, TypeRegistry
from pipeworker.worker.update.ties import Ties

_FRAMES_AHEAD = 16
"""Receives of activations and targets posted ahead; their buffers are needed until backward."""
_BACKWARDS = (Payload.GRADIENT, Payload.SKIP_GRADIENT)


class Wiring:
    """The connections of a worker's stages with each other and with other workers.

    Args:
        links: the worker's end of each edge that it uses.
        send_thread: performs large sends; None: the calling thread performs them.
        ties: ties by stage, of the stages that have places of tied weights.
        types: classes of the user's that values on channels may have.
        accelerator: device of the stages; None for the CPU.

    Attributes:
        senders: of channels between stages, and of gradients between replicas.
        receivers: of channels between stages.
        handlers: what sends or receives over each channel between stages.
        reductions: reductions over the replicas, by stage; empty with one replica.
        scatter: scatter of mini-batches over the replicas, for stage 0.
    """

    def __init__(
        self,
        placement: Placement,
        stages: Mapping[int, Stage],
        links: Mapping[Edge, Link],
        send_thread: TaskThread | None,
        ties: Mapping[int, Ties],
        types: TypeRegistry = NO_TYPES,
        replica: int = 0,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._placement = placement
        self.stages = {index: StageChannels(stage) for index, stage in stages.items()}
        self.ties, self.replica, self.accelerator = ties, replica, accelerator
        self.senders: dict[Edge, Sender] = {}
        self.receivers: dict[Edge, Receiver] = {}
        self.handlers: dict[Edge, Handler] = {}
        self._links, self._send_thread, self._types = links, send_thread, types
        for edge, link in links.items():
            if edge.origin < 0:
                self._connect(edge, link)
        for edge in self._local_edges():
            source, target = self.stages[edge.source], self.stages[edge.target]
            after = source.after_backward if edge.payload in _BACKWARDS else source.after_forward
            after.append(local_transfer(edge, source, target))
        self.reductions: dict[int, Reduction] = {}
        self._connect_replicas()

    def _connect(self, edge: Edge, link: Link) -> None:
        """Make the end of a channel between stages of the end of a link."""
        source, target = self.stages.get(edge.source), self.stages.get(edge.target)
        if source:
            capacity = CHANNEL_CAPACITY if is_bounded(edge, self._placement) else None
            sent = _of_stage(edge, source.stage)
            sender = Sender(link, capacity, self._send_thread, self._types, self.accelerator, sent)
            self.senders[edge] = sender
            if edge.payload is Payload.TIED:
                send = partial(self.ties[edge.source].send, edge.target, sender)
                self.handlers[edge] = waiting_handler(source, send)
            else:
                self.handlers[edge] = send_handler(edge, source, sender)
        elif target:
            depth = GRADIENTS_AHEAD if edge.payload in _BACKWARDS else _FRAMES_AHEAD
            receiver = Receiver(link, depth, self._types, self.accelerator)
            self.receivers[edge] = receiver
            if edge.payload is Payload.TIED:
                receive = partial(self.ties[edge.target].receive, edge.source, receiver)
                self.handlers[edge] = waiting_handler(target, receive)
            else:
                self.handlers[edge] = receive_handler(edge, target, receiver)
                target.receivers.append(receiver)
                if edge.payload not in _BACKWARDS:
                    target.forward_receivers.append(receiver)

    def _connect_replicas(self) -> None:
        senders: defaultdict[tuple[Payload, int], dict[int, Sender]] = defaultdict(dict)
        receivers: defaultdict[tuple[Payload, int], dict[int, Receiver]] = defaultdict(dict)
        for edge, link in self._links.items():
            key = edge.payload, edge.source
            if edge.origin == self.replica:  # a loop of the user's may have its data on the device
                sender = Sender(link, None, self._send_thread, self._types, self.accelerator)
                senders[key][edge.goal] = sender
                if edge.payload is Payload.SUM:
                    self.senders[edge] = sender
            elif edge.origin >= 0:
                device = None if edge.payload is Payload.DATA else self.accelerator
                receiver = Receiver(link, CHANNEL_CAPACITY, self._types, device)
                receivers[key][edge.origin] = receiver
        for index, channels in self.stages.items():
            key = Payload.SUM, index
            if senders[key]:
                self.reductions[index] = Reduction(
                    channels.stage, self.replica, senders[key], receivers[key]
                )
        key = Payload.DATA, 0
        self.scatter = BatchScatter(senders[key], receivers[key].get(0))

    def _local_edges(self) -> list[Edge]:
        """Return the edges between stages of this worker."""
        edges = []
        for index, channels in self.stages.items():
            if index + 1 in self.stages:
                edges.append(Edge(index, index + 1, Payload.ACTIVATION))
                edges.append(Edge(index + 1, index, Payload.GRADIENT))
            for peer in channels.stage.skips.departing if channels.stage.skips else ():
                if peer in self.stages:
                    edges.append(Edge(index, peer, Payload.SKIP))
                    edges.append(Edge(peer, index, Payload.SKIP_GRADIENT))
        return edges

    def begin(self, signature: int | None, order: Mapping[Edge, list[int]]) -> None:
        """Begin a mini-batch on all channels between stages.

        With the shape signature None every frame is described. `order` has the numbers of the
        frames that each receiver gets; without it none is known ahead.
        """
        for sender in self.senders.values():
            sender.begin(signature)
        for edge, receiver in self.receivers.items():
            receiver.begin(signature, order.get(edge, ()))
        for ties in self.ties.values():
            ties.begin()

    def check_sendable(self, value: Any) -> None:
        """Check that a value can pass between stages, if this worker sends any.

        Raises:
            PipeworkerError: it cannot.
        """
        if self.senders:
            frames.to_bytes(frames.describe(value, self._types)[0])

    def flush(self) -> None:
        """Wait until everything that was sent has left; until then its memory must not change."""
        for sender in self.senders.values():
            sender.flush()

    def clear(self) -> None:
        """Drop the micro-batches of all stages."""
        for channels in self.stages.values():
            channels.microbatches = {}

    def share_weights(self, shards: Mapping[int, Sequence[Sequence[nn.Parameter]]]) -> None:
        """Send the weights that this replica has updated, and receive those of the others.

        `shards` has, for each stage, the weights that each replica updates.
        """
        for stage, reduction in self.reductions.items():
            reduction.send_weights(shards[stage])
        for stage, reduction in self.reductions.items():
            reduction.receive_weights(shards[stage])
        for ties in self.ties.values():
            ties.share()
        self.flush()

    def close(self) -> None:
        """Close the links, which ends pending transfers, and end the send thread."""
        for link in self._links.values():
            link.close()
        if self._send_thread is not None:
            self._send_thread.close()


def _of_stage(edge: Edge, stage: Stage) -> str:
    """Return what messages call a value that the user's code has made; "" for any other."""
    match edge.payload:
        case Payload.ACTIVATION:
            return f"the output of {stage.name_of(stage.last_layer)}"
        case Payload.SKIP:
            return f"a skip tensor of stage {edge.source}"
        case Payload.GRADIENT | Payload.SKIP_GRADIENT:
            return f"a gradient of {stage.name_of(stage.first)}"
        case _:
            return ""
