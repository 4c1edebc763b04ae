"""Runs a stage's tuple of actions: the very tuple that was proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipeworker.plan.proof import CHANNEL_CAPACITY
from pipeworker.plan.schedule import COMPUTE, RECEIVES, Action, Edge, Kind, Payload
from pipeworker.wire.messages import Batch, Phase
from pipeworker.worker.data import MicroBatches, Reader, share
from pipeworker.worker.stage import Stage, distinct_tensors
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.transport.link import Link

_FRAMES_AHEAD = 16
"""Receives of activations and targets posted ahead; their buffers are kept until backward."""
_GRADIENTS_AHEAD = 6
_BUSY = COMPUTE | {Kind.LOAD}


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave on this stage; `losses` and `counts` are empty but on the last one."""

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
    ) -> None:
        self._stage = stage
        self._index = index
        self._stages = stages
        self._reader = reader
        self._senders: dict[Payload, Sender] = {}
        self._receivers: dict[Payload, Receiver] = {}
        for edge, link in links.items():
            payload = Payload(edge.payload)
            if edge.source == index:
                capacity = None if payload is Payload.TARGET else CHANNEL_CAPACITY
                self._senders[payload] = Sender(link, capacity, courier)
            else:
                depth = _GRADIENTS_AHEAD if payload is Payload.GRADIENT else _FRAMES_AHEAD
                self._receivers[payload] = Receiver(link, stage.device, depth)
        self._program: list[tuple[Callable[[int], None], int, bool]] = []
        self._order: dict[Payload, list[int]] = {}
        self._recomputed: frozenset[int] = frozenset()
        self._current: MicroBatches | None = None
        self._next: MicroBatches | None = None
        self._outputs: dict[int, Any] = {}
        self._input_gradients: dict[int, list[torch.Tensor | None]] = {}
        self._output_gradients: dict[int, list[torch.Tensor | None]] = {}
        self._step = 0
        self._last = False
        out, into = self._senders.get, self._receivers.get
        self._activation_out, self._activation_in = (
            out(Payload.ACTIVATION),
            into(Payload.ACTIVATION),
        )
        self._gradient_out, self._gradient_in = out(Payload.GRADIENT), into(Payload.GRADIENT)
        self._target_out, self._target_in = out(Payload.TARGET), into(Payload.TARGET)
        self._handlers: dict[Kind, Callable[[int], None]] = {
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
        }

    def program(self, actions: tuple[Action, ...]) -> None:
        """The tuple to run from the next step on."""
        handlers = self._handlers
        self._program = [(handlers[a.kind], a.microbatch, a.kind in _BUSY) for a in actions]
        self._recomputed = frozenset(a.microbatch for a in actions if a.kind is Kind.RECOMPUTE)
        self._order = {
            payload: [a.microbatch for a in actions if RECEIVES.get(a.kind) is payload]
            for payload in Payload
        }

    @property
    def next_batch(self) -> Batch | None:
        """The mini-batch that the first stage holds ready."""
        return self._next.batch if self._next else None

    def load_first(self) -> None:
        """Read the first mini-batch (first stage, before step 1)."""
        self._load(0)

    def run(self, step: int, batch: Batch, last: bool) -> StepResult:
        """Fill and drain one step; gradients are accumulated, nothing is updated.

        Raises:
            PeerLost: a channel closed.
            Exception: whatever the user's code raises; the tracker says where.
        """
        stage, tracker = self._stage, self._stage.tracker
        self._step, self._last = step, last
        stage.begin(step, share(batch.samples, batch.microbatches), self._recomputed)
        self._current, self._next = self._next, None
        for sender in self._senders.values():
            sender.begin(batch.signature)
        for payload, receiver in self._receivers.items():
            receiver.begin(batch.signature, self._order[payload])
        busy = 0.0
        for handle, microbatch, computes in self._program:
            if computes:
                start = perf_counter()
                handle(microbatch)
                busy += perf_counter() - start
            else:
                handle(microbatch)
        self._current = None
        tracker.set(Phase.WAITING, step)
        losses = stage.losses
        return StepResult(_as_floats(losses.values), _as_floats(losses.counts), busy)

    def _forward(self, m: int) -> None:
        if self._current is not None:
            value = _to_device(self._current.inputs[m], self._stage.device)
            self._stage.put_input(m, value, [False] * len(distinct_tensors(value)))
            if self._stages == 1:
                self._stage.put_target(m, _to_device(self._current.targets[m], self._stage.device))
        output = self._stage.forward(m)
        if self._index < self._stages - 1:
            self._outputs[m] = output

    def _backward(self, m: int) -> None:
        gradients = self._output_gradients.pop(m, [])
        self._input_gradients[m] = self._stage.backward(m, gradients)
        for receiver in self._receivers.values():
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
        self._stage.put_input(m, value, self._activation_in.wants_grad)

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
        self._stage.put_target(m, self._target_in.receive(m))


def _as_floats(by_microbatch: dict[int, torch.Tensor]) -> tuple[float, ...]:
    """One transfer from the device, in micro-batch order."""
    if not by_microbatch:
        return ()
    ordered = [by_microbatch[m].reshape(()) for m in sorted(by_microbatch)]
    return tuple(float(value) for value in torch.stack(ordered).tolist())


def _to_device(value: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return value
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), value)
