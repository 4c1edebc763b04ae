"""A stage: consecutive layers that run forward, recompute and backward, by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from pipeworker.errors import UsageError
from pipeworker.facts.position import Phase
from pipeworker.host.position import Tracker
from pipeworker.plan.figures import plural
from pipeworker.plan.ties import LOSS
from pipeworker.worker import blame
from pipeworker.worker.internals import engine, version_of
from pipeworker.worker.stage import losses, split
from pipeworker.worker.stage.batchnorm import DeferredBatchNorm
from pipeworker.worker.stage.layers import Layers, StageConfig
from pipeworker.worker.stage.local_gradients import LocalGradients, add_local_gradients
from pipeworker.worker.stage.microbatch import Arrived, Gradients, MicroBatch, pass_boundary
from pipeworker.worker.stage.offload import Copies, Offload
from pipeworker.worker.stage.recompute import Buffers
from pipeworker.worker.stage.repeated_forwards import RepeatedForwards
from pipeworker.worker.stage.saved_buffers import SavedBuffers
from pipeworker.worker.stage.shared_buffers import SharedBuffers
from pipeworker.worker.stage.values import (
    WATCHED,
    checksums,
    describe,
    distinct_tensors,
    is_checked,
    map_tensors,
    versions,
)
from pipeworker.worker.transport.layout import aligned_copy

Loss = Callable[[Any, Any], Any]
_CHANGED = (
    ", by a hook that updates them inside a backward, or by a layer; use --recompute never, or "
    "leave updates to optimizer()"
)


class Stage:
    """The layers of one stage, on the device of `config`. Each action changes its micro-batch.

    The last stage has the job's loss function. With `copies`, what graphs save is moved to the
    host's memory and back. `deferred` are the batch norms, if they are deferred. `before_loss`, if
    it is set, is called once, with the output and the target of the next loss.
    """

    before_loss: Callable[[Any, Any], None] | None = None

    def __init__(
        self,
        layers: Sequence[nn.Module],
        config: StageConfig,
        tracker: Tracker,
        loss: Loss | None = None,
        copies: Copies | None = None,
    ) -> None:
        self.index, self.device, self.skips = config.index, config.device, config.skips
        self.tracker = tracker
        self._loss = loss
        self._layers = Layers(layers, config, tracker)
        self.layers, self.first = self._layers.modules, config.first
        self.last_layer = self._layers.last_layer
        self.class_of, self.name_of = self._layers.class_of, self._layers.name_of
        self.state_dicts = self._layers.state_dicts
        self.deferred = DeferredBatchNorm(self.layers if config.deferred_batch_norm else ())
        self._buffers = Buffers(self.layers)
        self._borrowing, self._losses = config.borrowing, 0
        self._offload = Offload(self.layers, copies) if copies is not None else None
        self._saved = SavedBuffers(self.layers, config.first, self._offload)
        self._shared = SharedBuffers(self.layers, config.first, config.shared_buffers)
        self._input_changes: bool | None = None
        self._weights = [*nn.ModuleList(self.layers).parameters()]  # each once
        self._trained: list[bool] | None = None  # as the first micro-batch leaves them
        self._local = LocalGradients(self._weights, self._weight_name)
        self._repeated = 0  # forwards that are recomputed
        self._repeated_forwards = RepeatedForwards(self.layers, self._module_name)
        self._version: int | None = None  # of the weights, before forwards that are recomputed
        self.checks_outputs = config.device.type == "cpu"
        """Whether recomputed outputs are compared: other devices have kernels whose bits differ."""
        self._phony = torch.empty(0, device=config.device, requires_grad=True)
        self.step = 0
        """The step that is run, or the one after which there is an evaluation pass."""
        self._loss_scale = 1.0

    def begin(self, step: int, first: int = 0, loss_scale: float = 1.0) -> None:
        """Start a mini-batch, whose first micro-batch has the number `first` within the step.

        The gradient that backward starts from is multiplied by `loss_scale` (fp16).
        """
        self.step = step
        self._loss_scale = loss_scale
        self._layers.begin(step, first)
        self._buffers.begin()
        self._saved.begin()
        self._shared.begin()
        self._trained = self._version = None
        if self._offload is not None:
            self._offload.begin()

    def end(self) -> None:
        """End the mini-batch: deferred batch norms update their statistics.

        Raises:
            UsageError: forwards have changed what all of the mini-batch depends on.
        """
        self._buffers.end()
        self._shared.check(self.step)
        if self._version not in (None, self._weights_version()):
            raise UsageError(
                f"stage {self.index}: weights were changed between a forward and its recompute"
                f"{_CHANGED}"
            )
        if self._trained not in (None, [p.requires_grad for p in self._weights]):
            raise UsageError(
                f"stage {self.index}: a layer has called requires_grad_() behind the first "
                "micro-batch of a mini-batch, and the other forwards come before or after it as "
                "the schedule has them; call it in the first one, or in model()"
            )
        self.deferred.commit()
        self._saved.end()

    def forward(self, mb: MicroBatch) -> None:
        """Run the layers: sets ``outgoing`` and ``departing``, or the loss on the last stage."""
        with self._local.forward(mb):
            self._forward(mb)
        if self._trained is None:
            self._trained = [p.requires_grad for p in self._weights]

    def _forward(self, mb: MicroBatch) -> None:
        if not mb.recompute:
            moves = self._offload.saving(mb) if self._offload and mb.offload else nullcontext()
            with self._saved.forward(mb), moves:
                mb.output = self._run(mb, mb.value, mb.arrived, Phase.FORWARD)
            return
        # The graph of this forward is dropped at once. It is built nevertheless: kernels may depend
        # on grad mode, and only the graph shows which outputs require grad. Its peak memory is
        # that of the recompute.
        inputs, target = (mb.value, mb.arrived, mb.target), mb.target
        if self._input_changes is not False:
            inputs = map_tensors(aligned_copy, inputs)
        before = [*map(versions, inputs)]
        if self._version is None:
            self._version = self._weights_version()
        self._repeated += 1
        mb.is_checked = is_checked(self._repeated, WATCHED)
        with self._buffers.first_forward(mb):
            value, arrived, mb.target = inputs
            output = self._run(mb, value, arrived, Phase.FORWARD)
        self._saved.note_modes(mb)
        if mb.is_checked and self.checks_outputs:
            mb.checksums = checksums(output)
        mb.edges = ()
        changed, mb.target = [*map(versions, inputs)] != before, target
        if self._input_changes is None:
            self._input_changes = changed
        elif changed and not self._input_changes:
            raise UsageError(
                f"stage {self.index}: a layer changed the stage's input in place, or the loss its "
                "target, as none had in the first forward; use --recompute never"
            )

    def recompute(self, mb: MicroBatch) -> None:
        """Run the layers again, and keep what backward needs."""
        self._check_weights(mb)
        with self._buffers.second_forward(mb), self._local.forward(None):
            mb.output = self._run(mb, mb.value, mb.arrived, Phase.RECOMPUTE)
        if mb.checksums and mb.checksums != checksums(mb.output):
            raise UsageError(
                f"stage {self.index}: its output for micro-batch {mb.number} has other numbers in "
                f"the recompute, because a layer{' or the loss' if self._loss else ''} depends on "
                "a value that its forward changes or on a generator of its own; keep tensors in "
                "buffers and draw from torch's generators, or use --recompute never"
            )
        mb.checksums = ()
        mb.outgoing = None
        mb.departing.clear()

    def _weight_name(self, number: int) -> str:
        """Return the name for errors of the parameter with a number within the stage."""
        names = [name for name, _ in nn.ModuleList(self.layers).named_parameters()]
        index, _, name = names[number].partition(".")
        return f"{self.name_of(self.first + int(index))}: {name}"

    def _module_name(self, module: nn.Module) -> str:
        """Return the name for errors of a module of the stage; of another one, its class."""
        for name, one in nn.ModuleList(self.layers).named_modules():
            if one is module:
                index, _, path = name.partition(".")
                layer = self.name_of(self.first + int(index))
                return f"{layer}: {path} ({blame.kind_of(module)})" if path else layer
        return blame.kind_of(module)

    def _weights_version(self) -> int:
        return sum(map(version_of, self._weights))

    def _check_weights(self, mb: MicroBatch) -> None:
        """Reject an update inside a backward, such as a hook's that steps an optimizer."""
        if mb.is_checked and self._version != self._weights_version():
            raise UsageError(
                f"stage {self.index}: weights were changed between the forward of micro-batch "
                f"{mb.number} and its recompute{_CHANGED}"
            )

    def end_action(self, mb: MicroBatch) -> None:
        """End an action: free the memory that was copied to the host beside it."""
        if self._offload is not None:
            self._offload.release_copied(mb)

    def backward(self, mb: MicroBatch) -> None:
        """Accumulate the gradients of weights; sets ``input_gradients``, ``arrived_gradients``."""
        roots, gradients = self._start_backward(mb)
        add_local_gradients(mb, self._loss_scale)
        if roots:
            self._engine(roots, gradients, False, False, (), True, True)
        self._layers.backward_streams.leave()
        self._set_gradients(mb, mb.boundary or None)

    def backward_input(self, mb: MicroBatch) -> None:
        """Run the first half of a split backward: the gradients of the input."""
        roots, gradients = self._start_backward(mb)
        caught = None
        if roots:
            begins, mb.edges = mb.edges, ()
            caught, mb.weight_gradients = split.backward_input(
                roots, gradients, begins, self._engine
            )
        self._layers.backward_streams.leave()
        self._set_gradients(mb, caught)

    def backward_weight(self, mb: MicroBatch) -> None:
        """Run the second half of a split backward: accumulate the gradients of weights."""
        self._layers.enter_backward(mb.number, self.last_layer)
        weight_gradients, mb.weight_gradients = mb.weight_gradients, None
        add_local_gradients(mb, self._loss_scale)
        if weight_gradients is not None:
            weight_gradients.run(self._engine)
        self._layers.backward_streams.leave()

    def _start_backward(
        self, mb: MicroBatch
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Remove the roots of backward and their gradients from the micro-batch."""
        self._layers.enter_backward(mb.number, self.last_layer)
        if mb.offloaded is not None:
            mb.offloaded.arrive()
            mb.offloaded = None
        output, mb.output, mb.value, mb.target = mb.output, None, None, None
        if self._loss is not None:
            if not output.requires_grad:
                raise UsageError(
                    "loss(output, target): depends on no parameter that requires grad; detach it "
                    "nowhere on its way, and leave a parameter unfrozen"
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
                f"stage {self.index}: {plural(len(gradients), 'tensor')} of its output required "
                f"grad in the forward, {len(roots)} in the recompute; have a layer's output "
                "require grad in every forward or in none"
            )
        used = [gradient is not None for gradient in gradients]
        return tuple(compress(roots, used)), tuple(g for g in gradients if g is not None)

    def _engine(self, *arguments: Any) -> Any:
        """Call the autograd engine; attribute an error to the layer that backward was in."""
        try:
            with self._repeated_forwards.undoing():
                return engine(*arguments)
        except BaseException as error:
            blame.blame_user(self._layers.name_of(self.tracker.get().layer), error)

    def _set_gradients(self, mb: MicroBatch, caught: Gradients | None) -> None:
        """Split the gradients of the boundary into those of the input and of what arrived."""
        peers = self.skips.arriving if self.skips is not None else ()
        counts = {peer: sum(mb.arrived[peer][1]) for peer in peers}
        mb.boundary, mb.edges, mb.arrived = None, (), {}
        start = sum(mb.wants_grad)
        caught = caught or [None] * (start + sum(counts.values()))
        mb.input_gradients = caught[:start]
        for peer, count in counts.items():
            mb.arrived_gradients[peer] = caught[start : start + count]
            start += count

    def _run(self, mb: MicroBatch, value: Any, arrived: Arrived, phase: Phase) -> Any:
        """Run all layers, then the loss on the last stage; return the root of backward."""
        wants = mb.wants_grad
        if self.skips is not None:
            value, wants = self._with_arrived(mb, value, arrived)
        if any(wants):
            mb.boundary = []
            value, inside = pass_boundary(value, wants, self._phony, mb.boundary)
            if mb.split_backward:  # before a layer changes them in place
                mb.edges = [get_gradient_edge(tensor) for tensor in inside]
        value = self._run_layers(mb, value, phase)
        if mb.boundary:
            raise UsageError(
                f"stage {self.index}: backward() inside a forward reaches layers of an earlier "
                "stage; detach the input of the layer that calls it"
            )
        output, departing = (value, {}) if self.skips is None else value
        if self._loss is not None:
            self.tracker.set(Phase.LOSS, self.step, mb.number)
            if self.before_loss is not None:
                check, self.before_loss = self.before_loss, None
                check(output, mb.target)
            loss_of = self.loss_of
            self._losses += 1
            if self._borrowing is not None and is_checked(self._losses):
                last = self.layers[-1]
                loss_of = self._borrowing.watching(LOSS, self.last_layer, last, loss_of)
            # The loss draws from the last layer's random stream: both are always on one stage.
            return losses.record(mb, loss_of(output, mb.target))
        mb.outgoing, mb.departing = output, dict(departing)  # the graph keeps its own
        return value

    def _run_layers(self, mb: MicroBatch, value: Any, phase: Phase, *, train: bool = True) -> Any:
        """Run all layers; reject a change in place that another tensor of the input should show."""
        before = versions(value) if mb.common else None
        output = self._layers.run(value, mb.number, phase, train=train)
        if before is not None and versions(value) != before:
            raise UsageError(
                f"stage {self.index}: a layer changes a tensor of the stage's input in place, and "
                f"layer {self.first - 1} returned another one in the same memory, which is apart "
                f"from it here; have layer {self.first - 1} return a copy of one (clone())"
            )
        return output

    def _with_arrived(self, mb: MicroBatch, value: Any, arrived: Arrived) -> tuple[Any, list[bool]]:
        """Pair the input with the skip tensors that arrived, and list which need a gradient."""
        assert self.skips
        tensors: dict[str, torch.Tensor] = {}
        wants = list(mb.wants_grad)
        for peer, names in self.skips.arriving.items():
            found, wanted = arrived[peer]
            tensors.update(zip(names, found, strict=True))
            wants += wanted
        return (value, tensors), wants

    def evaluate(self, mb: MicroBatch, phase: Phase) -> Any:
        """Run the layers in eval mode; return the last stage's output, else set ``outgoing``.

        The number of `mb` counts through the whole evaluation pass.
        """
        value = mb.value if self.skips is None else self._with_arrived(mb, mb.value, mb.arrived)[0]
        value = self._run_layers(mb, value, phase, train=False)
        output, departing = (value, {}) if self.skips is None else value
        if self._loss is not None:
            return output
        mb.outgoing, mb.departing = output, departing
        return None

    def loss_of(self, output: Any, target: Any) -> Any:
        """Return what the job's ``loss`` returns, on the last stage."""
        assert self._loss
        try:
            with self._layers.autocast or nullcontext():
                return self._loss(output, target)
        except BaseException as error:
            last = self.name_of(self.last_layer)
            blame.reject_none(output, last, "loss()", error)
            shown = f"its output was {describe(output)}, its target {describe(target)}"
            blame.blame_user("loss()", error, note=shown)
