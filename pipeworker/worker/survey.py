"""A pass over the layers before the job is planned: what each one stashes and pops.

Shapes are enough to find out, so the pass runs on fake tensors: meta tensors that stand for ones on
the CPU, which more layers accept than bare meta ones. Layers are built one at a time and dropped,
and neither take memory. A model that needs real numbers (a layer that looks at its values) is
surveyed once more with real ones, a micro-batch through one layer after the other.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import pipeworker
from pipeworker.errors import SkipError
from pipeworker.job import file as job_file
from pipeworker.plan.skips import Skip, match
from pipeworker.wire.messages import Phase
from pipeworker.worker import rng, skips
from pipeworker.worker.data import to_device
from pipeworker.worker.position import Tracker


def mentions_skips(modules: Iterable[ModuleType]) -> bool:
    """Whether any of the modules imports pipeworker, or stash or pop from it.

    A job that does not needs no survey.
    """
    names = {id(pipeworker), id(skips.stash), id(skips.pop)}
    return any(id(value) in names for module in modules for value in vars(module).values())


class Survey:
    """See the module."""

    def __init__(self, entries: Sequence[job_file.Entry], seed: int, device: torch.device) -> None:
        self._entries = entries
        self._seed = seed
        self._device = device

    def run(self, value: Any, tracker: Tracker) -> tuple[Skip, ...]:
        """The skips of the model.

        Args:
            value: the input of a micro-batch, on the CPU.

        Raises:
            SkipError: stashes and pops do not match.
            Exception: what a layer raises on real numbers; the tracker says which.
        """
        try:
            return self._pass(value, FakeTensorMode(allow_non_fake_inputs=True), Tracker())
        except SkipError:
            raise
        except Exception as error:  # if the layer is broken, it will say so again
            print(f"the survey needs real numbers: {type(error).__name__}: {error}", flush=True)
            return self._pass(to_device(value, self._device), None, tracker)

    def _pass(self, value: Any, fake: FakeTensorMode | None, tracker: Tracker) -> tuple[Skip, ...]:
        classes: list[str] = []
        events: list[list[tuple[str, str]]] = []
        table = skips.Recorder()
        if fake is not None:
            value = pytree.tree_map_only(torch.Tensor, fake.from_tensor, value)
        with fake or nullcontext(), table.active():
            for index, entry in enumerate(self._entries):
                table.events = []
                events.append(table.events)
                classes.append(type(entry).__name__)
                tracker.set(Phase.BUILDING, layer=index)
                layer = self._build(entry, index)
                if fake is None:
                    layer = layer.to(self._device)
                classes[-1] = type(layer).__name__
                tracker.set(Phase.FORWARD, 0, 0, index)
                rng.seed_all(rng.layer_seed(self._seed, 0, 0, index))
                try:
                    value = layer(value)
                except SkipError:
                    match(events, classes)  # says which layer
                    raise
        return match(events, classes)

    def _build(self, entry: job_file.Entry, index: int) -> nn.Module:
        """The layer, or a copy: the one that will train is not touched."""
        if isinstance(entry, nn.Module):
            return copy.deepcopy(entry)
        rng.seed_all(rng.build_seed(self._seed, index))
        return job_file.build(entry, index)


def new_modules(before: Iterable[str]) -> list[ModuleType]:
    """The modules that are imported now and were not before."""
    old = set(before)
    return [module for name, module in list(sys.modules.items()) if name not in old]
