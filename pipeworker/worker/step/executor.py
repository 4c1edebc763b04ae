"""Runs a worker's tuple of actions: the very tuple that was checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeworker.host.position import Tracker
from pipeworker.plan.actions import COMPUTE, RECEIVES, SENDS, Action, Edge, Kind, Payload, edge_of
from pipeworker.plan.columns import columns_of
from pipeworker.plan.kept import keeps
from pipeworker.plan.network import CHANNEL_CAPACITY, UNBOUNDED
from pipeworker.plan.placement import Placement
from pipeworker.plan.shares import block
from pipeworker.wire.messages.position import Phase
from pipeworker.wire.messages.step import Batch, RunStep
from pipeworker.worker.device.accelerator import Accelerator, Event
from pipeworker.worker.device.stopwatch import stopwatch_for
from pipeworker.worker.stage import losses
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.stage.values import distinct_tensors
from pipeworker.worker.step.data import MicroBatches, Reader, share
from pipeworker.worker.step.flow import Flow, Handover, Incoming, Outgoing, payload_of
from pipeworker.worker.step.others import Others
from pipeworker.worker.step.stream import Pass, Sink
from pipeworker.worker.step.tied import Exchange
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.transport.links.link import Link
from pipeworker.worker.transport.staging import brought
from pipeworker.worker.transport.structure import NONE, Kinds
from pipeworker.worker.update.ties import Ties

_FRAMES_AHEAD = 16
"""Receives of activations and targets posted ahead; their buffers are kept until backward."""
_GRADIENTS_AHEAD = 6
"""Of gradients: a little more than a channel holds, so that several are posted in one go."""
_BACKWARDS = (Payload.GRADIENT, Payload.SKIP_GRADIENT)
_BUSY = COMPUTE | {Kind.LOAD}

_Handler = Callable[[int], None]
_End = tuple[Kind, int, int]


@dataclass(frozen=True, slots=True)
class Ran:
    """What a mini-batch gave here; `losses` and `counts` are empty but with the last stage."""

    losses: tuple[float, ...]
    counts: tuple[float, ...]
    busy: float


class Executor:
    """The stages of one worker and its ends of the channels.

    Args:
        stages: by index.
        links: this worker's end of each edge it uses.
        courier: performs large sends; None leaves them to the calling thread.
        reader: where stage 0 is, if the job has data.
        ties: of the stages that have places of tied weights.
        announce: is told when a mini-batch with another number of micro-batches is read.
        replica: of the pipeline.
        reads_ahead: the job has data, which is read where stage 0 is; else it is offered.
        accelerator: where the stages are, if not on the CPU.

    Attributes:
        others: the same stages of the other replicas.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        placement: Placement,
        links: Mapping[Edge, Link],
        reader: Reader | None,
        courier: Courier | None,
        ties: Mapping[int, Ties] | None = None,
        announce: Callable[[int], None] = lambda microbatches: None,
        kinds: Kinds = NONE,
        replica: int = 0,
        *,
        reads_ahead: bool = True,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._reads_ahead = reads_ahead
        self._accelerator = accelerator
        self._flows = {index: Flow(stage) for index, stage in stages.items()}
        self._tracker: Tracker = next(iter(stages.values())).tracker
        self._placement = placement
        self._last_stage = placement.stages - 1
        self._reader = reader
        self._courier = courier
        self._kinds = kinds
        self._announce = announce
        self._known: set[int] = set()
        self._links = dict(links)
        self._replica = replica
        self._senders: dict[Edge, Sender] = {}
        self._receivers: dict[Edge, Receiver] = {}
        self._outgoing: dict[Edge, Outgoing] = {}
        self._incoming: dict[Edge, Incoming] = {}
        for edge, link in links.items():
            if edge.origin < 0:
                self._connect(edge, link)
        self.others = Others(stages, replica, links, courier, kinds, accelerator)
        self._deal = self.others.deal
        self._senders.update(self.others.senders)
        for edge in self._local_edges():
            self._hand_over(edge)
        self._program: list[tuple[_Handler, int, bool]] = []
        self._actions: Sequence[Action] = ()
        self._order: dict[Edge, list[int]] = {}
        # By stage, the micro-batches that are recomputed, those with a backward in halves, and
        # those whose graphs are kept in the host's memory.
        self._again: dict[int, frozenset[int]] = {}
        self._halves: dict[int, frozenset[int]] = {}
        self._away: dict[int, frozenset[int]] = {}
        self._current: MicroBatches | None = None
        self._next: MicroBatches | None = None
        self._there: Event | None = None  # when the next mini-batch is on the accelerator
        self._step = 0
        self._final = False
        self._stopwatch = stopwatch_for(next(iter(stages.values())).device)
        self._tied = Exchange(ties or {}, self._senders, self._receivers)
        self._computes: dict[Kind, Callable[[Flow], _Handler]] = {
            Kind.FORWARD: lambda flow: flow.forward,
            Kind.RECOMPUTE: lambda flow: flow.recompute,
            Kind.FETCH: lambda flow: flow.fetch,
            Kind.BACKWARD: lambda flow: flow.backward,
            Kind.BACKWARD_INPUT: lambda flow: flow.backward_input,
            Kind.BACKWARD_WEIGHT: lambda flow: flow.backward_weight,
        }

    def _connect(self, edge: Edge, link: Link) -> None:
        """Make a channel's end of a link's."""
        here = self._flows.get(edge.source)
        source = here.stage.skips if here else None
        there = self._flows.get(edge.target)
        target = there.stage.skips if there else None
        take, put = payload_of(edge, source, target)
        if here:
            capacity = None if edge.payload in UNBOUNDED else CHANNEL_CAPACITY
            sender = Sender(link, capacity, self._courier, self._kinds, self._accelerator)
            self._senders[edge] = sender
            self._outgoing[edge] = Outgoing(edge, here, take, sender)
        elif there:
            depth = _GRADIENTS_AHEAD if edge.payload in _BACKWARDS else _FRAMES_AHEAD
            receiver = Receiver(link, depth, self._kinds, self._accelerator)
            self._receivers[edge] = receiver
            self._incoming[edge] = Incoming(there, put, receiver)
            if edge.payload is not Payload.TIED:
                there.receivers.append(receiver)

    def _local_edges(self) -> list[Edge]:
        """What passes between stages of this worker."""
        found = []
        for index, flow in self._flows.items():
            if index + 1 in self._flows:
                found.append(Edge(index, index + 1, Payload.ACTIVATION))
                found.append(Edge(index + 1, index, Payload.GRADIENT))
            for peer in flow.stage.skips.departing if flow.stage.skips else ():
                if peer in self._flows:
                    found.append(Edge(index, peer, Payload.SKIP))
                    found.append(Edge(peer, index, Payload.SKIP_GRADIENT))
        return found

    def _hand_over(self, edge: Edge) -> None:
        source, target = self._flows[edge.source], self._flows[edge.target]
        take, put = payload_of(edge, source.stage.skips, target.stage.skips)
        after = source.after_backward if edge.payload in _BACKWARDS else source.after_forward
        after.append(Handover(edge, take, put, target))

    def program(self, actions: Sequence[Action]) -> None:
        """The tuple to run from the next step on."""
        handlers: dict[_End, _Handler] = {}
        program: list[tuple[_Handler, int, bool]] = []
        for action in actions:
            kind, stage, m, peer = action
            end = kind, stage, peer
            if end not in handlers:
                handlers[end] = self._handler(action)
            program.append((handlers[end], m, kind in _BUSY))
        self._program = program
        self._actions = actions
        self._again, self._halves, self._away = (
            {
                index: frozenset(
                    a.microbatch for a in actions if a.kind is kind and a.stage == index
                )
                for index in self._flows
            }
            for kind in (Kind.RECOMPUTE, Kind.BACKWARD_INPUT, Kind.FETCH)
        )
        self._order = {edge: [] for edge in self._receivers}
        for action in actions:
            if action.kind in RECEIVES and action.kind is not Kind.RECEIVE_TIED:
                self._order[edge_of(action)].append(action.microbatch)
        for edge in self._receivers:
            if edge.payload is Payload.TIED:
                self._order[edge] = self._tied.expected(edge)

    def keeps(self, stage: int) -> str:
        """What the plan has a stage keep, in words; nothing while there is none."""
        if not self._actions:
            return ""
        graphs, inputs, _ = keeps(columns_of(self._actions), stage, len(self._actions))
        kept = f"{graphs} graph{'s' * (graphs > 1)} and {inputs} input{'s' * (inputs > 1)}"
        return f"the plan has stage {stage} keep {kept} of micro-batches at once"

    def _handler(self, action: Action) -> _Handler:
        kind, stage, _, peer = action
        match kind:
            case Kind.LOAD:
                return self._load
            case Kind.FORWARD if stage == 0:
                return self._forward_first
            case Kind.SEND_TIED:
                return self._waiting(lambda: self._tied.send(stage, peer))
            case Kind.RECEIVE_TIED:
                return self._waiting(lambda: self._tied.receive(stage, peer))
            case Kind.REDUCE_TIED:
                return lambda _: self._tied.reduce(stage)
            case Kind.SCATTER:
                return self._waiting(self.others.reductions[stage].scatter)
            case Kind.SUM:
                return self._waiting(self.others.reductions[stage].sum)
            case Kind.GATHER:
                return self._waiting(self.others.reductions[stage].gather)
        if kind in SENDS:
            return self._outgoing[edge_of(action)]
        if kind in RECEIVES:
            return self._incoming[edge_of(action)]
        return self._computes[kind](self._flows[stage])

    def _waiting(self, do: Callable[[], None]) -> _Handler:
        """What waits for other workers, or may."""

        def handle(_: int) -> None:
            self._tracker.wait(self._step)
            do()

        return handle

    @property
    def next_batch(self) -> Batch | None:
        """The mini-batch that is held ready where stage 0 is."""
        return self._next.batch if self._next else None

    def load_first(self) -> None:
        """Read the first mini-batch (where stage 0 is, before step 1)."""
        self._load(0)

    def offer(self, batch: MicroBatches) -> Batch:
        """Hold a mini-batch ready for the next step (where stage 0 is)."""
        self._hold(self._deal.out(batch) if self._deal else batch)
        return batch.batch

    def _hold(self, batch: MicroBatches | None) -> None:
        """Have the next mini-batch, which sets out for the accelerator while this one drains."""
        if batch is not None and self._accelerator is not None:
            given = batch.inputs, batch.targets if self._last_stage in self._flows else []
            (inputs, targets), self._there = brought(self._accelerator, given)
            batch = MicroBatches(batch.batch, inputs, targets or batch.targets)
        self._next = batch

    def run(self, run: RunStep) -> Ran:
        """Fill and drain one mini-batch; gradients are accumulated, nothing is updated.

        Raises:
            PeerLost: a channel closed.
            Raised: the user's code raised; the tracker says where.
        """
        self._begin(run)
        mark, marks = self._stopwatch.mark, []
        for handle, microbatch, computes in self._program:
            if computes:
                marks.append(mark())
                handle(microbatch)
                marks.append(mark())
            else:
                handle(microbatch)
        self._flush(run.step)
        self._current = None
        for flow in self._flows.values():
            flow.stage.end()
        self._tracker.wait(run.step)
        given: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
        if self._last_stage in self._flows:
            given = losses.shares(self._flows[self._last_stage].microbatches)
        for flow in self._flows.values():
            flow.microbatches = ()
        return Ran(*given, self._stopwatch.seconds(marks))

    def _flush(self, step: int) -> None:
        """Let everything leave: until then, what is sent is kept."""
        self._tracker.wait(step)
        for sender in self._senders.values():
            sender.flush()

    def _begin(self, run: RunStep) -> None:
        batch = run.batch
        self._step, self._final = run.step, run.last
        mine = block(batch.microbatches, self._placement.replicas, self._replica)
        weights = share(batch.samples, batch.microbatches)[mine.start : mine.stop]
        for index, flow in self._flows.items():
            flow.step = run.step
            flow.stage.begin(run.step, run.first + mine.start, run.loss_scale)
            again, halves, away = self._again[index], self._halves[index], self._away[index]
            flow.microbatches = [
                MicroBatch(m, weight, m in again, m in halves, m in away)
                for m, weight in enumerate(weights)
            ]
        self._known.add(batch.microbatches)
        if batch.microbatches:
            if self._deal and self._deal.takes and self._next is None:
                self._hold(self._deal.take())  # what another rank's loop was given
            self._current, self._next = self._next, None
        if self._accelerator is not None and self._there is not None:
            self._accelerator.current.wait_event(self._there)
            self._there = None
        if self._current is not None:
            self._feed(self._current)
        for sender in self._senders.values():
            sender.begin(batch.signature)
        for edge, receiver in self._receivers.items():
            receiver.begin(batch.signature, self._order[edge])
        for reduction in self.others.reductions.values():
            reduction.begin(batch.signature, whole=run.whole)

    def _feed(self, batch: MicroBatches) -> None:
        """Give stage 0 its micro-batches, and the last stage their targets if it is here."""
        first, last = self._flows[0], self._flows.get(self._last_stage)
        for mb, value, target in zip(first.microbatches, batch.inputs, batch.targets, strict=True):
            mb.value, mb.target = value, target
            if last is not None:
                last.microbatches[mb.number].target = target

    def _forward_first(self, m: int) -> None:
        """Stage 0 takes its input from the data."""
        flow = self._flows[0]
        mb = flow.microbatches[m]
        mb.wants_grad = [False] * len(distinct_tensors(mb.value))
        flow.forward(m)

    def _load(self, _: int) -> None:
        if self._final:
            return
        if self._reader is not None:
            self._tracker.set(Phase.READING, self._step + 1)
            read = self._reader.read()
            self._hold(self._deal.out(read) if self._deal else read)
        elif self._deal and self._deal.takes and self._reads_ahead:
            self._tracker.wait(self._step)
            self._hold(self._deal.take())
        if self._next is not None and self._step:
            microbatches = self._next.batch.microbatches
            if microbatches not in self._known:
                self._announce(microbatches)

    def stream(
        self, step: int, actions: Sequence[Action], batches: Iterator[MicroBatches], sink: Sink
    ) -> None:
        """Stream mini-batches through the stages, forward alone, in eval mode.

        Args:
            actions: of one micro-batch, forward-only.
            batches: the mini-batches, where stage 0 is.
            sink: where the last stage is, is given each micro-batch's output, target and samples.

        Raises:
            as :meth:`run`.
        """
        for flow in self._flows.values():
            flow.step = step
            flow.stage.begin(step)
        for sender in self._senders.values():
            sender.begin(None)
        for receiver in self._receivers.values():
            receiver.begin(None, ())
        ends: dict[Edge, Outgoing | Incoming] = {**self._outgoing, **self._incoming}
        Pass(self._flows, ends, actions, self._last_stage, sink, self._accelerator).run(
            step, batches
        )
        self._flush(step)
        for flow in self._flows.values():
            flow.microbatches = ()
        self._tracker.wait(step)

    def hand_back(self, value: Any) -> Any:
        """A value of the last stage's on every worker: it returns along the gradients' channels."""
        self._tracker.wait(self._step)
        for stage in sorted(self._flows, reverse=True):
            receiver = self._receivers.get(Edge(stage + 1, stage, Payload.GRADIENT))
            if receiver is not None:
                value = receiver.receive(0)
            sender = self._senders.get(Edge(stage, stage - 1, Payload.GRADIENT))
            if sender is not None:
                sender.send(0, value)
                sender.flush()  # the user may change it from now on
            if receiver is not None:
                receiver.release(0)
        return value

    def close(self) -> None:
        """Let go of the channels, which ends what is under way, and end the courier."""
        for link in self._links.values():
            link.close()
        if self._courier is not None:
            self._courier.close()
