"""The job's model as a worker meets it: described as a whole, built in part."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipeworker.errors import UsageError
from pipeworker.host.position import Tracker
from pipeworker.job import file as job_file
from pipeworker.job.file import Job
from pipeworker.plan.skips import Skip
from pipeworker.plan.ties import Tie, declared, layer_of
from pipeworker.wire.messages.position import Phase
from pipeworker.worker import blame
from pipeworker.worker.model.survey import Survey
from pipeworker.worker.stage import rng
from pipeworker.worker.update.ties import Ties, separate, shared_parameters

_DIGESTED = 16
"""Elements of each parameter that the digest of the initial weights looks at."""
_NOT_BUILT = "?"


class Model:
    """The layers of a job, those given as callables not yet built.

    Raises:
        UsageError: ``model`` gave something that is not a sequence of layers.
    """

    def __init__(self, job: Job, seed: int, device: torch.device, tracker: Tracker) -> None:
        self._seed = seed
        self._device = device
        self._tracker = tracker
        tracker.set(Phase.BUILDING)
        rng.seed_all(seed, rng.accelerator_generator(device))
        try:
            named = job_file.entries(job)
        except blame.THEIRS as error:
            blame.raised("model()", error, early=True, note=_hint(error))
        self.names = tuple(named)
        """Of the layers, in the user's module."""
        self._entries = list(named.values())
        self._declared = job.tied

    @property
    def classes(self) -> tuple[str, ...]:
        """The class of each layer, or ``"?"`` for one that is not built yet."""
        return tuple(
            type(entry).__name__ if isinstance(entry, nn.Module) else _NOT_BUILT
            for entry in self._entries
        )

    def class_of(self, layer: int) -> str:
        """The class of a layer; empty where it is not known."""
        classes = self.classes
        return classes[layer].replace(_NOT_BUILT, "") if 0 <= layer < len(classes) else ""

    def ties(self) -> tuple[Tie, ...]:
        """Parameters that are one object in several layers, and those the job declares."""
        found = [*shared_parameters(self._entries), *self._declared]
        return declared(found, len(self._entries))

    def digest(self) -> int:
        """Equal for equal initial weights of the layers that are there, as far as it looks."""
        digest = 0
        for entry in self._entries:
            for parameter in entry.parameters() if isinstance(entry, nn.Module) else ():
                if not (parameter.is_meta or nn.parameter.is_lazy(parameter)):
                    some = parameter.detach().reshape(-1)[:_DIGESTED].cpu()
                    digest = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), digest)
        return digest

    def skips(self, value: Any, precision: str) -> tuple[Skip, ...]:
        """The skip connections between layers.

        Args:
            value: the input of a micro-batch, on the CPU.

        Raises:
            SkipError: stashes and pops do not match.
        """
        survey = Survey(self._entries, self._seed, self._device, precision)
        return survey.run(value, self._tracker)

    def build(
        self,
        first: int,
        stop: int,
        stage: int,
        tied: Sequence[Tie],
        held: Collection[int] = (),
    ) -> tuple[list[nn.Module], Ties | None]:
        """The layers ``first`` to ``stop - 1``, on the device.

        Args:
            tied: the weights that have a place on `stage`.
            held: the stages of this worker.

        Raises:
            UsageError: layers share what stages cannot.
            Raised: what building a layer raised.
        """
        later = [name for tie in tied for name in tie.names[1:]]
        layers = []
        for index in range(first, stop):
            names = [name for name in later if layer_of(name) == index]
            layers.append(self._build(index, names, self._device))
        job_file.check_buffers(self._entries, first, stop)
        ties = None
        if tied:
            mine = dict(enumerate(layers, first))
            ties = Ties(stage, tied, mine, lambda index: self._build(index, (), None), held)
        _check_apart(layers, first)
        _check_sizes(layers, first)
        return layers, ties

    def forget(self) -> None:
        """All stages of the worker are built: the other layers are let go."""
        self._entries = []

    def _build(self, index: int, tied: Sequence[str], device: torch.device | None) -> nn.Module:
        """A layer, with objects of its own for the parameters of these names."""
        self._tracker.set(Phase.BUILDING, layer=index)
        entry = self._entries[index]
        with blame.users(f"building {blame.layer(index, self.class_of(index))}", early=True):
            if not isinstance(entry, nn.Module):
                seed = rng.build_seed(self._seed, index)
                rng.seed_all(seed, rng.accelerator_generator(self._device))
                built = job_file.build(entry, index)
            elif tied:
                built = separate(entry, [name.partition(".")[2] for name in tied])
            else:
                built = entry
            return built if device is None else built.to(device)


def _hint(error: BaseException) -> str:
    """What to do where torch does not say it."""
    if isinstance(error, TypeError) and "is not a Module subclass" in str(error):
        return "layers are instances: nn.ReLU(), neither nn.ReLU nor torch.relu"
    return ""


def _check_sizes(layers: Sequence[nn.Module], first: int) -> None:
    """A layer that gets its sizes from its first input has no parameters for an optimizer yet."""
    for index, layer in enumerate(layers, first):
        if any(map(is_lazy, (*layer.parameters(), *layer.buffers()))):
            named = blame.layer(index, type(layer).__name__)
            raise UsageError(f"{named} has parameters without sizes: give them when it is built")


def _check_apart(layers: Sequence[nn.Module], first: int) -> None:
    """Callables that return one module would share it on one stage and not on two."""
    seen: dict[int, int] = {}
    for index, layer in enumerate(layers, first):
        for parameter in layer.parameters():
            if seen.setdefault(id(parameter), index) != index:
                raise UsageError(
                    f"layers {seen[id(parameter)]} and {index} were built with one parameter in "
                    "both: declare it with tied = [...] and build each layer anew"
                )
