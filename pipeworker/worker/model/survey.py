"""Survey: a pass over the layers before the job is planned, to find what each stashes and pops.

Shapes are enough for it, so the pass runs on fake tensors: meta tensors that stand for CPU tensors,
which more layers accept than bare meta tensors. Layers are built one at a time and dropped; neither
they nor the tensors take memory. A layer may cache a mask or a table, and a fake tensor in a cache
must not reach the training: that pass is made in a process of its own, which loads the job too.

A model that needs real numbers (a layer that branches on values) is surveyed with real tensors, one
micro-batch through one layer after the other. So is the model of a script: only its own process has
it, and a process that has threads by then cannot be forked safely.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

import pipeworker
from pipeworker.errors import SkipError
from pipeworker.facts.connections import Skip
from pipeworker.facts.position import Phase
from pipeworker.host.position import Tracker
from pipeworker.job import file as job_file
from pipeworker.job import layers as job_layers
from pipeworker.plan.skips import match
from pipeworker.worker import blame
from pipeworker.worker.device.device import to_device
from pipeworker.worker.internals import map_tensor_leaves, shared_fake_mode, version_of
from pipeworker.worker.model.lazy import reject_lazy
from pipeworker.worker.profile.outline import Drawing
from pipeworker.worker.stage import rng, skips
from pipeworker.worker.stage.cut.building import copies_of_hollow
from pipeworker.worker.stage.cut.units import computed_attributes
from pipeworker.worker.stage.layers import autocast
from pipeworker.worker.stage.values import map_tensors

log = logging.getLogger(__name__)
Found = dict[str, Any]
"""By layer its class, its stashes and pops, and the names of buffers that its forward may change,
as ``classes``, ``events`` and ``changing``; or an ``error``.

It may have the ``outline`` of the network, the signature of its ``output``, packed, and as
``uncounted`` why the operations of a layer are not counted.
"""


def mentions_skips(modules: Iterable[ModuleType]) -> bool:
    """Return whether any module imports pipeworker, or stash or pop from it; else, no survey."""
    names = {id(pipeworker), id(skips.stash), id(skips.pop)}
    return any(id(value) in names for module in modules for value in vars(module).values())


@dataclass(frozen=True, slots=True)
class Survey:
    """The survey of a model.

    Attributes:
        entries: the layers, or callables that build them.
        device: where real tensors are computed.
        precision: ``fp32``, or ``bf16`` or ``fp16`` for autocast.
        is_cut: whether the layers are those of a cut module, which gets its real input.
    """

    entries: Sequence[job_layers.Entry]
    seed: int
    device: torch.device
    precision: str = "fp32"
    is_cut: bool = False

    def on_real_tensors(self, value: Any, tracker: Tracker) -> Found:
        """Return what a pass on real tensors finds; a layer that is broken raises again.

        Args:
            value: a micro-batch's input on the CPU.
            tracker: gets the layer that is run.

        Raises:
            UserCodeError: a layer raised.
        """
        return self._pass(to_device(value, self.device), tracker, self.device)

    def on_fakes(self, value: Any, drawing: Drawing | None = None) -> Found:
        """Return what a pass on fake tensors finds; they may remain where layers cache them.

        With `drawing` it has the network's outline, or else the reason why it has none.
        """
        try:
            fake, stand_in = shared_fake_mode(), value
            if not self.is_cut:
                stand_in = map_tensor_leaves(fake.from_tensor, value)
            if drawing is not None:
                drawing.begin(value, stand_in)
            with fake:
                found = self._pass(stand_in, Tracker(), None, drawing)
            if drawing is not None and len(found["events"]) == len(self.entries):
                found["outline"], found["output"] = drawing.outline(), drawing.output
        except Exception as error:
            return {"error": blame.problem(error)}
        return found

    def in_order(self, value: Any, tracker: Tracker, drawing: Drawing) -> None:
        """Draw a pass on real tensors; `value` is on the device.

        Raises:
            SkipError: stashes and pops do not match.
            UserCodeError: a layer raised.
        """
        drawing.begin(value, value)
        found = self._pass(value, tracker, self.device, drawing)
        skips_of(found)

    def _pass(
        self,
        value: Any,
        tracker: Tracker,
        device: torch.device | None,
        drawing: Drawing | None = None,
    ) -> Found:
        """Return each layer's class and its stashes and pops, up to the first pop that fails."""
        classes: list[str] = []
        events: list[list[tuple[str, str]]] = []
        changing: list[list[str]] = []
        table = skips.Recorder() if drawing is None else drawing.table
        where = (device or torch.device("cpu")).type
        with table.active():
            for index, entry in enumerate(self.entries):
                events.append(table.begin_layer())
                tracker.set(Phase.BUILDING, layer=index)
                kind = blame.kind_of(entry) if isinstance(entry, nn.Module) else ""
                with blame.user_code(f"building {blame.layer(index, kind)}", early=True):
                    layer = fresh_layer(entry, index, self.seed, real=device is not None)
                    if device is not None:
                        layer = layer.to(device)
                classes.append(blame.kind_of(layer))
                tracker.set(Phase.SURVEY, microbatch=0, layer=index)
                rng.seed_all(rng.layer_seed(self.seed, 0, 0, index))
                buffers = _states(layer)
                try:
                    with autocast(where, self.precision) or nullcontext():
                        value = drawing.call(index, layer, value) if drawing else layer(value)
                except SkipError:
                    break  # the match of all events reports it
                except BaseException as error:
                    name = blame.layer(index, classes[-1])
                    before = blame.layer(index - 1, classes[index - 1])
                    blame.reject_none(value, before, name, error)
                    blame.blame_user(name, error)
                changing.append(_changed(buffers, _states(layer)))
                if device is not None:
                    value = map_tensors(_without_graph, value)
                    table.replace(_without_graph)
        classes += [type(entry).__name__ for entry in self.entries[len(classes) :]]
        return {"events": events, "classes": classes, "changing": changing}


def skips_of(found: Found) -> tuple[Skip, ...]:
    """Return the skip connections of a model.

    Raises:
        SkipError: stashes and pops do not match.
    """
    return match(found["events"], found["classes"])


def fresh_layer(entry: job_layers.Entry, index: int, seed: int, *, real: bool = True) -> nn.Module:
    """Build or copy a layer: the layer that will train must not change.

    A callable may return the same module each time, for example one of a pretrained network, so
    that what it returns is copied too, if it can be. With `real`, parameters without memory get
    some; without it, the process does not train.
    """
    if isinstance(entry, nn.Module):
        return _copied(entry, real=real)
    rng.seed_all(rng.build_seed(seed, index))
    built = job_layers.build(entry, index)
    reject_lazy(built, index)
    if not real:
        return built
    try:
        return _copied(built, real=True)
    except Exception as error:  # it holds an object that cannot be copied, as a lock
        log.info("layer %d is not copied: %s", index, blame.problem(error))
        return built


def _copied(layer: nn.Module, *, real: bool) -> nn.Module:
    # A buffer's own deep copy shares its memory, and a fake buffer has none.
    memo: dict[int, Any] = {id(b): b.detach().clone() for b in layer.buffers()}
    memo |= computed_attributes(layer)
    return copy.deepcopy(layer, memo | copies_of_hollow(layer, real=real))


_States = dict[str, tuple[torch.Tensor, int]]
"""The buffers of a layer by name, and the version of each."""


def _states(layer: nn.Module) -> _States:
    named = layer.named_buffers(remove_duplicate=False)
    return {name: (buffer, version_of(buffer)) for name, buffer in named}


def _changed(before: _States, after: _States) -> list[str]:
    """Return the buffers of each module of which one was assigned or changed in place.

    A change of the module's other buffers may leave no trace in their version, as of the statistics
    of a batch norm, which counts its forwards too.
    """
    absent = (None, 0)
    modules = {
        name.rpartition(".")[0]
        for name in before.keys() | after.keys()
        for (old, version), (new, now) in [(before.get(name, absent), after.get(name, absent))]
        if old is not new or version != now
    }
    return [name for name in before if name.rpartition(".")[0] in modules]


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Drop the graph behind a tensor.

    A tensor that requires grad still does, and is no leaf, so that a layer may change it in place.
    """
    fresh = tensor.detach()
    return fresh.requires_grad_().clone() if tensor.requires_grad else fresh


def modules_of_the_user() -> list[ModuleType]:
    """Return the modules of a script: all but those of Python, torch, NumPy and pipeworker."""
    others = {*sys.stdlib_module_names, "torch", "numpy", "pipeworker", "launcher", "cli"}
    names = [name for name in list(sys.modules) if name.partition(".")[0] not in others]
    return job_file.user_modules(names)
