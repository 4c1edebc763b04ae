"""An evaluation pass: forward-only actions, run once for each micro-batch until there are no more.

Only stage 0 knows how many micro-batches there are and what they look like. So every frame is
described, inputs and activations are in a list of one, and an empty list is the end. With a target
come the number of samples and the name of its set. Nothing waits for the pipeline to drain between
two mini-batches. A worker with several stages runs each of them with another micro-batch in turn:
:func:`pipeworker.plan.connect.lags` returns how far a stage is behind the first one.

In a loop of the user's own, an error of the user's code does not end the job. The stage where it
occurs computes nothing more, but receives and sends as many frames as before: None in place of each
value. A stage that receives None as its activation does the same for that micro-batch. So at the
end of the pass every channel is empty, whatever has failed and where. Stage 0 cannot know of the
error; unless it has failed itself, it runs all micro-batches of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from pipeworker.errors import PeerLost, PipeworkerError, ProtocolError
from pipeworker.facts.failure import Failure
from pipeworker.facts.position import Phase
from pipeworker.plan.actions import RECEIVES, SENDS, Action, Edge, Kind, edge_of
from pipeworker.plan.connect import lags
from pipeworker.plan.partition import sizes
from pipeworker.plan.placement import Placement
from pipeworker.worker.blame import UserCodeError, user_code
from pipeworker.worker.data.reader import MicroBatches
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.step.stage_channels import StageChannels
from pipeworker.worker.step.wiring import Wiring
from pipeworker.worker.stray_children import end_stray_child
from pipeworker.worker.transport.staging import move_to_device


@contextmanager
def eval_mode(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Disable gradients and set every module to eval mode; restore each module on exit.

    A module whose ``train()`` is its own may do more, as layers of LoRA that merge their weights.
    """
    modes = [(module, module.training) for layer in layers for module in layer.modules()]
    try:
        for layer in layers:
            with user_code("eval()"):
                layer.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            if type(module).train is not nn.Module.train:
                with user_code("train()"):
                    module.train(training)
        for module, training in modes:
            module.training = training


Sink = Callable[[Any, Any, int, str], None]
"""Takes the output and the target of a micro-batch, each ``[n, ...]``, n and the set's name."""


Explain = Callable[[BaseException], Failure]
"""Returns the report of an exception, with the present position of the worker."""
_END: tuple[Any, Any] = ([], None)
"""The mark that the reader returns after the last micro-batch."""


class PassFailed(Exception):
    """A pass failed by an error of the user's code, and its channels are empty again.

    Attributes:
        error: the exception.
        failure: the report of it, with its position.
    """

    def __init__(self, error: Exception, failure: Failure) -> None:
        super().__init__(failure.message)
        self.error, self.failure = error, failure


def changes_nothing(error: Exception) -> bool:
    """Return whether an error in a pass is of the user's code or data, not of the runtime."""
    if isinstance(error, UserCodeError):
        return isinstance(error.error, Exception)  # not sys.exit()
    return isinstance(error, PipeworkerError) and not isinstance(error, (PeerLost, ProtocolError))


_Program = Sequence[tuple[Kind, Edge | None]]
"""Actions of a stage for one micro-batch; the edge of each send and receive."""


@dataclass(slots=True)
class _Passage:
    """A micro-batch on its way through the stages of a worker.

    Attributes:
        ended: whether it is the mark that follows the last micro-batch.
        failed: whether a stage before the next one has failed.
    """

    ended: bool = False
    failed: bool = False


class EvaluationPass:
    """One evaluation pass on one worker.

    Args:
        wiring: the channels of the worker's stages.
        placement: the stages of the pipeline.
        actions: those of the worker for one micro-batch.
        sink: called where the last stage is.
        explain: without it the first error is raised at once; with it, an error of the user's code
            is raised as :class:`PassFailed` after the channels were emptied.
        phase: what errors call the pass.
    """

    def __init__(
        self,
        wiring: Wiring,
        placement: Placement,
        actions: Sequence[Action],
        sink: Sink,
        explain: Explain | None,
        phase: Phase = Phase.EVALUATION,
    ) -> None:
        self._wiring, self._stages, self._accelerator = wiring, wiring.stages, wiring.accelerator
        self._sink, self._explain, self._phase = sink, explain, phase
        self._programs = [
            [(a.kind, None if a.kind is Kind.FORWARD else edge_of(a)) for a in own]
            for _, own in groupby(actions, lambda action: action.stage)
        ]
        behind = lags(placement)
        own = [behind[stage] for stage in self._stages]
        self._lags = [lag - own[0] for lag in own]
        self._last = self._stages.get(placement.stages - 1)
        self._tracker = next(iter(self._stages.values())).stage.tracker
        self._failed: PassFailed | None = None
        self._complete = True

    def run(self, step: int, batches: Iterator[MicroBatches]) -> bool:
        """Evaluate all of `batches`, which are read where stage 0 is.

        Returns:
            Whether the pass was complete; with `explain` it may have failed on another worker.

        Raises:
            PeerLost: a channel closed.
            UserCodeError: the user's code raised; the tracker has the position.
            PassFailed: the same with `explain`.
        """
        for channels in self._stages.values():
            channels.stage.begin(step)
        self._wiring.begin(None, {})
        inputs = self._inputs(step, batches)
        layers = [x for channels in self._stages.values() for x in channels.stage.layers]
        with ExitStack() as modes:
            try:
                modes.enter_context(eval_mode(layers))
            except Exception as error:
                self._keep(error)
            self._run_all(inputs)
        self._tracker.wait(step)
        self._wiring.flush()
        if self._failed:
            raise self._failed from self._failed.error
        return self._complete

    def _keep(self, error: Exception) -> None:
        """Keep the first error of the user's code for the end of the pass; raise any other."""
        if self._explain is None or not changes_nothing(error):
            raise error
        self._complete = False
        self._failed = self._failed or PassFailed(error, self._explain(error))

    def _run_all(self, inputs: Iterator[tuple[Any, Any]]) -> None:
        """Run all micro-batches, each stage as far behind the first one as its lag."""
        lanes = list(zip(self._lags, self._stages.values(), self._programs, strict=True))
        under_way: dict[int, _Passage] = {}
        end: int | None = None  # the number behind the last micro-batch, which is the end mark
        number = 0
        while end is None or number - self._lags[-1] <= end:
            if end is None:
                under_way[number] = self._begin(number, inputs)
            for lag, channels, program in lanes:
                m = number - lag
                if m not in under_way:
                    continue
                passage = under_way[m]
                self._run_stage(channels, program, m, passage)
                channels.microbatches.pop(m)
                if passage.ended:
                    end = m
            if (m := number - self._lags[-1]) in under_way:
                self._complete = self._complete and not under_way.pop(m).failed
            number += 1

    def _begin(self, m: int, inputs: Iterator[tuple[Any, Any]]) -> _Passage:
        """Begin micro-batch `m` of the pass on all stages of this worker."""
        for channels in self._stages.values():
            channels.microbatches[m] = MicroBatch(m, outgoing=[])
        if 0 not in self._stages:
            return _Passage()
        first = self._stages[0].microbatches[m]
        first.value, first.target = self._read(inputs)
        if self._last is not None:
            self._last.microbatches[m].target = first.target
        return _Passage(ended=not first.value)

    def _run_stage(
        self, channels: StageChannels, program: _Program, m: int, passage: _Passage
    ) -> None:
        """Run the actions of one stage for micro-batch `m`."""
        mb = channels.microbatches[m]
        passage.failed = passage.failed or self._failed is not None
        received = []
        for kind, edge in program:
            if passage.ended and kind not in (Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION):
                continue
            failed = passage.failed
            try:
                if failed:
                    self._relay(kind, edge, mb, ended=passage.ended)
                elif edge is None:
                    self._forward(channels, mb)
                else:
                    self._wiring.handlers[edge](m)
            except Exception as error:
                self._keep(error)
                if kind in SENDS and not failed:  # nothing was sent
                    self._relay(kind, edge, mb, ended=passage.ended)
                passage.failed = True
            end_stray_child()
            if edge is not None and kind in RECEIVES:
                received.append(self._wiring.receivers[edge])
            if kind is Kind.RECEIVE_ACTIVATION:
                passage.ended = mb.value == []
                passage.failed = passage.failed or mb.value is None
        for receiver in received:
            receiver.release(m)

    def _read(self, inputs: Iterator[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return the next input and target; after an error there are none."""
        try:
            return _END if self._failed else next(inputs, _END)
        except Exception as error:
            self._keep(error)
            return _END
        finally:
            end_stray_child()

    def _relay(self, kind: Kind, edge: Edge | None, mb: MicroBatch, *, ended: bool) -> None:
        """Send or receive a frame of a micro-batch that has failed; compute nothing."""
        if edge is None:
            return
        self._tracker.wait()
        if kind in SENDS:
            self._wiring.senders[edge].send(mb.number, [] if ended else None)
            return
        mb.value = None
        value = self._wiring.receivers[edge].receive(mb.number)
        if kind is Kind.RECEIVE_ACTIVATION and value == []:
            mb.value = value

    def _forward(self, channels: StageChannels, mb: MicroBatch) -> None:
        (mb.value,) = mb.value
        output = channels.stage.evaluate(mb, self._phase)
        mb.outgoing = [mb.outgoing]
        for transfer in channels.after_forward:
            transfer(mb)
        if channels is self._last:
            self._tracker.set(self._phase, channels.stage.step, mb.number)
            samples, target, name = mb.target
            self._sink(output, self._to_device(target), samples, name)

    def _inputs(self, step: int, batches: Iterator[MicroBatches]) -> Iterator[tuple[Any, Any]]:
        """Yield each micro-batch: a list of its input; its number of samples, target and set."""
        tracker = self._tracker
        done, name = 0, ""
        while True:
            tracker.set(self._phase, step)
            read = next(batches, None)
            if read is None:
                tracker.count(0, 0)
                return
            done, name = (done if read.name == name else 0) + 1, read.name
            tracker.count(done, read.length)
            counts = sizes(read.batch.samples, read.batch.microbatches)
            for value, target, samples in zip(read.inputs, read.targets, counts, strict=True):
                yield [self._to_device(value)], (samples, target, read.name)

    def _to_device(self, value: Any) -> Any:
        """Return a nested value that was read, on the accelerator."""
        if self._accelerator is None:
            return value
        moved, copied = move_to_device(self._accelerator, value)
        self._accelerator.current.wait_event(copied)
        return moved
