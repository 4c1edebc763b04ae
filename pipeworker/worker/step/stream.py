"""An evaluation pass: the forward-only tuple, run once for each micro-batch until there is no more.

How many there are and what they look like only stage 0 knows, so frames are described, activations
travel in a list of one, and an empty list is the end. Nothing waits for the pipeline to drain
between two mini-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from pipeworker.plan.actions import RECEIVES, SENDS, Action, Edge, Kind, edge_of
from pipeworker.plan.shares import sizes
from pipeworker.wire.messages.position import Phase
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.step.data import MicroBatches
from pipeworker.worker.step.evaluation import eval_mode
from pipeworker.worker.step.flow import Flow, Incoming, Outgoing
from pipeworker.worker.transport.staging import brought

Sink = Callable[[Any, Any, int], None]


class _One(Sequence[MicroBatch]):
    """The micro-batch that is under way, whatever number it is asked for by."""

    def __init__(self, mb: MicroBatch) -> None:
        self._mb = mb

    def __getitem__(self, index: Any) -> Any:
        return self._mb

    def __len__(self) -> int:
        return 1


class Pass:
    """One evaluation pass on one worker.

    Args:
        ends: its ends of the channels.
        actions: its tuple for one micro-batch.
        accelerator: where the stages are, if not on the CPU.
    """

    def __init__(
        self,
        flows: Mapping[int, Flow],
        ends: Mapping[Edge, Outgoing | Incoming],
        actions: Sequence[Action],
        last_stage: int,
        sink: Sink,
        accelerator: Accelerator | None,
    ) -> None:
        self._flows = flows
        self._accelerator = accelerator
        self._last = flows.get(last_stage)
        self._sink = sink
        self._samples = 0
        self._program = [
            (a.kind, flows[a.stage], ends[edge_of(a)] if a.kind in SENDS | RECEIVES else None)
            for a in actions
        ]
        self._receivers = [end.receiver for _, _, end in self._program if isinstance(end, Incoming)]

    def run(self, step: int, batches: Iterator[MicroBatches]) -> None:
        """To the end of `batches`, which are looked at where stage 0 is."""
        with ExitStack() as modes:
            for flow in self._flows.values():
                modes.enter_context(eval_mode(flow.stage.layers))
            inputs = self._inputs(step, batches)
            m = 0
            while self._once(m, step, inputs):
                m += 1

    def _once(self, m: int, step: int, inputs: Iterator[tuple[Any, Any, int]]) -> bool:
        """One micro-batch; False when there was none."""
        ended = False
        for flow in self._flows.values():
            flow.microbatches = _One(MicroBatch(m))
        if 0 in self._flows:
            given = next(inputs, None)
            if given is None:
                ended = True
            else:
                first = self._flows[0].microbatches[m]
                first.value, first.target, self._samples = given
                if self._last is not None:
                    self._last.microbatches[m].target = first.target
        for kind, flow, end in self._program:
            match kind:
                case Kind.RECEIVE_ACTIVATION:
                    assert isinstance(end, Incoming)
                    got = end.receive(m)
                    if got:
                        end.put(m, got[0])
                    else:
                        ended = True
                        end.receiver.release(m)
                case Kind.SEND_ACTIVATION:
                    assert isinstance(end, Outgoing)
                    end.wrapped(m, _none if ended else _one)
                case _ if ended:
                    continue
                case Kind.FORWARD:
                    self._forward(flow, m, step)
                case Kind.SEND_TARGET:
                    assert isinstance(end, Outgoing)
                    end.wrapped(m, lambda target: (self._samples, target))
                case Kind.RECEIVE_TARGET:
                    assert isinstance(end, Incoming)
                    self._samples, target = end.receive(m)
                    end.put(m, target)
                case _:
                    assert end
                    end(m)
        if not ended:
            for receiver in self._receivers:
                receiver.release(m)
        return not ended

    def _forward(self, flow: Flow, m: int, step: int) -> None:
        mb = flow.microbatches[m]
        output = flow.stage.evaluate(mb)
        for handover in flow.after_forward:
            handover(mb)
        if flow is self._last:
            flow.stage.tracker.set(Phase.EVALUATION, step, m)
            self._sink(output, self._brought(mb.target), self._samples)

    def _inputs(self, step: int, batches: Iterator[MicroBatches]) -> Iterator[tuple[Any, Any, int]]:
        """Micro-batches (input, target, samples), where stage 0 is."""
        stage = self._flows[0].stage
        while True:
            stage.tracker.set(Phase.EVALUATION, step)
            read = next(batches, None)
            if read is None:
                return
            counts = sizes(read.batch.samples, read.batch.microbatches)
            for value, target, samples in zip(read.inputs, read.targets, counts, strict=True):
                yield self._brought(value), target, samples

    def _brought(self, value: Any) -> Any:
        """What was read, on the accelerator."""
        if self._accelerator is None:
            return value
        there, copied = brought(self._accelerator, value)
        self._accelerator.current.wait_event(copied)
        return there


def _one(value: Any) -> list[Any]:
    return [value]


def _none(_: Any) -> list[Any]:
    return []
