"""Both ends of a channel, over links in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.links.link import Link, TwoLanes
from support.in_process.transport import MemoryLink, two_lanes

HEADER, NOTICE = 1, 3  # tags
LINKS: dict[str, Callable[[float], Link]] = {
    "one lane": MemoryLink,
    "two lanes": lambda limit: TwoLanes(MemoryLink(limit), MemoryLink(limit)),
    "strict": two_lanes,
}


class Channel:
    """Both ends of a channel over one link in memory."""

    make: Callable[[float], Link] = MemoryLink

    def __init__(self, capacity: int | None = None, depth: int = 2, limit: float = 0.5) -> None:
        self.link = Channel.make(limit)
        self.sender = Sender(self.link, capacity, None)
        self.receiver = Receiver(self.link, depth)

    @property
    def one(self) -> bool:
        return self.link.control is self.link.bulk

    @property
    def sent(self) -> int:
        """The number of messages, without the notices of two lanes."""
        lanes: list[Any] = [self.link.control] if self.one else [self.link.control, self.link.bulk]
        return sum(sum(lane.sent.values()) - lane.sent[NOTICE] for lane in lanes)

    def unmatched(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the unmatched sends and receives of the control lane, by tag."""
        control: Any = self.link.control
        counts: tuple[dict[int, int], dict[int, int]] = control.unmatched()
        return counts

    def begin(self, microbatches: Sequence[int], signature: int = 0) -> None:
        self.sender.begin(signature)
        self.receiver.begin(signature, microbatches)

    def step(self, values: Sequence[Any], signature: int = 0) -> tuple[list[Any], int]:
        """Send a step's values, one a micro-batch; return those received and the messages sent."""
        before = self.sent
        self.begin(range(len(values)), signature)
        arrived = []
        for m, value in enumerate(values):
            self.sender.send(m, value)
            got = self.receiver.receive(m)
            arrived.append(_copy(got))
            del got
            self.receiver.release(m)
        assert outstanding(self.receiver) == 0
        self.sender.flush()
        self.link.close()  # a strict lane must have no posted receive
        return arrived, self.sent - before


def outstanding(receiver: Receiver) -> int:
    """Return the number of frames and notices that are not received, or not released."""
    pending = len(receiver._ahead) + len(receiver._posted) + len(receiver._notices or ())
    return pending + len(receiver._received)


def _copy(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, value)
