"""The gradients of tied weights on their way between the stages that have places of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pipeworker.plan.actions import Edge, Payload
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.update.ties import Ties


class Exchange:
    """What the stages of one worker tell others, and are told.

    Args:
        ties: by stage.
        senders, receivers: of this worker; those of tied weights are used.
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
        """The frames that come over an edge in a step."""
        return list(range(self._ties[edge.target].frames(edge.source)))

    def send(self, stage: int, peer: int) -> None:
        """Tell another stage the gradients of this one's places."""
        sender = self._senders[Edge(stage, peer, Payload.TIED)]
        for number, gradients in enumerate(self._ties[stage].outgoing(peer)):
            sender.send(number, gradients)

    def receive(self, stage: int, peer: int) -> None:
        """Take those of another stage."""
        receiver = self._receivers[Edge(peer, stage, Payload.TIED)]
        gradients = self._received.setdefault(stage, {}).setdefault(peer, [])
        for number in range(self._ties[stage].frames(peer)):
            gradients += receiver.receive(number)

    def reduce(self, stage: int) -> None:
        """Add up the gradients of a stage's tied weights: all places are known now."""
        ties = self._ties[stage]
        received = self._received.pop(stage, {})
        away = list(received)
        for peer in ties.peers:
            if peer not in received:
                received[peer] = [g for some in self._ties[peer].outgoing(stage) for g in some]
        ties.complete(received)
        for peer in away:
            for number in range(ties.frames(peer)):
                self._receivers[Edge(peer, stage, Payload.TIED)].release(number)
