"""Replica 0 alone reads the data, and deals it out to the first stages of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from pipeworker.plan.shares import block
from pipeworker.wire.messages.step import Batch
from pipeworker.worker.internals import pytree
from pipeworker.worker.stage.values import distinct_tensors
from pipeworker.worker.step.data import MicroBatches
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.frame import replica as copy_of


class Deal:
    """One replica's end.

    Args:
        senders: to the others, by replica; where data is read.
        receiver: from there; elsewhere.
    """

    def __init__(self, senders: Mapping[int, Sender], receiver: Receiver | None) -> None:
        self._senders, self._receiver = senders, receiver
        self._count = 0
        for sender in senders.values():
            sender.begin(None)
        if receiver is not None:
            receiver.begin(None, ())

    @property
    def takes(self) -> bool:
        """Whether this one is given its part."""
        return self._receiver is not None

    def out(self, whole: MicroBatches | None) -> MicroBatches | None:
        """Give the others their parts, or say that there is no more; returns one's own."""
        self._count += 1
        replicas = len(self._senders) + 1

        def part(replica: int) -> tuple[list[Any], list[Any]]:
            assert whole is not None
            mine = block(whole.batch.microbatches, replicas, replica)
            return whole.inputs[mine.start : mine.stop], whole.targets[mine.start : mine.stop]

        for replica, sender in self._senders.items():
            sender.flush()  # it has the last one
            facts = [] if whole is None else list(astuple(whole.batch))
            sender.send(self._count, [facts, *([] if whole is None else part(replica))])
        return None if whole is None else MicroBatches(whole.batch, *part(0))

    def take(self) -> MicroBatches | None:
        """This replica's part of the next mini-batch; None where there is no more.

        What is taken is a copy: its buffer is used again.
        """
        assert self._receiver is not None
        self._count += 1
        facts, *halves = self._receiver.receive(self._count)
        wants = self._receiver.wants_grad
        copies = {
            id(tensor): copy_of(tensor).requires_grad_(want)
            for tensor, want in zip(distinct_tensors(halves), wants, strict=True)
        }
        halves = pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), halves)
        self._receiver.release(self._count)
        return MicroBatches(Batch(*facts), *halves) if facts else None
