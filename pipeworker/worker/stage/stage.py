"""A stage: consecutive layers, run forward, again, and backward, a micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from pipeworker.errors import PipeworkerError, SkipError, UsageError
from pipeworker.host.position import Tracker
from pipeworker.wire.messages.plan import SkipRoute
from pipeworker.wire.messages.position import Phase
from pipeworker.worker import blame
from pipeworker.worker.device.copies import Copies
from pipeworker.worker.internals import engine, run_backward
from pipeworker.worker.stage import losses, rng, split
from pipeworker.worker.stage.batchnorm import DeferredBatchNorm
from pipeworker.worker.stage.boundary import Caught, pass_boundary
from pipeworker.worker.stage.compiled import compiled
from pipeworker.worker.stage.microbatch import Arrived, Gradients, MicroBatch
from pipeworker.worker.stage.offload import Offload
from pipeworker.worker.stage.recompute import Buffers
from pipeworker.worker.stage.skips import Table
from pipeworker.worker.stage.values import (
    copied,
    describe,
    distinct_tensors,
    first_in_graph,
    versions,
)

Loss = Callable[[Any, Any], Any]
"""The seed of a layer's forward: of the job's seed, the step, the micro-batch and the layer."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Skips:
    """What crosses a stage's boundary over skip connections.

    Attributes:
        arriving: by stage it comes from, in order, the names, sorted.
        departing: by stage it goes to, likewise.
    """

    arriving: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    departing: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def of(routes: Sequence[SkipRoute], stage: int) -> Skips | None:
        """Those of a stage; None when none of its layers stashes or pops."""
        if not any(stage in (route.source, route.target) for route in routes):
            return None
        arriving: dict[int, tuple[str, ...]] = {}
        departing: dict[int, tuple[str, ...]] = {}
        for route in sorted(routes, key=lambda route: (route.source, route.target, route.name)):
            if route.source == route.target:
                continue
            if route.source == stage:
                departing[route.target] = (*departing.get(route.target, ()), route.name)
            elif route.target == stage:
                arriving[route.source] = (*arriving.get(route.source, ()), route.name)
        return Skips(arriving, departing)

    @property
    def leaving(self) -> list[str]:
        """All names that depart, in the order in which their gradients come back."""
        return [name for names in self.departing.values() for name in names]


class Stage:
    """The layers of one stage. What it does to a micro-batch, it does to its object.

    Args:
        layers: built, on `device`; `first` is the index of the first one in the whole model.
        index: of the stage.
        before: the class of the layer before its first one, if that is known.
        loss: on the last stage.
        skips: None when no layer stashes or pops.
        precision: ``fp32``, or what layers and loss are autocast to, ``bf16`` or ``fp16``.
        compiler: a backend of ``torch.compile`` for the layers; None to run them as they are.
        copies: by which what graphs save goes to the host's memory and back; None to keep it.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int,
        *,
        seed: int,
        device: torch.device,
        tracker: Tracker,
        index: int = 0,
        before: str = "",
        loss: Loss | None = None,
        skips: Skips | None = None,
        precision: str = "fp32",
        deferred_batch_norm: bool = False,
        compiler: str | None = None,
        copies: Copies | None = None,
    ) -> None:
        self.layers = list(layers)
        self.first = first
        self.index = index
        self._before = before
        self.device = device
        self.last_layer = first + len(self.layers) - 1
        self.tracker = tracker
        self.skips = skips
        self._seed = seed
        self._loss = loss
        self._accelerator = rng.accelerator_generator(device)
        self._deferred = DeferredBatchNorm(self.layers) if deferred_batch_norm else None
        self._calls: Sequence[Callable[[Any], Any]] = self.layers
        if compiler:
            self._calls = compiled(self.layers, compiler)
        self._buffers = Buffers(self.layers)
        self._offload = Offload(self.layers, copies) if copies is not None else None
        self._input_changes: bool | None = None
        self._phony = torch.empty(0, device=device, requires_grad=True)
        # Autocast is entered for each layer by itself: it keeps cast weights until it is left, and
        # what shares one must not depend on the grouping.
        self._autocast = autocast(device.type, precision)
        self._step = 0
        self._number = 0
        self._loss_scale = 1.0

    def begin(self, step: int, first: int = 0, loss_scale: float = 1.0) -> None:
        """A mini-batch of a step starts.

        Args:
            first: the number of its first micro-batch within the step.
            loss_scale: what backward starts from is multiplied by it (fp16).
        """
        self._step = step
        self._number = first
        self._loss_scale = loss_scale
        if self._offload is not None:
            self._offload.begin()

    def end(self) -> None:
        """The mini-batch is complete."""
        if self._deferred is not None:
            self._deferred.commit()

    @property
    def deferred(self) -> DeferredBatchNorm | None:
        """Its batch norms, where they are deferred."""
        return self._deferred

    def close(self) -> None:
        """Leave the modules as they were, but for what they have learned."""
        if self._deferred is not None:
            self._deferred.close()

    def class_of(self, layer: int) -> str:
        """The class of one of its layers; empty where it is another stage's."""
        offset = layer - self.first
        return type(self.layers[offset]).__name__ if 0 <= offset < len(self.layers) else ""

    def forward(self, mb: MicroBatch) -> None:
        """Run the layers: gives ``outgoing`` and ``departing``, or on the last stage the loss.

        Raises:
            Raised: what a layer or the loss raised.
        """
        if not mb.again:
            with self._saving(mb):
                mb.output = self._run(mb, mb.value, mb.arrived, Phase.FORWARD)
            return
        # The graph of this forward is dropped at once. It is built all the same: kernels may depend
        # on grad mode, and which outputs require grad is only known from it. Its peak memory is
        # that of the recompute.
        given = mb.value if self.skips is None else (mb.value, mb.arrived)
        if self._input_changes is not False:
            given = copied(given)
        before = versions(given)
        with self._buffers.first_forward(mb):
            value, arrived = (given, {}) if self.skips is None else given
            self._run(mb, value, arrived, Phase.FORWARD)
        mb.edges = ()
        if self._input_changes is None:
            self._input_changes = versions(given) != before
        elif not self._input_changes and versions(given) != before:
            raise UsageError(
                "a layer began to change its stage's input in place after it had not at first; "
                "use --recompute never for such a layer"
            )

    def recompute(self, mb: MicroBatch) -> None:
        """Run the layers again, this time keeping what backward needs."""
        with self._buffers.second_forward(mb):
            mb.output = self._run(mb, mb.value, mb.arrived, Phase.RECOMPUTE)
        mb.outgoing = None
        mb.departing.clear()

    def fetch(self, mb: MicroBatch) -> None:
        """What the graph of its forward saved begins to come back from the host's memory."""
        assert self._offload
        self._offload.fetch(mb)

    def ended(self, mb: MicroBatch) -> None:
        """An action for a micro-batch has ended, and so has the time of what left beside it."""
        if self._offload is not None:
            self._offload.settle(mb)

    def backward(self, mb: MicroBatch) -> None:
        """Accumulate the gradients of weights; gives ``input_gradients``, ``arrived_gradients``.

        Raises:
            Raised: what a layer's backward or a hook raised.
            UsageError: there is nothing to start from.
        """
        roots, gradients = self._start(mb)
        if roots:
            try:
                run_backward(roots, gradients)
            except blame.THEIRS as error:
                self._blame(error)
        caught = mb.caught.gradients if mb.caught else None
        self._give(mb, caught)

    def backward_input(self, mb: MicroBatch) -> None:
        """The first half: gives the gradients of the input, and leaves those of the weights."""
        roots, gradients = self._start(mb)
        caught = None
        if roots:
            begins, mb.edges = mb.edges, ()
            caught, mb.deferred = split.backward_input(roots, gradients, begins, self._engine)
        self._give(mb, caught)

    def backward_weight(self, mb: MicroBatch) -> None:
        """The second half: accumulate the gradients of weights."""
        self.tracker.set(Phase.BACKWARD, self._step, mb.number, self.last_layer)
        deferred, mb.deferred = mb.deferred, None
        if deferred is not None:
            deferred.run(self._engine)

    def _start(self, mb: MicroBatch) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """What backward starts from; the micro-batch lets go of it."""
        self.tracker.set(Phase.BACKWARD, self._step, mb.number, self.last_layer)
        if mb.saved is not None and self._offload is not None:
            self._offload.arrive(mb)
        output, mb.output, mb.value, mb.target = mb.output, None, None, None
        if self._loss is not None:
            if not output.requires_grad:
                raise UsageError(
                    "the loss does not depend on any parameter that requires grad: is it detached "
                    "on its way, or is every parameter frozen?"
                )
            return (output,), (losses.gradient(mb, self._loss_scale),)
        gradients = mb.output_gradients
        if self.skips is not None:
            departed = mb.departed_gradients
            gradients = [*gradients, *(g for p in self.skips.departing for g in departed[p])]
        mb.output_gradients, mb.departed_gradients = [], {}
        roots = [t for t in distinct_tensors(output) if t.requires_grad]
        if len(roots) != len(gradients):
            raise UsageError(
                f"{len(gradients)} tensors of the stage's output required grad when they were "
                f"sent, {len(roots)} when they were recomputed: a layer's output must require "
                "grad or not whatever happens"
            )
        used = [gradient is not None for gradient in gradients]
        return tuple(compress(roots, used)), tuple(g for g in gradients if g is not None)

    def _engine(self, *given: Any) -> Any:
        """Call the engine; what its nodes raise is the user's."""
        try:
            return engine(*given)
        except blame.THEIRS as error:
            self._blame(error)

    def _blame(self, error: BaseException) -> NoReturn:
        """The engine ran the layers' nodes and the user's: what it raised is theirs."""
        layer = self.tracker.get().layer
        blame.raised(blame.layer(layer, self.class_of(layer)), error)

    def _give(self, mb: MicroBatch, caught: Gradients | None) -> None:
        """Part the gradients of the boundary: of the input, and of what arrived."""
        arrived = mb.arrived
        mb.caught, mb.edges = None, ()
        if self.skips is None or not self.skips.arriving:
            wanted = sum(mb.wants_grad)
            mb.input_gradients = [None] * wanted if caught is None else caught
            return
        counts = {peer: sum(arrived[peer][1]) for peer in self.skips.arriving}
        start = sum(mb.wants_grad)
        if caught is None:
            caught = [None] * (start + sum(counts.values()))
        mb.input_gradients = caught[:start]
        for peer, count in counts.items():
            mb.arrived_gradients[peer] = caught[start : start + count]
            start += count
        mb.arrived = {}

    def _saving(self, mb: MicroBatch) -> AbstractContextManager[None]:
        """While a graph is made that is kept."""
        if self._offload is None or not mb.away:
            return nullcontext()
        return self._offload.saving(mb)

    def _run(self, mb: MicroBatch, value: Any, arrived: Arrived, phase: Phase) -> Any:
        """All layers in order, then the loss on the last stage; returns what backward starts at."""
        wants = mb.wants_grad
        skips = self.skips
        if skips is not None:
            value, wants = self._joined(mb, value, arrived)
        if any(wants):
            mb.caught = Caught()
            value, inside = pass_boundary(value, wants, self._phony, mb.caught)
            if mb.halves:  # before a layer works on them in place
                mb.edges = [get_gradient_edge(tensor) for tensor in inside]
        value = self._output(value, mb.number, phase)
        output = value
        if skips is not None and self._loss is None:
            mb.outgoing, departing = value
            mb.departing = dict(departing)  # the graph keeps its own
        elif self._loss is None:
            mb.outgoing = value
        else:
            self.tracker.set(Phase.LOSS, self._step, mb.number)
            # What the loss draws goes on from the last layer's stream: they are always together.
            output = losses.record(mb, self.loss_of(value, mb.target))
        return output

    def _joined(self, mb: MicroBatch, value: Any, arrived: Arrived) -> tuple[Any, list[bool]]:
        """The input with what arrived, and which of the distinct tensors want a gradient."""
        assert self.skips
        tensors: dict[str, torch.Tensor] = {}
        wants = list(mb.wants_grad)
        for peer, names in self.skips.arriving.items():
            found, wanted = arrived[peer]
            tensors.update(zip(names, found, strict=True))
            wants += wanted
        return (value, tensors), wants

    def evaluate(self, mb: MicroBatch) -> Any:
        """The output, forward alone, in eval mode; on all but the last stage it is ``outgoing``.

        The number of the micro-batch counts through the whole evaluation pass.
        """
        value = mb.value if self.skips is None else self._joined(mb, mb.value, mb.arrived)[0]
        output = self._output(value, mb.number, Phase.EVALUATION, train=False)
        if self._loss is not None:
            return output
        if self.skips is None:
            mb.outgoing = output
        else:
            mb.outgoing, mb.departing = output
        return None

    def state_dicts(self) -> list[dict[str, Any]]:
        """Of its layers, in order."""
        found = []
        for index, layer in enumerate(self.layers, self.first):
            with blame.users(f"state_dict() of {blame.layer(index, self.class_of(index))}"):
                found.append(layer.state_dict())
        return found

    def loss_of(self, output: Any, target: Any) -> Any:
        """What ``loss`` returns, on the last stage."""
        assert self._loss
        try:
            if self._autocast is None:
                return self._loss(output, target)
            with self._autocast:
                return self._loss(output, target)
        except blame.THEIRS as error:
            last = blame.layer(self.last_layer, self.class_of(self.last_layer))
            blame.refuse_nothing(output, last, "loss()", error)
            given = f"its output was {describe(output)}, its target {describe(target)}"
            blame.raised("loss()", error, note=given)

    def _output(self, value: Any, microbatch: int, phase: Phase, *, train: bool = True) -> Any:
        """Through all layers, with a table of what is stashed where layers stash."""
        try:
            if self.skips is None:
                return self._through_layers(value, microbatch, phase, train)
            value, received = value
            table = Table(received)
            with table.active():
                value = self._through_layers(value, microbatch, phase, train)
            left = table.leave(self.skips.leaving, strict=train)
        except SkipError as error:
            hint = ""
            if self.skips is None:
                hint = (
                    ". No skip connection was planned: import pipeworker at the top of the module "
                    "that has the layers, not inside a function; or give pipeworker.Pipeline a "
                    "sample"
                )
            shown = SkipError(f"{error}{hint}")
            shown.in_step = True
            raise shown from None
        return value if self._loss is not None else (value, left)

    def _through_layers(self, value: Any, microbatch: int, phase: Phase, train: bool) -> Any:
        step, tracker, last_layer = self._step, self.tracker, self.last_layer
        seed, number = self._seed, self._number + microbatch
        autocast = self._autocast
        seed_of = rng.layer_seed if train else rng.evaluation_seed
        node: Any = None
        for index, layer in enumerate(self._calls, self.first):
            tracker.set(phase, step, microbatch, index)
            rng.seed_all(seed_of(seed, step, number, index), self._accelerator)
            try:
                if autocast is None:
                    value = layer(value)
                else:
                    with autocast:
                        value = layer(value)
            except PipeworkerError:
                raise
            except blame.THEIRS as error:
                who = blame.layer(index, self.class_of(index))
                before = blame.layer(index - 1, self.class_of(index - 1) or self._before)
                blame.refuse_nothing(value, before, who, error)
                blame.raised(who, error, note=f"its input was {describe(value)}")
            if index != last_layer:
                node = self._mark(value, node, microbatch, index)
        return value

    def _mark(self, value: Any, previous: Any, microbatch: int, layer: int) -> Any:
        """Have backward record that it enters a layer when it reaches the layer's output.

        The last layer needs none: backward begins there.
        """
        tensor = value if isinstance(value, torch.Tensor) else first_in_graph(value)
        node = tensor.grad_fn if tensor is not None else None
        if node is None or node is previous:
            return previous
        position = (Phase.BACKWARD, self._step, microbatch, layer)
        node.register_prehook(lambda _: self.tracker.set(*position))
        return node


def autocast(device_type: str, precision: str) -> torch.autocast | None:
    """The context for a precision; None for fp32."""
    if precision not in _AUTOCAST:
        return None
    return torch.autocast(device_type, _AUTOCAST[precision])
