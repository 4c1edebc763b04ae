"""The mini-batches that a worker trains on: the next one is read before its step begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from time import perf_counter
from typing import Any

from pipeworker.facts.position import Phase
from pipeworker.facts.step import Batch
from pipeworker.host.position import Tracker
from pipeworker.plan.partition import block
from pipeworker.wire.messages.step import RunStep
from pipeworker.worker.data.reader import MicroBatches, Reader
from pipeworker.worker.device.accelerator import Accelerator, Event
from pipeworker.worker.stage.values import distinct_tensors, replace_tensors
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.layout import aligned_copy
from pipeworker.worker.transport.staging import move_to_device


@dataclass(slots=True, eq=False)
class BatchFeed:
    """The next mini-batch of a worker, and how it gets here.

    Where stage 0 is, it is read from the data, received from replica 0, or offered by a loop of the
    user's own. Elsewhere there is none.

    Attributes:
        scatter: channels to the other replicas.
        reader: reader of the job's data; None where this worker does not read it.
        reads_ahead: read the next mini-batch in each step; if False, the user's loop offers it.
        moves_targets: move the targets to the accelerator as well, for a last stage that is here.
        accelerator: device of the stages; None for the CPU.
        announce: called when a mini-batch has a new number of micro-batches, with that number.
        read_seconds: seconds spent reading since the last :meth:`begin`.
    """

    tracker: Tracker
    scatter: BatchScatter
    reader: Reader | None = None
    reads_ahead: bool = True
    moves_targets: bool = False
    accelerator: Accelerator | None = None
    announce: Callable[[int], None] = lambda microbatches: None
    read_seconds: float = field(default=0.0, init=False)
    _next: MicroBatches | None = None
    _on_accelerator: Event | None = None
    """The event after which the next mini-batch is on the accelerator."""
    _counts: set[int] = field(default_factory=set)
    """Numbers of micro-batches that mini-batches have had."""
    _step: int = 0
    _is_last: bool = False

    @property
    def copied(self) -> tuple[bool, bool]:
        """Whether inputs, and whether targets, are copied as a mini-batch is read or offered."""
        moves = self.accelerator is not None and not self.scatter.sends
        return moves, moves and self.moves_targets

    @property
    def next_batch(self) -> Batch | None:
        """The facts of the next mini-batch; None if there is none here."""
        return self._next.batch if self._next else None

    def offer(self, batch: MicroBatches) -> None:
        """Make a mini-batch of the user's loop the next one."""
        self._put(self.scatter.scatter(batch))

    def load(self, _: int = 0) -> None:
        """Read or receive the mini-batch of the next step, unless this step is the last."""
        if self._is_last:
            return
        if self.reader is not None:
            self.tracker.set(Phase.READING, self._step + 1)
            began = perf_counter()
            batch = self.reader.read()
            self.read_seconds += perf_counter() - began
            self._put(self.scatter.scatter(batch))
        elif self.scatter.receives and self.reads_ahead:
            self._receive()
        if self._next is not None and self._step:
            count = self._next.batch.microbatches
            if count not in self._counts:
                self.announce(count)

    def begin(self, run: RunStep) -> MicroBatches | None:
        """Begin a step; return its mini-batch, on the accelerator, or None if it is not fed here.

        Inputs and targets are lists by micro-batch, of nested tensors of shape ``[n, ...]``, where
        n is the number of samples of the micro-batch.
        """
        self._step, self._is_last, self.read_seconds = run.step, run.last, 0.0
        self._counts.add(run.batch.microbatches)
        current: MicroBatches | None = None
        if run.batch.microbatches:
            if self._next is None and self.scatter.receives:
                self._receive()  # replica 0's loop has offered it
            current, self._next = self._next, None
        if self.accelerator is not None and self._on_accelerator is not None:
            self.accelerator.current.wait_event(self._on_accelerator)
            self._on_accelerator = None
        return current

    def _receive(self) -> None:
        self.tracker.wait(self._step)
        self._put(self.scatter.receive())

    def _put(self, batch: MicroBatches | None) -> None:
        """Keep the next mini-batch, and start its copy to the accelerator while this one drains."""
        if batch is not None and self.accelerator is not None:
            moving = batch.inputs, batch.targets if self.moves_targets else []
            (inputs, targets), self._on_accelerator = move_to_device(self.accelerator, moving)
            batch = MicroBatches(batch.batch, inputs, targets or batch.targets)
        self._next = batch


class BatchScatter:
    """One replica's end of the channels over which mini-batches are scattered.

    If replica 0 reads the data for all, it has a sender to each other replica, which has a
    receiver. Otherwise there are none.
    """

    def __init__(self, senders: Mapping[int, Sender], receiver: Receiver | None) -> None:
        self._senders, self._receiver = senders, receiver
        for sender in senders.values():
            sender.begin(None)
        if receiver is not None:
            receiver.begin(None, ())

    @property
    def sends(self) -> bool:
        """Whether other replicas receive their parts from this one."""
        return bool(self._senders)

    @property
    def receives(self) -> bool:
        """Whether this replica receives its part from replica 0."""
        return self._receiver is not None

    def scatter(self, whole: MicroBatches | None) -> MicroBatches | None:
        """Send the other replicas their micro-batches, or None; return this replica's own."""
        if not self._senders:
            return whole

        def part(replica: int) -> tuple[list[Any], list[Any]]:
            assert whole is not None
            own = block(whole.batch.microbatches, len(self._senders) + 1, replica)
            return whole.inputs[own.start : own.stop], whole.targets[own.start : own.stop]

        for replica, sender in self._senders.items():
            sender.flush()  # the mini-batch before
            facts = [] if whole is None else list(astuple(whole.batch))
            sender.send(0, [facts, *([] if whole is None else part(replica))])
        return None if whole is None else MicroBatches(whole.batch, *part(0))

    def receive(self) -> MicroBatches | None:
        """Receive this replica's micro-batches of the next mini-batch; None at the end of data.

        The tensors are copies, since the channel uses its buffer again.
        """
        assert self._receiver is not None
        facts, *halves = self._receiver.receive(0)
        wants_grad = self._receiver.wants_grad
        copies = {
            id(tensor): aligned_copy(tensor).requires_grad_(want)
            for tensor, want in zip(distinct_tensors(halves), wants_grad, strict=True)
        }
        self._receiver.release(0)
        return MicroBatches(Batch(*facts), *replace_tensors(halves, copies)) if facts else None
