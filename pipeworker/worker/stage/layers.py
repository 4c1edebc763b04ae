"""The layers of a stage, run in order for one micro-batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeworker.errors import PipeworkerError, SkipError
from pipeworker.facts.position import Phase, Position
from pipeworker.host.position import Tracker
from pipeworker.job.options import Options
from pipeworker.plan.ties import MODEL
from pipeworker.worker import blame
from pipeworker.worker.internals import (
    alias_of,
    allow_any_number_of_graphs,
    apply_of,
    calling_around_compilations,
    has_hooks,
)
from pipeworker.worker.stage import rng
from pipeworker.worker.stage.backward_streams import BackwardStreams
from pipeworker.worker.stage.borrowed import Borrowing
from pipeworker.worker.stage.cut.part import Part
from pipeworker.worker.stage.shared_buffers import BufferPlace
from pipeworker.worker.stage.skips import StageSkips, Table
from pipeworker.worker.stage.values import (
    describe,
    distinct_tensors,
    is_checked,
    is_dense,
    replace_tensors,
)
from pipeworker.worker.transport.layout import have_common_elements

Backend = Callable[..., Any]
_KERNELS = "inductor"
"""The backend of ``torch.compile`` that generates kernels."""


def compiled(
    layers: Sequence[Callable[..., Any]], backend: str | Backend
) -> list[Callable[[Any], Any]]:
    """Return a function to call in place of each layer, compiled by itself.

    No kernel spans two layers, so no kernel depends on how layers are grouped into stages. Nor does
    a kernel depend on what was compiled before: each shape has a graph of its own (torch turns to
    dynamic shapes when a second layer of a class has other sizes), and there is no limit of graphs
    after which layers run uncompiled. Equal layers share a graph; the workers of a host share
    torch's cache.
    """
    return [partial(_call, torch.compile(one, backend=backend, dynamic=False)) for one in layers]


def reporting_compilation(tracker: Tracker) -> AbstractContextManager[None]:
    """Report compilation, which may take minutes, as the worker's phase inside the context."""
    at: Position | None = None

    def start(_: Any) -> None:
        nonlocal at
        if not tracker.waiting:  # else no layer of the stage is compiled
            at = tracker.get()
            tracker.set(Phase.COMPILING, at.step, at.microbatch, at.layer)

    def end(_: Any) -> None:
        nonlocal at
        if at is not None:
            tracker.set(at.phase, at.step, at.microbatch, at.layer)
            at = None

    return calling_around_compilations(start, end)


_thread = threading.local()


def _call(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not hasattr(_thread, "ready"):  # torch's configuration is per thread
        allow_any_number_of_graphs()
        _thread.ready = True
    return layer(*args, **kwargs)


class _Passed(torch.autograd.Function):
    """Pass a tensor from one layer to the next as the boundary of a stage does, not as a view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return gradient


_pass: Callable[[torch.Tensor], torch.Tensor] = apply_of(_Passed)
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class StageConfig:
    """The settings of a stage.

    Attributes:
        first: index of its first layer in the whole model.
        class_before: class of the layer before its first one, if it is known.
        skips: its skip connections; None when none of its layers stashes or pops.
        precision: ``fp32``, or ``bf16`` or ``fp16``: layers and loss run under autocast.
        deferred_batch_norm: update running statistics once a mini-batch.
        compiler: a backend of ``torch.compile`` for the layers; None to run them as they are.
        borrowing: looks for parameters that layers use and do not have: at the first forward, the
            second one, the fourth and so on.
        shared_buffers: the names of buffers that other stages have too, by place.
    """

    index: int
    first: int
    seed: int
    device: torch.device
    class_before: str = ""
    skips: StageSkips | None = None
    precision: str = "fp32"
    deferred_batch_norm: bool = False
    compiler: str | None = None
    borrowing: Borrowing | None = None
    shared_buffers: Mapping[BufferPlace, str] = field(default_factory=dict)

    @staticmethod
    def of(options: Options, device: torch.device) -> StageConfig:
        """Return the settings that a job gives to each of its stages."""
        return StageConfig(
            index=0,
            first=0,
            seed=options.seed,
            device=device,
            precision=options.precision,
            deferred_batch_norm=options.deferred_batch_norm,
            compiler=_KERNELS if options.compile else None,
        )


class Layers:
    """Consecutive layers of a model, run under their seeds; what they raise is named."""

    def __init__(self, modules: Sequence[nn.Module], config: StageConfig, tracker: Tracker) -> None:
        self.modules = list(modules)
        self.first = config.first
        self.last_layer = config.first + len(self.modules) - 1
        # Autocast keeps the weights that it has cast until it is left. It is entered for each layer
        # by itself, because layers that share a weight must not depend on their grouping.
        self.autocast = autocast(config.device.type, config.precision)
        self._class_before = config.class_before
        self._seed, self._skips = config.seed, config.skips
        departing = config.skips.departing.values() if config.skips else ()
        self._leaving = [name for names in departing for name in names]
        self._tracker = tracker
        self._accelerator = rng.accelerator_generator(config.device)
        called: Sequence[Callable[..., Any]] = self.modules
        self._parts = [one for one in self.modules if isinstance(one, Part)]
        if self._parts:
            called = [part.call for part in self._parts]
        self._calls = called
        if config.compiler:
            self._calls = compiled(called, config.compiler)
        self._borrowing, self._forwards = config.borrowing, 0
        self.backward_streams = BackwardStreams(config.seed, self._accelerator)
        self._step = 0
        self._number = 0
        self._nodes: Sequence[Any] = ()
        """The nodes of the last layer's outputs, in the forward that runs."""

    def begin(self, step: int, first: int) -> None:
        """Start a mini-batch, whose first micro-batch has the number `first` within the step."""
        self._step, self._number = step, first

    def class_of(self, layer: int) -> str:
        """Return the class of a layer of this stage, else ""."""
        offset = layer - self.first
        return blame.kind_of(self.modules[offset]) if 0 <= offset < len(self.modules) else ""

    def name_of(self, layer: int) -> str:
        """Return how messages name a layer: its index and class."""
        return blame.layer(layer, self.class_of(layer))

    def state_dicts(self) -> list[dict[str, Any]]:
        """Return the state dict of each layer, in order."""
        found = []
        for index, layer in enumerate(self.modules, self.first):
            with blame.user_code(f"state_dict() of {self.name_of(index)}"):
                found.append(layer.state_dict())
        return found

    def run(self, value: Any, microbatch: int, phase: Phase, *, train: bool) -> Any:
        """Run all layers for one micro-batch of the mini-batch or of an evaluation pass.

        With skip connections `value` is a pair of the input and the received tensors, and so is the
        result of the output and the tensors to send. With `train`, every planned skip tensor is
        required.
        """
        try:
            if self._skips is None:
                return self._run(value, microbatch, phase, train)
            value, received = value
            table = Table(received)
            with table.active():
                value = self._run(value, microbatch, phase, train)
            left = table.leave(self._leaving, strict=train)
        except SkipError as error:
            hint = (
                ". No skip connection was planned: import pipeworker at the top of the module that "
                "has the layers, not inside a function; or pass a sample to pipeworker.Pipeline"
            )
            shown = SkipError(f"{error}{'' if self._skips else hint}")
            shown.in_step = True
            raise shown from None
        finally:
            self._nodes = ()
        return value, left

    def _run(self, value: Any, microbatch: int, phase: Phase, train: bool) -> Any:
        if self._parts:
            return self._run_cut(value, microbatch, phase, train)
        step, tracker, last_layer = self._step, self._tracker, self.last_layer
        seed, number = self._seed, self._number + microbatch
        autocast = self.autocast
        seed_of = rng.layer_seed if train else rng.evaluation_seed
        calls = self._calls
        if self._borrowing is not None and self._is_watched(train):
            calls = [*self._watching(self._borrowing)]
        for index, layer in enumerate(calls, self.first):
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
            except BaseException as error:
                name = self.name_of(index)
                before = blame.layer(index - 1, self.class_of(index - 1) or self._class_before)
                blame.reject_none(value, before, name, error)
                blame.blame_user(name, error, note=f"its input was {describe(value)}")
            if index != last_layer:
                value = self._marked(value, microbatch, index)
        return value

    def _is_watched(self, train: bool) -> bool:
        """Return whether borrowed parameters are looked for in the forward that begins."""
        self._forwards += train
        return train and is_checked(self._forwards)

    def _watching(self, borrowing: Borrowing) -> Iterator[Callable[..., Any]]:
        """Yield the calls of the layers as functions that look for what they use."""
        called = zip(self.modules, self._calls, strict=True)
        for index, (layer, call) in enumerate(called, self.first):
            yield borrowing.watching(self.name_of(index), index, layer, call)

    def _run_cut(self, value: Any, microbatch: int, phase: Phase, train: bool) -> Any:
        """Run the layers of a cut module in one run of its own forward."""
        at, number = self.first, self._number + microbatch
        seed_of = rng.layer_seed if train else rng.evaluation_seed
        run: Callable[..., Any] = self._parts[0].cut.run
        calls = self._calls
        if self._borrowing is not None and self._is_watched(train):
            every = nn.ModuleList([*self.modules, self._parts[0].cut.module])
            run = self._borrowing.watching(MODEL, self.first, every, run)
            check = self._borrowing.checking_gradients
            calls = [check(self.name_of(i), one) for i, one in enumerate(calls, self.first)]

        def enter(layer: int) -> None:
            nonlocal at
            if layer >= self.first:
                at = layer
                self._tracker.set(phase, self._step, microbatch, layer)
            rng.seed_all(seed_of(self._seed, self._step, number, layer), self._accelerator)

        def leave(layer: int, out: Any) -> Any:
            if self.autocast is not None:
                torch.clear_autocast_cache()
            return out if layer == self.last_layer else self._marked(out, microbatch, layer)

        try:
            with self.autocast or nullcontext():
                return run(self._parts, calls, value, enter, leave)
        except PipeworkerError:
            raise
        except BaseException as error:
            blame.blame_user(self.name_of(at), error)

    def _marked(self, value: Any, microbatch: int, layer: int) -> Any:
        """Make backward record that it enters a layer when it reaches one of the layer's outputs.

        The last layer needs no mark: backward begins there. Outputs that the layer returns as it
        got them have nodes of the previous layer's outputs, and are not its own. Torch calls hooks
        of a tensor before those of its node, and hooks of the layer may draw random numbers. So
        another tensor, whose node has the mark, replaces an output with hooks, and the next layer's
        hooks are on that one.

        Returns:
            The outputs for the next layer.
        """
        previous, nodes = self._nodes, []
        tensors = distinct_tensors(value)
        hooked: set[int] = set()
        if torch.is_grad_enabled():
            hooked = {id(t) for t in tensors if has_hooks(t) and is_dense(t)}
        # A change in place of a view drops its node. So a view is only for tensors that share
        # memory, which the next layer cannot change in place on another stage.
        shares = hooked and have_common_elements([*filter(is_dense, tensors)])
        passed = alias_of if shares else _pass
        replaced: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            node = tensor.grad_fn
            if id(tensor) in hooked:
                replaced[id(tensor)] = new = passed(tensor)
                node = new.grad_fn
            if node is not None:
                nodes.append(node)
                if node not in previous:
                    node.register_prehook(lambda _: self.enter_backward(microbatch, layer))
        self._nodes = nodes
        return replace_tensors(value, replaced)

    def enter_backward(self, microbatch: int, layer: int) -> None:
        """Note that the backward of a micro-batch has come to a layer, and seed what it draws."""
        self._tracker.set(Phase.BACKWARD, self._step, microbatch, layer)
        self.backward_streams.enter(self._step, self._number + microbatch, layer)


def autocast(device_type: str, precision: str) -> torch.autocast | None:
    """Return the autocast context of a precision; None for fp32."""
    if precision not in _AUTOCAST:
        return None
    return torch.autocast(device_type, _AUTOCAST[precision])
