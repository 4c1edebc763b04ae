"""This worker's ends of the channels to the other replicas, which hold the same stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from pipeworker.plan.actions import Edge, Payload
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.step.deal import Deal
from pipeworker.worker.step.reduction import Reduction
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.transport.links.link import Link
from pipeworker.worker.transport.structure import Kinds

_AHEAD = 6  # frames: a little more than a channel holds, so that several are posted in one go


class Others:
    """See the module; with one replica there are none.

    Args:
        replica: this worker's.
        links: all of the worker's.
        accelerator: where the stages are, if not on the CPU.

    Attributes:
        reductions: by stage.
        deal: where replica 0 reads the data for all, and stage 0 is.
        senders: of gradients and weights.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        replica: int,
        links: Mapping[Edge, Link],
        courier: Courier | None,
        kinds: Kinds,
        accelerator: Accelerator | None,
    ) -> None:
        self.reductions: dict[int, Reduction] = {}
        self.senders: dict[Edge, Sender] = {}
        self.deal: Deal | None = None
        self._replica = replica
        outgoing: dict[Edge, Sender] = {}
        incoming: dict[Edge, Receiver] = {}
        for edge, link in links.items():
            where = None if edge.payload is Payload.DATA else accelerator
            if edge.origin == replica:
                outgoing[edge] = Sender(link, None, courier, kinds, where)
            elif edge.origin >= 0:
                incoming[edge] = Receiver(link, _AHEAD, kinds, where)
        for index, stage in stages.items():
            sends = {edge.goal: s for edge, s in outgoing.items() if _of(edge, index)}
            takes = {edge.origin: r for edge, r in incoming.items() if _of(edge, index)}
            if sends:
                self.reductions[index] = Reduction(stage, replica, sends, takes)
        self.senders = {edge: s for edge, s in outgoing.items() if edge.payload is Payload.SUM}
        gives = {edge.goal: s for edge, s in outgoing.items() if edge.payload is Payload.DATA}
        given = [r for edge, r in incoming.items() if edge.payload is Payload.DATA]
        if gives or given:
            self.deal = Deal(gives, given[0] if given else None)

    def share_weights(self, shards: Mapping[int, Sequence[Sequence[nn.Parameter]]]) -> None:
        """Each replica has updated a part of the weights: tell each other.

        Args:
            shards: by stage and by replica, what that one has updated.
        """
        for stage, reduction in self.reductions.items():
            reduction.give_weights(shards[stage][self._replica])
        for stage, reduction in self.reductions.items():
            reduction.take_weights(shards[stage])
        for sender in self.senders.values():
            sender.flush()


def _of(edge: Edge, stage: int) -> bool:
    return edge.payload is Payload.SUM and edge.source == stage
