"""The job's model on one worker: described as a whole, built in part."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipeworker.errors import UsageError
from pipeworker.facts.connections import Tie
from pipeworker.facts.layer_names import LayerNames, layer_of, split_numbered
from pipeworker.facts.position import Phase
from pipeworker.host.position import Tracker
from pipeworker.job import file as job_file
from pipeworker.job.file import JobFile
from pipeworker.plan.ties import declared
from pipeworker.wire.messages.plan import StageRange
from pipeworker.worker import blame
from pipeworker.worker.stage import rng
from pipeworker.worker.update.ties import Ties, separate, shared_parameters

_DIGESTED = 16
"""Number of elements of each parameter that the digest of the initial weights covers."""


class Model:
    """The layers of a job; layers given as callables are not built yet.

    Raises:
        UsageError: ``model`` returned something that is not a sequence of layers.
        UserCodeError: ``model`` raised.

    Attributes:
        names: names of the layers in the user's module.
        entries: the layers, or callables that build them.
    """

    def __init__(self, job: JobFile, seed: int, device: torch.device, tracker: Tracker) -> None:
        self._seed = seed
        self._device = device
        self._tracker = tracker
        tracker.set(Phase.BUILDING)
        rng.seed_all(seed, rng.accelerator_generator(device))
        try:
            named = job_file.entries(job)
        except BaseException as error:
            blame.blame_user("model()", error, early=True, note=_hint(error))
        self.names = LayerNames(tuple(named))
        self.entries = list(named.values())
        self._declared = job.tied

    @property
    def classes(self) -> tuple[str, ...]:
        """The class of each layer, or ``"?"`` for one that is not built yet."""
        return tuple(self.class_of(layer) or "?" for layer in range(len(self.entries)))

    def class_of(self, layer: int) -> str:
        """Return the class of a layer, or "" if it is not known."""
        entry = self.entries[layer] if 0 <= layer < len(self.entries) else None
        return type(entry).__name__ if isinstance(entry, nn.Module) else ""

    def ties(self) -> tuple[Tie, ...]:
        """Return the tied parameters: one object in several layers, or declared by the job file."""
        found = [*shared_parameters(self.entries), *self._declared]
        return declared(found, len(self.entries))

    def frozen(self) -> tuple[int, ...]:
        """Return the layers that have nothing to train; a layer that is built later may have."""
        return tuple(
            index
            for index, entry in enumerate(self.entries)
            if isinstance(entry, nn.Module) and not any(p.requires_grad for p in entry.parameters())
        )

    def digest(self) -> int:
        """Return a checksum of the first elements of each parameter that already exists."""
        digest = 0
        for entry in self.entries:
            for parameter in entry.parameters() if isinstance(entry, nn.Module) else ():
                if not (parameter.is_meta or is_lazy(parameter)):
                    some = parameter.detach().reshape(-1)[:_DIGESTED].cpu()
                    digest = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), digest)
        return digest

    def build(
        self, part: StageRange, tied: Sequence[Tie], local_stages: Collection[int] = ()
    ) -> tuple[list[nn.Module], Ties | None]:
        """Build the layers of a stage on the device; return them, and the stage's ties.

        Args:
            part: layers of the stage.
            tied: tied weights with a place on the stage.
            local_stages: the stages of this worker.

        Raises:
            UsageError: layers share parameters or buffers that stages cannot share.
            UserCodeError: building a layer raised.
        """
        later = [name for tie in tied for name in tie.names[1:]]
        layers = [
            self._build(i, [name for name in later if layer_of(name) == i], self._device)
            for i in range(part.first, part.stop)
        ]
        job_file.check_buffers(self.entries, part.first, part.stop)
        ties = None
        if tied:
            built = dict(enumerate(layers, part.first))
            ties = Ties(part.stage, tied, built, lambda i: self._build(i, (), None), local_stages)
        _check_apart(layers, part.first)
        _check_sizes(layers, part.first)
        return layers, ties

    def _build(self, index: int, tied: Sequence[str], device: torch.device | None) -> nn.Module:
        """Build a layer; its parameters named in `tied` become objects of their own."""
        self._tracker.set(Phase.BUILDING, layer=index)
        entry = self.entries[index]
        with blame.user_code(f"building {blame.layer(index, self.class_of(index))}", early=True):
            if not isinstance(entry, nn.Module):
                seed = rng.build_seed(self._seed, index)
                rng.seed_all(seed, rng.accelerator_generator(self._device))
                built = job_file.build(entry, index)
            elif tied:
                built = separate(entry, [split_numbered(name)[1] for name in tied])
            else:
                built = entry
            return built if device is None else built.to(device)


def _hint(error: BaseException) -> str:
    """Return advice for an error whose message from torch gives none."""
    if isinstance(error, TypeError) and "is not a Module subclass" in str(error):
        return "layers are instances: nn.ReLU(), neither nn.ReLU nor torch.relu"
    return ""


def _check_sizes(layers: Sequence[nn.Module], first: int) -> None:
    """Reject lazy layers: before their first input an optimizer finds no parameters in them."""
    for index, layer in enumerate(layers, first):
        if any(map(is_lazy, (*layer.parameters(), *layer.buffers()))):
            named = blame.layer(index, type(layer).__name__)
            raise UsageError(
                f"{named}: has parameters without sizes; pass the sizes when you build it"
            )


def _check_apart(layers: Sequence[nn.Module], first: int) -> None:
    """Reject callables that return one module: it would be shared on one stage and not on two."""
    seen: dict[int, int] = {}
    for index, layer in enumerate(layers, first):
        for parameter in layer.parameters():
            if seen.setdefault(id(parameter), index) != index:
                raise UsageError(
                    f"layers {seen[id(parameter)]} and {index}: were built with one parameter in "
                    "both; declare it with tied = [...] and build a new module for each layer"
                )
