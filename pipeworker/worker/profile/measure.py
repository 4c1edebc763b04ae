"""The facts of one layer, measured on a value; the stage that trains runs it here too.

A layer by itself is a stage: the same autocast, compiler, skip table and boundary, and the same two
parts of a backward. Under fake tensors and a stopwatch that counts operations, the same function
counts instead of measuring.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from pipeworker.facts.layer_facts import LayerFacts
from pipeworker.host.position import Tracker
from pipeworker.job.file import JobFile
from pipeworker.worker import blame
from pipeworker.worker.device.device import Stopwatch
from pipeworker.worker.internals import is_fake, without_fake_modes
from pipeworker.worker.profile.heap import lost_bytes
from pipeworker.worker.profile.meters import Flops, SavedTensors, memory_meter
from pipeworker.worker.profile.optimizer import UpdateFacts, measure_update
from pipeworker.worker.stage import losses
from pipeworker.worker.stage.layers import StageConfig
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.skips import StageSkips
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.stage.values import bytes_of, distinct_tensors, map_tensors, versions
from pipeworker.worker.transport.layout import aligned_copy

log = logging.getLogger(__name__)
_BEFORE, _AFTER = 1, 2
"""Numbers of the stages that skip tensors come from and go to."""
SLOW_SECONDS = 0.5
"""Seconds of a layer's first run from which its backward is not run as a whole too."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings with which all layers of a network are measured.

    Attributes:
        stage: the settings of the stage that each layer is run in.
        repeats: the most timed repeats of one layer; at least one is made.
        budget: seconds after which no other repeat of a layer begins.
        real: whether tensors have memory: the job's optimizer makes steps, and what the allocator
            loses is measured.
    """

    job: JobFile
    stage: StageConfig
    repeats: int = 5
    budget: float = 0.05
    real: bool = True


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A call of a layer.

    Attributes:
        value: its input, on the device.
        wants_grad: for each distinct tensor of it, whether it needs a gradient.
        popped: the skip tensors that it pops, by name, and whether each needs a gradient.
        stashed: the names of the skip tensors that it leaves for later layers.
    """

    index: int
    value: Any
    wants_grad: Sequence[bool] = ()
    popped: Mapping[str, tuple[torch.Tensor, bool]] = field(default_factory=dict)
    stashed: Sequence[str] = ()
    uses_skips: bool = False

    @property
    def skips(self) -> StageSkips | None:
        """Its skip connections, as those of a stage."""
        if not self.uses_skips:
            return None
        arriving = {_BEFORE: sorted(self.popped)} if self.popped else {}
        departing = {_AFTER: sorted(self.stashed)} if self.stashed else {}
        return StageSkips(arriving, departing)


def measure_layer(
    build: Callable[[], nn.Module], call: LayerCall, settings: Settings, watch: Stopwatch
) -> LayerFacts:
    """Build a layer, measure it and drop it; return its facts.

    The caller keeps the process's random generators. If `watch` counts operations, their numbers
    take the place of seconds.

    Raises:
        Exception: whatever the layer, its backward or the device raises.
    """
    layer = build()
    gone = weakref.ref(layer)
    measured = _Measured(layer, call, settings, watch)
    try:
        facts = measured.facts()
    finally:
        measured.close()
        del measured, layer
    if gone() is not None:  # it is in a cycle, and the next layer must not be built beside it
        gc.collect()
    return facts


def measure_loss(
    output: Any, wants_grad: Sequence[bool], target: Any, settings: Settings, watch: Stopwatch
) -> LayerFacts:
    """Return the facts of the loss of one micro-batch; its seconds are forward and backward."""
    plain = dataclasses.replace(settings.stage, compiler=None)
    found = measure_layer(
        lambda: _Loss(settings.job.loss, target),
        LayerCall(0, output, wants_grad),
        dataclasses.replace(settings, stage=plain),
        watch,
    )
    return LayerFacts(
        "loss",
        forward=found.forward + found.backward,
        saved_bytes=found.saved_bytes + found.saved_output_bytes,
        saved_input_bytes=found.saved_input_bytes,
        working_bytes=found.working_bytes,
    )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, which is real if that is, although a fake mode may be active."""
    with nullcontext() if is_fake(tensor) else without_fake_modes():
        return aligned_copy(tensor)


class _Loss(nn.Module):
    """The loss of a micro-batch as a layer, whose buffers are the target."""

    def __init__(self, loss: Callable[[Any, Any], Any], target: Any) -> None:
        super().__init__()
        # A function: a loss that is a module must not become a part of this one.
        self._loss_of: Callable[[Any], Any] = lambda output: loss(output, target)
        for number, tensor in enumerate(distinct_tensors(target)):
            self.register_buffer(str(number), tensor)

    def forward(self, output: Any) -> torch.Tensor:
        with blame.user_code("loss()"):
            return losses.parts(self._loss_of(output))[0]


class _Measured:
    """A layer while it is measured, as the only one of a stage."""

    def __init__(
        self, layer: nn.Module, call: LayerCall, settings: Settings, watch: Stopwatch
    ) -> None:
        self._layer, self._call, self._settings, self._watch = layer, call, settings, watch
        self._device, self._compiles = settings.stage.device, settings.stage.compiler is not None
        self._parameters = list(layer.parameters())
        self._tensors = [*self._parameters, *layer.buffers()]
        self._trained = [p for p in self._parameters if p.requires_grad]
        self._gradients: list[torch.Tensor] = []
        self._of_value = 0  # gradients that are of the output, and not of stashed tensors
        self._changes_input = False
        self._kept_bytes = 0  # of its graph, with what leaves the stage
        self._deferred_bytes = 0
        self._tracker = Tracker()
        config = dataclasses.replace(settings.stage, first=call.index, skips=call.skips)
        self._stage = Stage([layer], config, self._tracker)

    def close(self) -> None:
        """Restore the settings of the layer's modules."""
        self._stage.deferred.restore_modules()
        self._tracker.close()

    def facts(self) -> LayerFacts:
        """Return the facts of the layer."""
        stage = self._stage
        begin = perf_counter()
        found = self._sizes()
        slow = perf_counter() - begin > SLOW_SECONDS
        splits = self._wants_grad and bool(self._trained)
        if splits and self._crashes_in_parts():
            splits, found = False, dataclasses.replace(found, splits=False)
        forwards: list[float] = []
        wholes: list[float] = []
        firsts: list[float] = []
        end = perf_counter() + self._settings.budget
        while not wholes or (len(wholes) < self._settings.repeats and perf_counter() < end):
            mb = self._microbatch(split=slow and splits)
            forwards.append(self._timed(stage.forward, mb))
            if not self._gradients:
                wholes.append(0.0)
                continue
            if not (slow and splits):
                wholes.append(self._timed(stage.backward, self._with_gradients(mb)))
            if splits:
                if not slow:
                    mb = self._microbatch(split=True)
                    forwards.append(self._timed(stage.forward, mb))
                try:
                    with self._keeps(mb) if slow else nullcontext():
                        firsts.append(self._timed(stage.backward_input, self._with_gradients(mb)))
                except blame.UserCodeError as error:  # a whole one has raised nothing
                    log.info("the backward cannot be split: %s", error)
                    splits, found = False, dataclasses.replace(found, splits=False)
                    continue
                second = self._timed(stage.backward_weight, mb)
                if slow:
                    wholes.append(firsts[-1] + second)
            stage.end()
        whole = median(wholes)
        first = median(firsts) if firsts else whole if self._wants_grad else 0.0
        update, lost, settings = UpdateFacts(), 0, self._settings
        if splits and not slow:
            mb = self._microbatch(split=True)
            stage.forward(mb)
            with self._keeps(mb):
                stage.backward_input(self._with_gradients(mb))
            stage.backward_weight(mb)
            stage.end()
        if settings.real and self._trained:
            job, index = settings.job, self._call.index
            update = measure_update(self._layer, index, job, self._device, self._watch)
        if settings.real and self._device.type == "cpu":
            lost = lost_bytes(self._kept, self._kept_bytes, once=slow)
            stage.end()
        return dataclasses.replace(
            found,
            forward=median(forwards),
            backward=whole,
            backward_input=min(first, whole),
            optimizer_bytes=update.state,
            update=update.seconds,
            update_bytes=update.working,
            saved_bytes=found.saved_bytes + lost,
            deferred_bytes=self._deferred_bytes,
        )

    def _crashes_in_parts(self) -> bool:
        """Return whether a split backward would end the process.

        On the CPU torch's ``GroupNorm`` writes the gradient of an input in channels_last although
        none was asked for (torch 2.13).
        """
        tensors = [*distinct_tensors(self._call.value), *self._parameters]
        return (
            self._device.type == "cpu"
            and any(isinstance(module, nn.GroupNorm) for module in self._layer.modules())
            and any(
                not tensor.is_contiguous() and tensor.is_contiguous(memory_format=form)
                for tensor in tensors
                for form in (torch.channels_last, torch.channels_last_3d)
                if tensor.dim() == (4 if form is torch.channels_last else 5)
            )
        )

    @contextmanager
    def _keeps(self, mb: MicroBatch) -> Iterator[None]:
        """Count what the first part of a split backward, run inside, keeps for the second."""
        memory = memory_meter(self._device, compiles=self._compiles)
        memory.know([*self._tensors, *self._gradients])
        before = memory.restart()
        with memory:
            yield
        mb.input_gradients = []  # they are sent
        mb.arrived_gradients.clear()
        self._deferred_bytes = max(0, memory.restart() - before)

    def _kept(self) -> MicroBatch:
        """Return a micro-batch with its graph."""
        mb = self._microbatch()
        self._stage.forward(mb)
        return mb

    def _sizes(self) -> LayerFacts:
        """Run the layer for the first time, and return its sizes."""
        sparse: list[nn.Parameter] = []

        def note(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
            if gradient is not None and gradient.layout is not torch.strided:
                sparse.append(parameter)

        handles = []
        for parameter in self._trained:  # later micro-batches add to a gradient
            parameter.grad = torch.zeros_like(parameter)
            hook = partial(note, parameter)
            handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
        inputs = distinct_tensors(self._call.value)
        inputs += [tensor for tensor, _ in self._call.popped.values()]
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        memory = memory_meter(self._device, compiles=self._compiles)
        before, flops = versions(inputs), Flops()
        memory.know([*self._tensors, *inputs, *gradients])
        counting = nullcontext() if self._compiles else flops
        for has_hooks in (True, False):
            saved, flops.count, mb = SavedTensors(), 0, self._microbatch()
            start = memory.restart()
            try:
                with memory, saved.active() if has_hooks else nullcontext(), counting:
                    self._stage.forward(mb)
                break
            except blame.UserCodeError as error:
                if not (has_hooks and blame.rejects_hooks(error)):
                    raise
        self._changes_input = versions(inputs) != before
        most = memory.peak
        made = memory.restart() - start
        working = most - start - made
        output, departing = distinct_tensors(mb.outgoing), [*mb.departing.values()]
        leaves = [t for t in (*output, *departing) if t is not None]
        roots = [tensor for tensor in leaves if tensor.requires_grad]
        self._of_value = sum(tensor.requires_grad for tensor in output)
        self._gradients = [torch.ones_like(root) for root in roots]
        saved.take(self._tensors)
        found = LayerFacts(
            kind=type(self._layer).__name__,
            parameters=sum(parameter.numel() for parameter in self._parameters),
            parameter_bytes=bytes_of(self._tensors),
            gradient_bytes=sum(parameter.nbytes for parameter in self._trained),
            saved_output_bytes=saved.take(output),
            saved_input_bytes=saved.take(inputs),
            saved_bytes=saved.rest() if has_hooks else max(0, made - bytes_of(output)),
            output_bytes=bytes_of(mb.outgoing),
            passes_gradient=self._of_value > 0,
        )
        self._kept_bytes = saved.rest(leaves) if has_hooks else max(0, made)
        del saved, output, departing, roots, leaves
        if self._gradients:
            memory.know(self._gradients)
            start = memory.restart()
            with memory, counting:
                self._stage.backward(self._with_gradients(mb))
            working = max(working, memory.peak - start)
        for handle in handles:
            handle.remove()
        for parameter in sparse:  # added to zeros, it would be dense
            parameter.grad = None
        self._stage.end()
        return dataclasses.replace(found, working_bytes=max(0, working), flops=flops.count)

    @property
    def _wants_grad(self) -> bool:
        """Whether the backward computes a gradient of the input, or of a skip tensor."""
        popped = any(wanted for _, wanted in self._call.popped.values())
        return bool(self._gradients) and (any(self._call.wants_grad) or popped)

    def _microbatch(self, *, split: bool = False) -> MicroBatch:
        """Return the input of a run; the layer changes no other run's."""
        self._stage.begin(0)  # each is a mini-batch of its own: none is checked with another one
        call = self._call
        value, popped = call.value, {name: call.popped[name] for name in sorted(call.popped)}
        if self._changes_input:
            value = map_tensors(_copied, value)
            popped = {name: (_copied(t), wanted) for name, (t, wanted) in popped.items()}
        found = MicroBatch(0, split_backward=split, value=value, wants_grad=list(call.wants_grad))
        if popped:
            tensors, wants = zip(*popped.values(), strict=True)
            found.arrived = {_BEFORE: (list(tensors), list(wants))}
        return found

    def _with_gradients(self, mb: MicroBatch) -> MicroBatch:
        """Give a micro-batch the gradients from which its backward starts."""
        mb.outgoing = None
        mb.departing.clear()
        mb.output_gradients = list(self._gradients[: self._of_value])
        if self._call.stashed:
            mb.departed_gradients = {_AFTER: list(self._gradients[self._of_value :])}
        return mb

    def _timed(self, act: Callable[[MicroBatch], None], mb: MicroBatch) -> float:
        begin = self._watch.mark()
        act(mb)
        return self._watch.seconds([begin, self._watch.mark()])
