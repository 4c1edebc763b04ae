"""A pass over the layers before the job is planned: what each one stashes and pops.

Shapes are enough to find out, so the pass runs on fake tensors: meta tensors that stand for ones on
the CPU, which more layers accept than bare meta ones. Layers are built one at a time and dropped,
and neither take memory. A model that needs real numbers (a layer that looks at its values) is
surveyed once more with real ones, a micro-batch through one layer after the other.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn

import pipeworker
from pipeworker.errors import SkipError
from pipeworker.host.lifetime import die_with
from pipeworker.host.position import Tracker
from pipeworker.job import file as job_file
from pipeworker.plan.skips import Skip, match
from pipeworker.wire.messages.position import Phase
from pipeworker.worker import blame
from pipeworker.worker.device.device import to_device
from pipeworker.worker.internals import FakeTensorMode, preload, pytree, view_of
from pipeworker.worker.stage import rng, skips
from pipeworker.worker.stage.stage import autocast
from pipeworker.worker.stage.values import distinct_tensors, replace_tensors

log = logging.getLogger(__name__)


def mentions_skips(modules: Iterable[ModuleType]) -> bool:
    """Whether any of the modules imports pipeworker, or stash or pop from it.

    A job that does not needs no survey.
    """
    names = {id(pipeworker), id(skips.stash), id(skips.pop)}
    return any(id(value) in names for module in modules for value in vars(module).values())


class Survey:
    """See the module."""

    def __init__(
        self,
        entries: Sequence[job_file.Entry],
        seed: int,
        device: torch.device,
        precision: str = "fp32",
    ) -> None:
        self._entries = entries
        self._seed = seed
        self._device = device
        self._precision = precision

    def run(self, value: Any, tracker: Tracker) -> tuple[Skip, ...]:
        """The skips of the model.

        Args:
            value: the input of a micro-batch, on the CPU.

        Raises:
            SkipError: stashes and pops do not match.
            Exception: what a layer raises on real numbers; the tracker says which.
        """
        said = _in_a_child(lambda: self._on_fakes(value))
        if "error" in said:  # if the layer is broken, it will say so again
            log.info("the survey needs real numbers: %s", said["error"])
            said = self._pass(to_device(value, self._device), tracker, self._device)
        events = [[(what, name) for what, name in done] for done in said["events"]]
        return match(events, said["classes"])

    def _on_fakes(self, value: Any) -> dict[str, Any]:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            value = pytree.tree_map_only(torch.Tensor, fake.from_tensor, value)
            return self._pass(value, Tracker(), None)

    def _pass(
        self, value: Any, tracker: Tracker, device: torch.device | None
    ) -> dict[str, list[Any]]:
        """What each layer did, up to the first that pops what is not there, and its class."""
        classes: list[str] = []
        events: list[list[tuple[str, str]]] = []
        table = skips.Recorder()
        where = (device or torch.device("cpu")).type
        with table.active():
            for index, entry in enumerate(self._entries):
                table.events = []
                events.append(table.events)
                tracker.set(Phase.BUILDING, layer=index)
                kind = type(entry).__name__ if isinstance(entry, nn.Module) else ""
                with blame.users(f"building {blame.layer(index, kind)}", early=True):
                    layer = self._build(entry, index)
                    if device is not None:
                        layer = layer.to(device)
                classes.append(type(layer).__name__)
                tracker.set(Phase.SURVEY, microbatch=0, layer=index)
                rng.seed_all(rng.layer_seed(self._seed, 0, 0, index))
                try:
                    with autocast(where, self._precision) or nullcontext():
                        value = layer(value)
                except SkipError:
                    break  # what does not match is said when all is known
                except blame.THEIRS as error:
                    who = blame.layer(index, classes[-1])
                    before = blame.layer(index - 1, classes[index - 1])
                    blame.refuse_nothing(value, before, who, error)
                    blame.raised(who, error)
                if device is not None:
                    value = _cut(value)
        classes += [type(entry).__name__ for entry in self._entries[len(classes) :]]
        return {"events": events, "classes": classes}

    def _build(self, entry: job_file.Entry, index: int) -> nn.Module:
        """The layer, or a copy: the one that will train is not touched."""
        if isinstance(entry, nn.Module):
            # A buffer's own deep copy shares its memory, which a fake one does not have.
            return copy.deepcopy(entry, {id(b): b.detach().clone() for b in entry.buffers()})
        rng.seed_all(rng.build_seed(self._seed, index))
        return job_file.build(entry, index)


def _cut(value: Any) -> Any:
    """The value without the graph behind it; the same tensor twice stays one.

    What requires grad still does, and is no leaf, so that a layer may change it in place.
    """
    return replace_tensors(value, {id(t): _without_graph(t) for t in distinct_tensors(value)})


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    fresh = tensor.detach()
    if not tensor.requires_grad:
        return fresh
    return view_of(fresh.requires_grad_())


def _in_a_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do it in a forked process: what the user's code caches there must not reach the training.

    A layer may keep a mask or a table it has made, and a fake one has no memory behind it.
    """
    reads, writes = os.pipe()
    parent = os.getpid()
    preload()  # what fake tensors import as well as an optimizer: once, and not in the child alone
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            die_with(parent)
            os.close(reads)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            torch.set_num_threads(1)  # the pool of threads did not come along
            try:
                said = work()
            except Exception as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            with os.fdopen(writes, "w", encoding="utf-8") as file:
                json.dump(said, file)
            status = 0
        finally:
            os._exit(status)
    os.close(writes)
    with os.fdopen(reads, encoding="utf-8") as file:
        text = file.read()
    os.waitpid(child, 0)
    said = json.loads(text) if text else {"error": "the process that made it ended"}
    return dict(said)


def new_modules(before: Iterable[str]) -> list[ModuleType]:
    """The modules that are imported now and were not before, but for torch's and ours, which come
    when they like."""
    old, others = set(before), ("torch", "pipeworker")
    return [
        module
        for name, module in list(sys.modules.items())
        if name not in old
        and isinstance(module, ModuleType)
        and name.partition(".")[0] not in others
    ]


def modules_of_the_user() -> list[ModuleType]:
    """The modules of a script: all but those of Python, torch and pipeworker."""
    others = {*sys.stdlib_module_names, "torch", "numpy", "pipeworker", "launcher", "cli"}
    return new_modules(name for name in list(sys.modules) if name.partition(".")[0] in others)
