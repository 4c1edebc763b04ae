"""The ends of a worker's channels: to other stages, in memory, to replicas, for tied weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from pipeworker.plan.actions import Edge, Payload
from pipeworker.plan.schedule import CHANNEL_CAPACITY, UNBOUNDED
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.step.batch_feed import BatchScatter
from pipeworker.worker.step.reduction import Reduction
from pipeworker.worker.step.stage_channels import (
    Incoming,
    LocalTransfer,
    Outgoing,
    StageChannels,
    payload_functions,
)
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.links.link import Link
from pipeworker.worker.transport.send_thread import SendThread
from pipeworker.worker.transport.structure import NO_TYPES, TypeRegistry
from pipeworker.worker.update.ties import Ties

_FRAMES_AHEAD = 16
"""Receives of activations and targets posted ahead; their buffers are needed until backward."""
_GRADIENTS_AHEAD = 6
"""Receives of gradients posted ahead: more than a channel holds, so that several are posted in one
go."""
_BACKWARDS = (Payload.GRADIENT, Payload.SKIP_GRADIENT)


class Wiring:
    """The connections of a worker's stages with each other and with other workers.

    Args:
        stages: stages of the worker, by index.
        links: the worker's end of each edge that it uses.
        send_thread: performs large sends; None: the calling thread performs them.
        ties: ties by stage, of the stages that have places of tied weights.
        types: classes of the user's that values on channels may have.
        replica: number of this replica of the pipeline.
        accelerator: device of the stages; None for the CPU.

    Attributes:
        senders: of channels between stages, and of gradients between replicas.
        receivers: of channels between stages.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        links: Mapping[Edge, Link],
        send_thread: SendThread | None,
        ties: Mapping[int, Ties],
        types: TypeRegistry = NO_TYPES,
        replica: int = 0,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.stages = {index: StageChannels(stage) for index, stage in stages.items()}
        self.senders: dict[Edge, Sender] = {}
        self.receivers: dict[Edge, Receiver] = {}
        self.outgoing: dict[Edge, Outgoing] = {}
        self.incoming: dict[Edge, Incoming] = {}
        self._links = list(links.values())
        self._send_thread = send_thread
        self._types = types
        self._accelerator = accelerator
        for edge, link in links.items():
            if edge.origin < 0:
                self._connect(edge, link)
        self.replicas = ReplicaGroup(stages, replica, links, send_thread, types, accelerator)
        self.senders.update(self.replicas.senders)
        self.tied = TiedGradients(ties, self.senders, self.receivers)
        for edge in self._local_edges():
            self._transfer(edge)

    def _connect(self, edge: Edge, link: Link) -> None:
        """Make the end of a channel of the end of a link."""
        source, target = self.stages.get(edge.source), self.stages.get(edge.target)
        extract, insert = payload_functions(edge, source.stage.skips if source else None)
        if source:
            capacity = None if edge.payload in UNBOUNDED else CHANNEL_CAPACITY
            sender = Sender(link, capacity, self._send_thread, self._types, self._accelerator)
            self.senders[edge] = sender
            self.outgoing[edge] = Outgoing(edge, source, extract, sender)
        elif target:
            depth = _GRADIENTS_AHEAD if edge.payload in _BACKWARDS else _FRAMES_AHEAD
            receiver = Receiver(link, depth, self._types, self._accelerator)
            self.receivers[edge] = receiver
            self.incoming[edge] = Incoming(target, insert, receiver)
            if edge.payload is not Payload.TIED:
                target.receivers.append(receiver)

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

    def _transfer(self, edge: Edge) -> None:
        source, target = self.stages[edge.source], self.stages[edge.target]
        extract, insert = payload_functions(edge, source.stage.skips)
        after = source.after_backward if edge.payload in _BACKWARDS else source.after_forward
        after.append(LocalTransfer(edge, extract, insert, target))

    def begin(self, signature: int | None, order: Mapping[Edge, list[int]]) -> None:
        """Begin a mini-batch on all channels between stages.

        With the shape signature None every frame is described. `order` has the numbers of the
        frames that each receiver gets; without it none is known ahead.
        """
        for sender in self.senders.values():
            sender.begin(signature)
        for edge, receiver in self.receivers.items():
            receiver.begin(signature, order.get(edge, ()))

    def flush(self) -> None:
        """Wait until everything that was sent has left; until then its memory must not change."""
        for sender in self.senders.values():
            sender.flush()

    def clear(self) -> None:
        """Drop the micro-batches of all stages."""
        for channels in self.stages.values():
            channels.microbatches = {}

    def close(self) -> None:
        """Close the links, which ends pending transfers, and end the send thread."""
        for link in self._links:
            link.close()
        if self._send_thread is not None:
            self._send_thread.close()


class TiedGradients:
    """The gradients of tied weights that the stages of one worker send and receive.

    A frame holds the gradients of some places, each of the shape of its parameter.
    """

    def __init__(
        self,
        ties: Mapping[int, Ties],
        senders: Mapping[Edge, Sender],
        receivers: Mapping[Edge, Receiver],
    ) -> None:
        self._ties = ties
        self._senders, self._receivers = senders, receivers
        self._received: dict[int, dict[int, list[torch.Tensor | None]]] = {}

    def expected(self, edge: Edge) -> list[int]:
        """Return the numbers of the frames that come over an edge in a step."""
        return list(range(self._ties[edge.target].incoming_frames(edge.source)))

    def send(self, stage: int, peer: int) -> None:
        """Send the gradients of the places on `stage` to the stage `peer`."""
        sender = self._senders[Edge(stage, peer, Payload.TIED)]
        for number, gradients in enumerate(self._ties[stage].outgoing(peer)):
            sender.send(number, gradients)

    def receive(self, stage: int, peer: int) -> None:
        """Receive for `stage` the gradients of the places on the stage `peer`."""
        receiver = self._receivers[Edge(peer, stage, Payload.TIED)]
        gradients = self._received.setdefault(stage, {}).setdefault(peer, [])
        for number in range(self._ties[stage].incoming_frames(peer)):
            gradients += receiver.receive(number)

    def reduce(self, stage: int) -> None:
        """Add up the gradients of a stage's tied weights, once those of all places are here."""
        ties = self._ties[stage]
        received = self._received.pop(stage, {})
        remote = list(received)
        for peer in ties.peers:
            if peer not in received:  # on this worker
                received[peer] = [g for some in self._ties[peer].outgoing(stage) for g in some]
        ties.add_up(received)
        for peer in remote:
            for number in range(ties.incoming_frames(peer)):
                self._receivers[Edge(peer, stage, Payload.TIED)].release(number)


class ReplicaGroup:
    """This worker's ends of the channels between replicas; with one replica there are none.

    Attributes:
        reductions: reductions over the replicas, by stage.
        scatter: scatter of mini-batches, where replica 0 reads the data for all and stage 0 is.
        senders: senders of gradients and weights.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        replica: int,
        links: Mapping[Edge, Link],
        send_thread: SendThread | None,
        types: TypeRegistry,
        accelerator: Accelerator | None,
    ) -> None:
        self.reductions: dict[int, Reduction] = {}
        self.scatter: BatchScatter | None = None
        self._replica = replica
        outgoing: dict[Edge, Sender] = {}
        incoming: dict[Edge, Receiver] = {}
        for edge, link in links.items():
            device = None if edge.payload is Payload.DATA else accelerator
            if edge.origin == replica:
                outgoing[edge] = Sender(link, None, send_thread, types, device)
            elif edge.origin >= 0:
                incoming[edge] = Receiver(link, _GRADIENTS_AHEAD, types, device)
        for index, stage in stages.items():
            sums = index, Payload.SUM
            senders = {e.goal: s for e, s in outgoing.items() if (e.source, e.payload) == sums}
            receivers = {e.origin: r for e, r in incoming.items() if (e.source, e.payload) == sums}
            if senders:
                self.reductions[index] = Reduction(stage, replica, senders, receivers)
        self.senders = {e: s for e, s in outgoing.items() if e.payload is Payload.SUM}
        scatters = {e.goal: s for e, s in outgoing.items() if e.payload is Payload.DATA}
        scattered = next((r for e, r in incoming.items() if e.payload is Payload.DATA), None)
        if scatters or scattered:
            self.scatter = BatchScatter(scatters, scattered)

    def share_weights(self, shards: Mapping[int, Sequence[Sequence[nn.Parameter]]]) -> None:
        """Send the weights that this replica has updated, and receive those of the others.

        `shards` has, for each stage, the weights that each replica updates.
        """
        for stage, reduction in self.reductions.items():
            reduction.send_weights(shards[stage][self._replica])
        for stage, reduction in self.reductions.items():
            reduction.receive_weights(shards[stage])
        for sender in self.senders.values():
            sender.flush()
