"""The facts of layers on one worker: what it computes on, and what the coordinator asks for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import nn

from pipeworker.errors import PipeworkerError, ProcError
from pipeworker.facts.layer_facts import LayerFacts
from pipeworker.facts.outline import LayerKind, Machine, Outline
from pipeworker.facts.position import Phase
from pipeworker.host import cgroups
from pipeworker.job import file as job_file
from pipeworker.wire.messages.profile import Measure, Measured
from pipeworker.worker import blame
from pipeworker.worker.data.generators import preserve_generators_of
from pipeworker.worker.device.device import Stopwatch, to_device, unit_of, used_memory
from pipeworker.worker.internals import is_fake
from pipeworker.worker.loaded_worker import LoadedWorker
from pipeworker.worker.model.model import Model
from pipeworker.worker.model.survey import Found, Survey, fresh_layer
from pipeworker.worker.profile.alike import name_of, surroundings
from pipeworker.worker.profile.measure import LayerCall, Settings, measure_layer, measure_loss
from pipeworker.worker.profile.meters import stopwatch_of_layers
from pipeworker.worker.profile.outline import Drawing, with_loss
from pipeworker.worker.profile.signature import ValueSignature
from pipeworker.worker.stage import rng
from pipeworker.worker.stage.layers import StageConfig, reporting_compilation
from pipeworker.worker.stage.values import bytes_of, distinct_tensors
from pipeworker.worker.transport.structure import TypeRegistry

log = logging.getLogger(__name__)
_WORK = 192
"""Rows and columns of the matrices whose product is the work by which workers are compared."""
_PRODUCTS, _TIMES = 8, 7
_LIBRARIES = 10 << 20
"""Bytes of torch's libraries that are read from files when the first step calls them."""
_BUDGET, _ALL_REPEATS = 0.05, 0.4
"""Seconds in which repeats of one kind of layers, and of all that a worker measures, begin."""


def machine_of(device: torch.device, entries: Iterable[Any]) -> Machine:
    """Return what this worker computes on; `entries` are the layers that it holds by now.

    Raises:
        ProcError: the size of the host's memory cannot be read.
    """
    if device.type == "cpu":
        tensors = [
            tensor
            for entry in entries
            if isinstance(entry, nn.Module)
            for tensor in (*entry.parameters(), *entry.buffers())
            if not is_fake(tensor)
        ]
        try:
            memory = psutil.virtual_memory().total
        except OSError as error:
            raise ProcError(error) from None
        limit = min(memory, cgroups.memory_limit() or sys.maxsize)
        base = max(0, used_memory(device) - bytes_of(tensors)) + _LIBRARIES
        return Machine(name_of(device), "", limit, base)
    module = torch.get_device_module(device.type)
    info, reserved = (getattr(module, n, None) for n in ("mem_get_info", "memory_reserved"))
    limit = 0
    if info is not None and reserved is not None:
        free, _ = info(device)
        limit = free + reserved(device)  # what its allocator, whose peak counts, may use
    return Machine(name_of(device), unit_of(device), limit)


def surroundings_of(loaded: LoadedWorker) -> str:
    """Return a digest of what the costs of this job's layers depend on besides the layers."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    path = loaded.path or (Path(main) if main else None)
    sources = job_file.source_digests(path, loaded.modules()) if path else ()
    return surroundings(loaded.role.options, loaded.device, sources)


def outline_of(found: Found, loaded: LoadedWorker) -> tuple[Outline | None, str]:
    """Return the outline that a survey on fake tensors has drawn, and why that or counts lack."""
    problem = str(found.get("error", found.get("uncounted", "")))
    if "outline" in found:
        try:
            return _complete(found["outline"], found["output"], loaded), problem
        except PipeworkerError as error:
            problem = str(error)
    log.info("no outline of the network: %s", problem or "it was not surveyed")
    return None, problem


def _complete(outline: Outline, output: bytes, loaded: LoadedWorker) -> Outline:
    batch = loaded.reader.peek()
    return with_loss(outline, output, batch.targets[0], batch.batch)


def measure(
    loaded: LoadedWorker, model: Model, types: dict[str, type], request: Measure
) -> Measured:
    """Measure kinds of layers, each by itself; a kind that raises is left out.

    `types` are the classes that may pass between layers. The process's random numbers are as
    before, and so are the layers of the model and the generators of the user's modules. Graphs that
    the user's own ``torch.compile`` has made are dropped.
    """
    options = loaded.role.options
    with ExitStack() as stack:
        stack.enter_context(rng.preserve_generators())
        stack.enter_context(preserve_generators_of(loaded.modules()))
        watch = stack.enter_context(stopwatch_of_layers(loaded.device))
        if options.compile:
            stack.enter_context(reporting_compilation(loaded.settings.tracker))
        bench = _Bench(loaded, model, types, watch)
        outline = bench.run_in_order() if request.in_order else None
        if outline is None:
            bench.measure(request.kinds, request.types)
        reference = _reference(loaded.device, watch) if request.reference else 0.0
    if not options.compile and "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # graphs of layers that a user compiles depend on earlier calls
    module: Any = torch.get_device_module(loaded.device.type)
    for name in ("empty_cache", "reset_peak_memory_stats"):  # the peak is to be that of training
        getattr(module, name, lambda: None)()
    digests, facts = tuple(bench.found), tuple(bench.found.values())
    return Measured(loaded.role.rank, digests, facts, outline, bench.problem, reference)


class _Bench:
    """Layers of a model, measured one after the other.

    Attributes:
        found: facts by digest.
        problem: why a kind has none; "" if all have.
    """

    def __init__(
        self, loaded: LoadedWorker, model: Model, types: dict[str, type], watch: Stopwatch
    ) -> None:
        self._loaded, self._model, self._types, self._watch = loaded, model, types, watch
        self._tracker, self._device = loaded.settings.tracker, loaded.device
        self._settings = Settings(loaded.job, StageConfig.of(loaded.role.options, loaded.device))
        self.found: dict[str, LayerFacts] = {}
        self.problem = ""

    def measure(self, kinds: Sequence[LayerKind], names: Sequence[str]) -> None:
        """Measure kinds; `names` are the classes that are numbers in their signatures."""
        self._divide_time(len(kinds))
        for kind in kinds:
            self._tracker.set(Phase.MEASURING, layer=min(kind.layer, len(self._model.entries) - 1))
            self._note(kind, partial(self._facts, kind, names))

    def run_in_order(self) -> Outline | None:
        """Run the network on its real input, and measure its kinds; return its outline."""
        options, model = self._loaded.role.options, self._model
        around = surroundings_of(self._loaded)
        drawing = Drawing(self._types, around, model.ties(), self._examine, reuses=False)
        survey = Survey(model.entries, options.seed, self._device, options.precision)
        self._divide_time(len(model.entries))
        try:
            survey.in_order(self._input(), self._tracker, drawing)
            outline = _complete(drawing.outline(), drawing.output, self._loaded)
        except Exception as error:
            self.problem = self.problem or blame.problem(error)
            log.info("the network cannot be run: %s", self.problem)
            return None
        self._divide_time(1)
        loss, tensors = outline.kinds[outline.loss], distinct_tensors(drawing.last)
        wants_grad = [tensor.requires_grad for tensor in tensors]
        self._note(loss, partial(self._loss_facts, drawing.last, wants_grad))
        return outline

    def _divide_time(self, count: int) -> None:
        """Divide the time for repeats among a number of kinds."""
        budget = min(_BUDGET, _ALL_REPEATS / max(1, count))
        self._settings = replace(self._settings, budget=budget)

    def _examine(self, kind: LayerKind, layer: nn.Module, call: LayerCall) -> LayerKind:
        self._note(kind, lambda: measure_layer(lambda: layer, call, self._settings, self._watch))
        return kind

    def _facts(self, kind: LayerKind, names: Sequence[str]) -> LayerFacts:
        registry = TypeRegistry(self._types[name] for name in names)
        signature = ValueSignature.unpack(kind.input)
        value = signature.make(registry, self._device, self._known())
        if kind.layer == len(self._model.entries):
            return self._loss_facts(value, signature.wants_grad)
        popped: dict[str, tuple[torch.Tensor, bool]] = {}
        if kind.popped:
            skips = ValueSignature.unpack(kind.popped)
            tensors = skips.make(registry, self._device)
            pairs = zip(tensors.values(), skips.wants_grad, strict=True)
            popped = dict(zip(tensors, pairs, strict=True))
        call = LayerCall(
            kind.layer, value, signature.wants_grad, popped, kind.stashed, kind.uses_skips
        )
        entry, seed = self._model.entries[kind.layer], self._settings.stage.seed
        return measure_layer(
            lambda: fresh_layer(entry, kind.layer, seed).to(self._device),
            call,
            self._settings,
            self._watch,
        )

    def _loss_facts(self, output: Any, wants_grad: Sequence[bool]) -> LayerFacts:
        self._tracker.set(Phase.MEASURING, layer=len(self._model.entries) - 1)
        target = to_device(self._loaded.reader.peek().targets[0], self._device)
        return measure_loss(output, wants_grad, target, self._settings, self._watch)

    def _input(self) -> Any:
        return to_device(self._loaded.reader.peek().inputs[0], self._device)

    def _known(self) -> list[torch.Tensor]:
        """Return the tensors of the network's input, on the worker that has them."""
        role = self._loaded.role
        return distinct_tensors(self._input()) if role.rank == role.placement.rank_of(0) else []

    def _note(self, kind: LayerKind, facts: Callable[[], LayerFacts]) -> None:
        """Note the facts of a kind, or else why it has none."""
        try:
            self.found[kind.digest] = facts()
        except Exception as error:
            self.problem = blame.problem(error)
            if not isinstance(error, blame.UserCodeError):
                is_loss = kind.layer == len(self._model.entries)
                self.problem = f"{'loss()' if is_loss else f'layer {kind.layer}'}: {self.problem}"
            log.info("cannot be measured: %s", self.problem)


def _reference(device: torch.device, watch: Stopwatch) -> float:
    """Return the seconds of a fixed work, by which unlike devices are compared."""
    one = torch.ones(_WORK, _WORK, device=device)
    found = []
    for _ in range(_TIMES):
        begin = watch.mark()
        for _ in range(_PRODUCTS):
            one @ one
        found.append(watch.seconds([begin, watch.mark()]))
    return median(found[1:])
