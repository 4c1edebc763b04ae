"""A stage: consecutive layers, run forward, again, and backward, a micro-batch at a time.

The graph is cut at the stage's input by :class:`_Boundary`, a function that passes tensors on and
catches their gradients as they are (no accumulation into a leaf, which could change their strides),
and whose outputs may be changed in place by the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from pipeworker.errors import SkipError, UsageError
from pipeworker.wire.messages import Phase
from pipeworker.worker import rng
from pipeworker.worker.batchnorm import DeferredBatchNorm
from pipeworker.worker.losses import Losses
from pipeworker.worker.position import Tracker
from pipeworker.worker.recompute import Buffers
from pipeworker.worker.routes import Skips
from pipeworker.worker.skips import Table
from pipeworker.worker.transport.frame import replica

Loss = Callable[[Any, Any], Any]
_NOTHING: Any = object()
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Boundary(torch.autograd.Function):
    """Pass tensors into the graph of this stage; keep the gradients that come back."""

    @staticmethod
    def forward(
        ctx: Any, phony: torch.Tensor, caught: _Caught, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.caught.gradients = list(gradients)
        return (None, None, *(None for _ in gradients))


# Without Function.apply's care for functorch, whose wrappers no stage is given.
_pass: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Boundary).apply


@dataclass(slots=True)
class _Caught:
    gradients: list[torch.Tensor | None] | None = None


@dataclass(slots=True)
class _Kept:
    """What a stage keeps of one micro-batch until its backward."""

    value: Any
    wants_grad: Sequence[bool]
    target: Any = None
    output: Any = _NOTHING
    caught: _Caught | None = None


class Stage:
    """The layers of one worker.

    Args:
        layers: built, on `device`; `first` is the index of the first one in the whole model.
        loss: on the last stage.
        skips: None when no layer stashes or pops. Else the stage's input is a pair of a value and
            what arrives over skip connections, a dict by name, and its output likewise.
        precision: ``fp32``, or what layers and loss are autocast to, ``bf16`` or ``fp16``.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int,
        *,
        seed: int,
        device: torch.device,
        tracker: Tracker,
        loss: Loss | None = None,
        skips: Skips | None = None,
        precision: str = "fp32",
        deferred_batch_norm: bool = False,
    ) -> None:
        self.layers = list(layers)
        self.first = first
        self.device = device
        self._last_layer = first + len(self.layers) - 1
        self.tracker = tracker
        self._seed = seed
        self._loss = loss
        self.skips = skips
        self._accelerator = rng.accelerator_generator(device)
        self._deferred = DeferredBatchNorm(self.layers) if deferred_batch_norm else None
        self._buffers = Buffers(self.layers)
        self._input_changes: bool | None = None
        self._phony = torch.empty(0, device=device, requires_grad=True)
        self._kept: dict[int, _Kept] = {}
        # Autocast is entered for each layer by itself: it keeps cast weights until it is left, and
        # what shares one must not depend on the grouping.
        self._autocast = autocast(device.type, precision)
        self._step = 0
        self._first = 0
        self._recomputed: frozenset[int] = frozenset()
        self.losses = Losses()
        self.refused = ""
        """What the layer that raised was given."""

    def begin(
        self,
        step: int,
        weights: Sequence[float],
        recomputed: frozenset[int],
        first: int = 0,
        loss_scale: float = 1.0,
    ) -> None:
        """A mini-batch of a step starts.

        Args:
            weights: each micro-batch's share of the samples.
            recomputed: the micro-batches that will be forwarded again before their backward.
            first: the number of the first micro-batch within the step.
            loss_scale: what backward starts from is multiplied by it.
        """
        self._step = step
        self._first = first
        self._recomputed = recomputed
        self.losses = Losses(weights, loss_scale)

    def end(self) -> None:
        """The mini-batch is complete."""
        if self._deferred is not None:
            self._deferred.commit()

    def close(self) -> None:
        """Leave the modules as they were, but for what they have learned."""
        if self._deferred is not None:
            self._deferred.close()

    def put_input(
        self, microbatch: int, value: Any, wants_grad: Sequence[bool], target: Any = None
    ) -> None:
        """Give a micro-batch's input, and on the last stage its target.

        Args:
            wants_grad: which distinct tensors of the input want a gradient.
        """
        self._kept[microbatch] = _Kept(value, wants_grad, target)

    def forward(self, microbatch: int) -> Any:
        """Run the layers; returns the output, and on the last stage records the loss instead."""
        kept = self._kept[microbatch]
        if microbatch not in self._recomputed:
            kept.output = self._run(kept, kept.value, microbatch, Phase.FORWARD)
            return kept.output
        # The graph of this forward is dropped at once. It is built all the same: kernels may depend
        # on grad mode, and which outputs require grad is only known from it. Its peak memory is
        # that of the recompute.
        value = kept.value if self._input_changes is False else _copy(kept.value)
        versions = _versions(value)
        with self._buffers.first_forward(microbatch):
            output = self._run(kept, value, microbatch, Phase.FORWARD)
        if self._input_changes is None:
            self._input_changes = _versions(value) != versions
        elif not self._input_changes and _versions(value) != versions:
            raise UsageError(
                "a layer began to change its stage's input in place after it had not at first; "
                "use --recompute never for such a layer"
            )
        return output

    def recompute(self, microbatch: int) -> None:
        """Run the layers again, this time keeping what backward needs."""
        kept = self._kept[microbatch]
        with self._buffers.second_forward(microbatch):
            kept.output = self._run(kept, kept.value, microbatch, Phase.RECOMPUTE)

    def backward(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Accumulate the gradients of a micro-batch and forget it.

        Args:
            gradients: of the output's distinct tensors that require grad; empty on the last stage.

        Returns:
            The gradients of the input's distinct tensors that want one, None for an unused one.
        """
        kept = self._kept.pop(microbatch)
        self.tracker.set(Phase.BACKWARD, self._step, microbatch, self._last_layer)
        if self._loss is not None:
            root = kept.output
            if not root.requires_grad:
                raise UsageError("the loss does not depend on any parameter that requires grad")
            _backward((root,), (self.losses.gradient(microbatch),))
        else:
            roots = [t for t in distinct_tensors(kept.output) if t.requires_grad]
            if len(roots) != len(gradients):
                raise UsageError(
                    f"{len(gradients)} tensors of the stage's output required grad when they were "
                    f"sent, {len(roots)} when they were recomputed: a layer's output must require "
                    "grad or not whatever happens"
                )
            used = [g is not None for g in gradients]
            if any(used):
                _backward(tuple(compress(roots, used)), tuple(compress(gradients, used)))
        if kept.caught is None or kept.caught.gradients is None:
            return [None for wanted in kept.wants_grad if wanted]
        return kept.caught.gradients

    def _run(self, kept: _Kept, value: Any, microbatch: int, phase: Phase) -> Any:
        """All layers in order, then the loss on the last stage."""
        if any(kept.wants_grad):
            kept.caught = _Caught()
            value = _pass_boundary(value, kept.wants_grad, self._phony, kept.caught)
        value = self._output(value, microbatch, phase)
        if self._loss is None:
            return value
        self.tracker.set(Phase.LOSS, self._step, microbatch)
        # What the loss draws goes on from the last layer's stream: they are always together.
        return self.losses.add(microbatch, self.loss_of(value, kept.target))

    def evaluate(self, microbatch: int, value: Any) -> Any:
        """The output, forward alone, in :func:`eval_mode`.

        Args:
            microbatch: counts through the whole evaluation pass.
        """
        return self._output(value, microbatch, Phase.EVALUATION)

    def loss_of(self, output: Any, target: Any) -> Any:
        """What ``loss`` returns, on the last stage."""
        assert self._loss
        if self._autocast is None:
            return self._loss(output, target)
        with self._autocast:
            return self._loss(output, target)

    def _output(self, value: Any, microbatch: int, phase: Phase) -> Any:
        """Through all layers, with a table of what is stashed where layers stash."""
        if self.skips is None:
            try:
                return self._through_layers(value, microbatch, phase)
            except SkipError as error:
                raise SkipError(
                    f"{error}. No skip connection was planned: import pipeworker at the top of the "
                    "module that has the layers, not inside a function; or give "
                    "pipeworker.Pipeline a sample"
                ) from None
        value, received = value
        table = Table(received)
        with table.active():
            value = self._through_layers(value, microbatch, phase)
        left = table.leave(self.skips.leaving, strict=phase is not Phase.EVALUATION)
        return value if self._loss is not None else (value, left)

    def _through_layers(self, value: Any, microbatch: int, phase: Phase) -> Any:
        step, tracker, last_layer = self._step, self.tracker, self._last_layer
        seed, number = self._seed, self._first + microbatch
        seed_of = rng.evaluation_seed if phase is Phase.EVALUATION else rng.layer_seed
        autocast = self._autocast
        node: Any = None
        try:
            for index, layer in enumerate(self.layers, self.first):
                tracker.set(phase, step, microbatch, index)
                rng.seed_all(seed_of(seed, step, number, index), self._accelerator)
                if autocast is None:
                    value = layer(value)
                else:
                    with autocast:
                        value = layer(value)
                if index != last_layer:
                    node = self._mark(value, node, microbatch, index)
        except Exception:
            self.refused = describe(value)
            raise
        return value

    def _mark(self, value: Any, previous: Any, microbatch: int, layer: int) -> Any:
        """Have backward record that it enters a layer when it reaches the layer's output.

        The last layer needs none: backward begins there.
        """
        tensor = value if isinstance(value, torch.Tensor) else _first_in_graph(value)
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


def _backward(roots: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor | None, ...]) -> None:
    """As torch.autograd.backward, whose checks of shapes cost as much as the call of the engine."""
    Variable._execution_engine.run_backward(
        roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def distinct_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, each once, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found = {id(t): t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)}
    return list(found.values())


def describe(value: Any) -> str:
    """``Tensor[4, 8] float32``, for each tensor of a value."""
    return ", ".join(
        f"Tensor{list(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for t in distinct_tensors(value)
    )


def _copy(value: Any) -> Any:
    copies = {id(tensor): replica(tensor) for tensor in distinct_tensors(value)}
    return replace_tensors(value, copies)


def replace_tensors(value: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """The value with each tensor whose id is a key replaced."""
    if isinstance(value, torch.Tensor):
        return tensors.get(id(value), value)
    return pytree.tree_map_only(torch.Tensor, lambda t: tensors.get(id(t), t), value)


def _versions(value: Any) -> list[int]:
    """Counts of changes in place, by tensor."""
    return [tensor._version for tensor in distinct_tensors(value)]


def _first_in_graph(value: Any) -> torch.Tensor | None:
    return next((t for t in distinct_tensors(value) if t.grad_fn is not None), None)


def _pass_boundary(
    value: Any, wants_grad: Sequence[bool], phony: torch.Tensor, caught: _Caught
) -> Any:
    """The value with the tensors that want a gradient replaced by ones inside the graph."""
    if isinstance(value, torch.Tensor):
        (inside,) = _pass(phony, caught, value)
        return inside
    tensors = distinct_tensors(value)
    chosen = [t for t, wanted in zip(tensors, wants_grad, strict=True) if wanted]
    passed = _pass(phony, caught, *chosen)
    return replace_tensors(value, {id(old): new for old, new in zip(chosen, passed, strict=True)})
