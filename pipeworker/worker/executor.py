"""Runs a stage's tuple of actions: the very tuple that was proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from pipeworker.plan.proof import CHANNEL_CAPACITY, UNBOUNDED
from pipeworker.plan.schedule import COMPUTE, RECEIVES, WITH_PEER, Action, Edge, Kind, Payload
from pipeworker.wire.messages import Batch, Phase, RunStep
from pipeworker.worker.data import MicroBatches, Reader, share, sizes, to_device
from pipeworker.worker.evaluation import eval_mode
from pipeworker.worker.routes import Routes
from pipeworker.worker.stage import Stage, distinct_tensors
from pipeworker.worker.ties import Ties
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.transport.link import Link

_FRAMES_AHEAD = 16
"""Receives of activations and targets posted ahead; their buffers are kept until backward."""
_GRADIENTS_AHEAD = 6
"""Of gradients: a little more than a channel holds, so that several are posted in one go."""
_FORWARD = (Payload.ACTIVATION, Payload.TARGET, Payload.SKIP)
_GRADIENTS = (Payload.GRADIENT, Payload.SKIP_GRADIENT)
_BUSY = COMPUTE | {Kind.LOAD}


Sink = Callable[[Any, Any, int], None]


@dataclass(frozen=True, slots=True)
class Ran:
    """What a mini-batch gave on this stage; `losses` and `counts` are empty but on the last one."""

    losses: tuple[float, ...]
    counts: tuple[float, ...]
    busy: float


class Executor:
    """One stage and its ends of the channels.

    Args:
        links: this stage's end of each edge it uses.
        courier: performs large sends; None leaves them to the calling thread.
        reader: on the first stage.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        stages: int,
        links: Mapping[Edge, Link],
        reader: Reader | None,
        courier: Courier | None,
        ties: Ties | None = None,
    ) -> None:
        self._stage = stage
        self._index = index
        self._stages = stages
        self._reader = reader
        self._courier = courier
        self._links = list(links.values())
        senders: dict[Payload, dict[int, Sender]] = {payload: {} for payload in Payload}
        receivers: dict[Payload, dict[int, Receiver]] = {payload: {} for payload in Payload}
        for edge, link in links.items():
            payload = Payload(edge.payload)
            if edge.source == index:
                capacity = None if payload in UNBOUNDED else CHANNEL_CAPACITY
                senders[payload][edge.target] = Sender(link, capacity, courier)
            else:
                depth = _GRADIENTS_AHEAD if payload in _GRADIENTS else _FRAMES_AHEAD
                receivers[payload][edge.source] = Receiver(link, stage.device, depth)
        self._senders = [sender for ends in senders.values() for sender in ends.values()]
        self._receivers = [
            (p, peer, r) for p, ends in receivers.items() for peer, r in ends.items()
        ]
        self._by_microbatch = [
            receiver for payload, _, receiver in self._receivers if payload is not Payload.TIED
        ]
        self._routes: Routes | None = None
        if stage.skips is not None:
            self._routes = Routes(
                stage.skips,
                senders[Payload.SKIP],
                receivers[Payload.SKIP],
                senders[Payload.SKIP_GRADIENT],
                receivers[Payload.SKIP_GRADIENT],
            )
        self._ties = ties
        self._tied_senders = senders[Payload.TIED]
        self._tied_receivers = receivers[Payload.TIED]
        self._tied: dict[int, list[torch.Tensor | None]] = {}
        self._program: list[tuple[Callable[[int], None], int, bool]] = []
        self._order: dict[tuple[Payload, int], list[int]] = {}
        self._inputs: dict[int, tuple[Any, Sequence[bool]]] = {}
        self._targets: dict[int, Any] = {}
        self._recomputed: frozenset[int] = frozenset()
        self._current: MicroBatches | None = None
        self._next: MicroBatches | None = None
        self._outputs: dict[int, Any] = {}
        self._input_gradients: dict[int, list[torch.Tensor | None]] = {}
        self._output_gradients: dict[int, list[torch.Tensor | None]] = {}
        self._step = 0
        self._last = False
        # At most one other stage is at the end of these.
        self._activation_out = next(iter(senders[Payload.ACTIVATION].values()), None)
        self._activation_in = next(iter(receivers[Payload.ACTIVATION].values()), None)
        self._gradient_out = next(iter(senders[Payload.GRADIENT].values()), None)
        self._gradient_in = next(iter(receivers[Payload.GRADIENT].values()), None)
        self._target_out = next(iter(senders[Payload.TARGET].values()), None)
        self._target_in = next(iter(receivers[Payload.TARGET].values()), None)
        self._handlers: dict[Kind, Callable[..., None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: stage.recompute,
            Kind.BACKWARD: self._backward,
            Kind.LOAD: self._load,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECEIVE_ACTIVATION: self._receive_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECEIVE_GRADIENT: self._receive_gradient,
            Kind.SEND_TARGET: self._send_target,
            Kind.RECEIVE_TARGET: self._receive_target,
            Kind.SEND_TIED: self._send_tied,
            Kind.RECEIVE_TIED: self._receive_tied,
        }

        if self._routes is not None:
            self._handlers |= {
                Kind.SEND_SKIP: self._waiting(self._routes.send),
                Kind.RECEIVE_SKIP: self._waiting(self._routes.receive),
                Kind.SEND_SKIP_GRADIENT: self._waiting(self._routes.send_gradient),
                Kind.RECEIVE_SKIP_GRADIENT: self._waiting(self._routes.receive_gradient),
            }

    def _waiting(self, act: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """The same, noting that the stage waits."""

        def handle(m: int, peer: int) -> None:
            self._stage.tracker.set(Phase.WAITING, self._step, m)
            act(m, peer)

        return handle

    def program(self, actions: tuple[Action, ...]) -> None:
        """The tuple to run from the next step on."""
        handlers = self._handlers
        self._program = [
            (
                partial(handlers[a.kind], peer=a.peer) if a.kind in WITH_PEER else handlers[a.kind],
                a.microbatch,
                a.kind in _BUSY,
            )
            for a in actions
        ]
        self._recomputed = frozenset(a.microbatch for a in actions if a.kind is Kind.RECOMPUTE)
        self._order = {
            (payload, peer): [
                a.microbatch
                for a in actions
                if RECEIVES.get(a.kind) is payload and a.peer in (-1, peer)
            ]
            for payload, peer, _ in self._receivers
        }
        if self._ties:
            for peer in self._tied_receivers:
                self._order[Payload.TIED, peer] = list(range(self._ties.frames(peer)))

    @property
    def next_batch(self) -> Batch | None:
        """The mini-batch that the first stage holds ready."""
        return self._next.batch if self._next else None

    def load_first(self) -> None:
        """Read the first mini-batch (first stage, before step 1)."""
        self._load(0)

    def run(self, run: RunStep) -> Ran:
        """Fill and drain one mini-batch; gradients are accumulated, nothing is updated.

        Raises:
            PeerLost: a channel closed.
            Exception: whatever the user's code raises; the tracker says where.
        """
        stage, tracker = self._stage, self._stage.tracker
        step, batch = run.step, run.batch
        self._step, self._last = step, run.last
        shares = share(batch.samples, batch.microbatches)
        stage.begin(step, shares, self._recomputed, run.first, run.loss_scale)
        self._current, self._next = self._next, None
        for sender in self._senders:
            sender.begin(batch.signature)
        for payload, peer, receiver in self._receivers:
            receiver.begin(batch.signature, self._order[payload, peer])
        busy = 0.0
        for handle, microbatch, computes in self._program:
            if computes:
                start = perf_counter()
                handle(microbatch)
                busy += perf_counter() - start
            else:
                handle(microbatch)
        self._current = None
        stage.end()
        if self._ties:
            self._ties.complete(self._tied)
            self._tied.clear()
            for peer, receiver in self._tied_receivers.items():
                for number in range(self._ties.frames(peer)):
                    receiver.release(number)
        tracker.set(Phase.WAITING, step)
        losses = stage.losses
        return Ran(_as_floats(losses.values), _as_floats(losses.counts), busy)

    def offer(self, batch: MicroBatches) -> Batch:
        """Hold a mini-batch ready for the next step (first stage)."""
        self._next = batch
        return batch.batch

    def stream(self, step: int, batches: Iterator[MicroBatches], sink: Sink) -> None:
        """Stream mini-batches through the stages, forward alone, in eval mode.

        Nothing is between two mini-batches but their headers: frames are described, because how
        many there are and what they look like is only known on the first stage. An empty list is
        the end.

        Args:
            batches: the mini-batches, on the first stage.
            sink: on the last stage, is given each micro-batch's output, target and samples.

        Raises:
            as :meth:`run`.
        """
        stage = self._stage
        self._step = step
        stage.begin(step, (), frozenset())
        for sender in self._senders:
            sender.begin(None)
        for _, _, receiver in self._receivers:
            receiver.begin(None, ())
        with eval_mode(stage.layers):
            for m, (value, target, samples) in enumerate(self._streamed(batches)):
                if self._target_in:
                    samples, target = self._target_in.receive(m)
                if self._routes:
                    self._routes.receive_all(m)
                    value, _ = self._routes.joined(m, value, ())
                output = stage.evaluate(m, value)
                if self._index == self._stages - 1:
                    stage.tracker.set(Phase.EVALUATION, step, m)
                    sink(output, target, samples)
                elif self._routes:
                    output = self._routes.parted(m, output)
                if self._activation_out:
                    self._activation_out.send(m, [output])
                if self._target_out:
                    self._target_out.send(m, (samples, target))
                if self._routes:
                    self._routes.send_all(m)
                    self._routes.forget(m)
                for payload, _, receiver in self._receivers:
                    if payload in _FORWARD:
                        receiver.release(m)
        if self._activation_out:
            self._activation_out.send(0, [])
        stage.tracker.set(Phase.WAITING, step)

    def _streamed(self, batches: Iterator[MicroBatches]) -> Iterator[tuple[Any, Any, int]]:
        """Micro-batches (input, target, samples); what comes from elsewhere is left out."""
        stage, m = self._stage, 0
        if self._activation_in:
            while True:
                stage.tracker.set(Phase.WAITING, self._step, m)
                got = self._activation_in.receive(m)
                if not got:
                    self._activation_in.release(m)
                    return
                yield got[0], None, 0
                m += 1
        while True:
            stage.tracker.set(Phase.EVALUATION, self._step)
            read = next(batches, None)
            if read is None:
                return
            counts = sizes(read.batch.samples, read.batch.microbatches)
            for value, target, samples in zip(read.inputs, read.targets, counts, strict=True):
                yield (
                    to_device(value, stage.device),
                    target if self._target_out else to_device(target, stage.device),
                    samples,
                )

    def hand_back(self, value: Any) -> Any:
        """A value of the last stage's on every stage: it returns along the gradients' channels."""
        self._stage.tracker.set(Phase.WAITING, self._step)
        if self._gradient_in:
            value = self._gradient_in.receive(0)
        if self._gradient_out:
            self._gradient_out.send(0, value)
            self._gradient_out.flush()  # the user may change it from now on
        if self._gradient_in:
            self._gradient_in.release(0)
        return value

    def close(self) -> None:
        """Let go of the channels, which ends what is under way, and end the courier."""
        for link in self._links:
            link.close()
        if self._courier is not None:
            self._courier.close()

    def _forward(self, m: int) -> None:
        stage = self._stage
        if self._current is not None:
            value = to_device(self._current.inputs[m], stage.device)
            wants_grad: Sequence[bool] = [False] * len(distinct_tensors(value))
            if self._stages == 1:
                self._targets[m] = to_device(self._current.targets[m], stage.device)
        else:
            value, wants_grad = self._inputs.pop(m)
        if self._routes:
            value, wants_grad = self._routes.joined(m, value, wants_grad)
        stage.put_input(m, value, wants_grad, self._targets.pop(m, None))
        output = stage.forward(m)
        if self._index < self._stages - 1:
            self._outputs[m] = self._routes.parted(m, output) if self._routes else output

    def _backward(self, m: int) -> None:
        gradients = self._output_gradients.pop(m, [])
        if self._routes:
            gradients = self._stage.backward(m, [*gradients, *self._routes.gradients(m)])
            self._input_gradients[m] = self._routes.returned(m, gradients)
        else:
            self._input_gradients[m] = self._stage.backward(m, gradients)
        for receiver in self._by_microbatch:
            receiver.release(m)

    def _load(self, _: int) -> None:
        if self._reader is None or self._last:
            return
        self._stage.tracker.set(Phase.READING, self._step + 1)
        self._next = self._reader.read()

    # The proof has shown that an action has its channel: the asserts are for the type checker.

    def _send_activation(self, m: int) -> None:
        assert self._activation_out
        stage = self._stage
        stage.tracker.set(Phase.FORWARD, self._step, m, stage.first + len(stage.layers) - 1)
        self._activation_out.send(m, self._outputs.pop(m))

    def _receive_activation(self, m: int) -> None:
        assert self._activation_in
        self._stage.tracker.set(Phase.WAITING, self._step, m)
        value = self._activation_in.receive(m)
        self._inputs[m] = value, self._activation_in.wants_grad

    def _send_gradient(self, m: int) -> None:
        assert self._gradient_out
        self._stage.tracker.set(Phase.WAITING, self._step, m)
        gradients = self._input_gradients.pop(m)
        self._gradient_out.send(m, gradients[0] if len(gradients) == 1 else gradients)

    def _receive_gradient(self, m: int) -> None:
        assert self._gradient_in
        self._stage.tracker.set(Phase.WAITING, self._step, m)
        gradients = self._gradient_in.receive(m)
        self._output_gradients[m] = gradients if isinstance(gradients, list) else [gradients]

    def _send_target(self, m: int) -> None:
        assert self._target_out
        assert self._current
        self._stage.tracker.set(Phase.WAITING, self._step, m)
        self._target_out.send(m, self._current.targets[m])

    def _receive_target(self, m: int) -> None:
        assert self._target_in
        self._stage.tracker.set(Phase.WAITING, self._step, m)
        self._targets[m] = self._target_in.receive(m)

    def _send_tied(self, _: int, peer: int) -> None:
        assert self._ties
        self._stage.tracker.set(Phase.WAITING, self._step)
        for number, gradients in enumerate(self._ties.outgoing(peer)):
            self._tied_senders[peer].send(number, gradients)

    def _receive_tied(self, _: int, peer: int) -> None:
        self._stage.tracker.set(Phase.WAITING, self._step)
        assert self._ties
        receiver, gradients = self._tied_receivers[peer], self._tied.setdefault(peer, [])
        for number in range(self._ties.frames(peer)):
            gradients += receiver.receive(number)


def _as_floats(by_microbatch: dict[int, torch.Tensor]) -> tuple[float, ...]:
    """One transfer from the device, in micro-batch order."""
    if not by_microbatch:
        return ()
    ordered = [by_microbatch[m].reshape(()) for m in sorted(by_microbatch)]
    return tuple(float(value) for value in torch.stack(ordered).tolist())
