"""The job's model on one worker: described as a whole, built in part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pipeworker.errors import ProtocolError, UsageError, a_type
from pipeworker.facts.connections import Cached, Existing, SharedBuffer, Tie
from pipeworker.facts.layer_names import LayerNames, layer_of, numbered, split_numbered
from pipeworker.facts.position import Phase
from pipeworker.host.position import Tracker
from pipeworker.job import file as job_file
from pipeworker.job import layers as job_layers
from pipeworker.job.file import JobFile
from pipeworker.plan.ties import check_declared, declared
from pipeworker.record.weights.conversions import Conversion, describe_adapters
from pipeworker.wire.messages.plan import StageRange
from pipeworker.worker import blame
from pipeworker.worker.internals import is_hooked, move_module
from pipeworker.worker.model.eval_mode import eval_mode_note
from pipeworker.worker.model.existing import ByParameter, Origins, digest
from pipeworker.worker.model.lazy import reject_lazy
from pipeworker.worker.stage import rng
from pipeworker.worker.stage.borrowed import Borrowing
from pipeworker.worker.stage.cut import building
from pipeworker.worker.stage.cut.part import Cut
from pipeworker.worker.stage.cut.plan import CutPlan
from pipeworker.worker.stage.shared_buffers import BufferPlace
from pipeworker.worker.transport.structure import TypeRegistry
from pipeworker.worker.update.ties import Ties, reject_common_memory, separate, shared_parameters

PlanOf = Callable[[nn.Module], tuple[CutPlan, TypeRegistry]]
"""Returns the plan of a module that is no sequence, and the classes that its values may have."""
log = logging.getLogger(__name__)
_SMALL = 16 << 20
"""Bytes of parameters up to which a model is built as a whole by each process."""


class Model:
    """The layers of a job; layers given as callables are not built yet.

    Raises:
        UsageError: ``model`` returned neither a module nor a list of layers.
        UserCodeError: ``model`` raised.

    Attributes:
        names: names of the layers in the user's module.
        entries: the layers, or callables that build them.
        cut: how the module is cut, if it is no sequence of layers.
        existing: the parameters that built layers train, and that existed before.
        borrowing: looks for parameters that layers, or the loss, use and do not have.
    """

    def __init__(
        self,
        job: JobFile,
        seed: int,
        device: torch.device,
        tracker: Tracker,
        plan_of: PlanOf | None = None,
    ) -> None:
        self._seed = seed
        self._device = device
        self._tracker = tracker
        self._make, self._plan_of = job.model, plan_of
        self._order: list[str] = []
        self._first_places = ByParameter()  # the names of parameters in the first layer of each
        self._module: nn.Module | None = None
        self.cut: Cut | None = None
        tracker.set(Phase.BUILDING)
        self._seed_all()
        try:
            named = job_layers.entries(self._made(), self._cut)
        except BaseException as error:
            blame.blame_user("model()", error, early=True, note=_hint(error))
        self.names = self._names_of(job, list(named))
        self.entries = list(named.values())
        self._layers = list(named)
        self._renamed = {name for name in job.names if "." in name}
        self._declared = job.tied
        for index, entry in enumerate(self.entries):
            if isinstance(entry, nn.Module):
                reject_lazy(entry, index)
        reject_common_memory(self.entries)
        self._origins = Origins(self.entries)
        self.existing: list[Existing] = []
        self._buffers = buffer_places(self.entries)
        self._places = ByParameter()
        for index, entry in enumerate(self.entries):
            if isinstance(entry, nn.Module):
                self._note_names(index, entry)
        self.borrowing = Borrowing(self._places.__getitem__, self._origins.__getitem__)

    def _names_of(self, job: JobFile, names: list[str]) -> LayerNames:
        if job.names and self.cut is not None:
            raise UsageError(
                "names: are of a list of layers; model() returned a module, whose own names files "
                "have"
            )
        try:
            return LayerNames(job_layers.prefixes(names, job.names))
        except ProtocolError as error:
            if not job.names:
                raise
            raise UsageError(f"names: {error}; give each layer and each part its own") from None

    def _made(self) -> Any:
        """Return what ``model`` returns, or is; of a large module, parameters have no memory.

        Of a large model it is known only when it is built whether it is a sequence, which is built
        as a whole: so a large sequence is built twice, once without memory.
        """
        make = self._make
        if not job_file.is_function(make):
            return make
        is_small, made = building.build_small(make, _SMALL)
        if is_small:
            return made
        self._seed_all()
        try:
            made, order = building.build_hollow(make)
        except Exception as error:
            log.info("the model is built as a whole: %s", error)
        else:
            if not _is_sequence(made):
                self._order = order
                return made
        self._seed_all()
        return make()

    def _cut(self, module: Any) -> dict[str, nn.Module] | None:
        """Return the layers of a module that is no sequence; None for a sequence."""
        if _is_sequence(module):
            return None
        if self._plan_of is None:
            raise UsageError(f"model() returned {a_type(module)}; return a list of layers")
        reject_lazy(module)
        plan, types = self._plan_of(module)
        self.cut, self._module = Cut(module, types, self._device, plan), module
        return self.cut.parts_of(module)

    def hold(self, ranges: Iterable[StageRange]) -> None:
        """Build the layers of these stages, if the model's parameters have no memory yet.

        Raises:
            UserCodeError: ``model`` raised.
        """
        layers = [layer for part in ranges for layer in range(part.first, part.stop)]
        entries = [self.entries[layer] for layer in layers]
        if not any(isinstance(one, nn.Module) and building.is_hollow(one) for one in entries):
            return
        assert self.cut is not None
        assert self._module is not None
        own = {id(p) for one in entries if isinstance(one, nn.Module) for p in one.parameters()}
        named = self._module.named_parameters(remove_duplicate=False)
        owned = [name for name, parameter in named if id(parameter) in own]
        self._tracker.set(Phase.BUILDING)
        with blame.user_code("model()", early=True):
            self._seed_all()
            try:
                module = building.build_part(self._make, self._order, owned)
            except building.NeedsWhole as error:
                log.info("the model is built as a whole: %s", error)
                self._seed_all()
                module = self._make()
        built = list(self.cut.parts_of(module).values())
        for index, one in enumerate(built):
            self._note_names(index, one)
        reject_common_memory(built)
        for layer in layers:
            self.entries[layer] = built[layer]

    def release(self) -> None:
        """Forget all layers: the stages have those that this process needs."""
        self.entries.clear()
        self._origins.release()
        self._module = None

    def _seed_all(self) -> None:
        rng.seed_all(self._seed, rng.accelerator_generator(self._device))

    @property
    def classes(self) -> tuple[str, ...]:
        """The class of each layer, or ``"?"`` for one that is not built yet."""
        return tuple(self.class_of(layer) or "?" for layer in range(len(self.entries)))

    def class_of(self, layer: int) -> str:
        """Return the class of a layer, or "" if it is not known."""
        entry = self.entries[layer] if 0 <= layer < len(self.entries) else None
        return blame.kind_of(entry) if isinstance(entry, nn.Module) else ""

    def conversion(self) -> Conversion | None:
        """Return how the files of a library become weights of the module that is cut."""
        return Conversion(self._module) if self._module is not None else None

    def adapters(self) -> dict[str, Any] | None:
        """Return what makes peft's own folder of the model's weights, if it has adapters."""
        return describe_adapters(self._module) if self._module is not None else None

    @property
    def cached(self) -> tuple[Cached, ...]:
        """The functions of the job that keep parameters which were built with layers."""
        return tuple(self._origins.kept.values())

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

    def shared_buffers(self, part: StageRange) -> dict[BufferPlace, str]:
        """Return the buffers of a stage that other stages have too, and their names."""
        own = range(part.first, part.stop)
        return {
            (index, key): self.names.parameter(index, key)
            for places in self._buffers
            if not all(index in own for index, _ in places)
            for index, key in places
            if index in own
        }

    def notes(self) -> tuple[str, ...]:
        """Return notes on what may be a mistake, each a sentence."""
        found = [eval_mode_note(self.entries)]
        switched_off = self.cut.switched_off if self.cut is not None else []
        if "use_cache" in switched_off:
            found.append(
                "model(): its config has use_cache=True; training makes no cache of keys and "
                "values, so it is off here"
            )
        if "gradient_checkpointing" in switched_off:
            found.append(
                "model(): gradient checkpointing is on; it is off here, because --recompute "
                "decides what each stage computes again"
            )
        return tuple(filter(None, found))

    def digest(self) -> int:
        """Return a checksum of the first elements of each parameter that already exists."""
        built = (entry for entry in self.entries if isinstance(entry, nn.Module))
        return digest(parameter for entry in built for parameter in entry.parameters())

    def build(
        self, part: StageRange, tied: Sequence[Tie], local_stages: Collection[int] = ()
    ) -> tuple[list[nn.Module], Ties | None]:
        """Build the layers of a stage on the device; return them, and the stage's ties.

        Args:
            part: layers of the stage.
            tied: tied weights with a place on the stage.
            local_stages: the stages of this worker.

        Raises:
            UsageError: layers share parameters that stages cannot share.
            UserCodeError: building a layer raised.
        """
        later = [name for tie in tied for name in tie.names[1:]]
        layers: list[nn.Module] = []
        shared: dict[str, list[str]] = {}
        for i in range(part.first, part.stop):
            layers.append(self._build(i, [n for n in later if layer_of(n) == i], self._device))
            for first, name in self._note_places(i, layers[-1]):
                shared.setdefault(first, [first]).append(name)
            self._note_names(i, layers[-1])
        is_first = part.stage == min(local_stages, default=part.stage)
        if self.cut is not None and self._module is not None and not is_first:
            # What a forward changes around units, each stage changes for itself.
            own = Cut(self._module, self.cut.types, self._device, self.cut.plan)
            own.share_buffers(self.cut)
            for layer in layers:
                vars(layer)["cut"] = own
        check_declared(shared.values(), ())
        self.existing += self._origins.of(layers, part.first)
        ties = None
        if tied:
            built = dict(enumerate(layers, part.first))
            ties = Ties(part.stage, tied, built, lambda i: self._build(i, (), None), local_stages)
        return layers, ties

    def _build(self, index: int, tied: Sequence[str], device: torch.device | None) -> nn.Module:
        """Build a layer; its parameters named in `tied` become objects of their own."""
        self._tracker.set(Phase.BUILDING, layer=index)
        self.hold([StageRange(0, index, index + 1)])
        entry, keys = self.entries[index], [split_numbered(name)[1] for name in tied]
        with blame.user_code(f"building {blame.layer(index, self.class_of(index))}", early=True):
            if not isinstance(entry, nn.Module):
                seed = rng.build_seed(self._seed, index)
                rng.seed_all(seed, rng.accelerator_generator(self._device))
                built = job_layers.build(entry, index)
                reject_lazy(built, index)
                own = dict(built.named_parameters())
                keys = [k for k in keys if k in own and self._first_places[own[k]]]
            else:
                built = entry
            if keys:
                built = separate(built, keys)
            self._check_renamed(index, built)
            return built if device is None else move_module(built, device)

    def _note_names(self, index: int, layer: nn.Module) -> None:
        """Note the parameters of a layer, each by the first of its names in the user's module."""
        for key, parameter in layer.named_parameters():
            if not self._places[parameter]:
                self._places[parameter] = self.names.parameter(index, key)

    def _note_places(self, index: int, layer: nn.Module) -> Iterator[tuple[str, str]]:
        """Note a layer's parameters; yield the names of each that an earlier layer trains too."""
        for key, parameter in layer.named_parameters():
            name, first = numbered(index, key), self._first_places[parameter]
            if not first:
                self._first_places[parameter] = name
            elif layer_of(first) != index and parameter.requires_grad:
                yield first, name

    def _check_renamed(self, index: int, layer: nn.Module) -> None:
        """Reject names of parts that a layer does not have."""
        named = self._layers[index]
        own = [*layer.state_dict(keep_vars=True), *dict(layer.named_buffers())]
        for name in self._renamed:
            first, _, key = name.partition(".")
            if first == named and not any(f"{one}.".startswith(f"{key}.") for one in own):
                known = own[0] if own else "no weights"
                raise UsageError(f"names: {name!r}: the layer has no {key}; it has {known}, …")


def buffer_places(entries: Sequence[Any]) -> list[list[BufferPlace]]:
    """Return the places of each buffer that is in several layers."""
    places: dict[int, list[BufferPlace]] = {}
    for index, entry in enumerate(entries):
        named = entry.named_buffers(remove_duplicate=False) if isinstance(entry, nn.Module) else ()
        for key, buffer in named:
            places.setdefault(id(buffer), []).append((index, key))
    return [found for found in places.values() if found[0][0] < found[-1][0]]


def shared_buffers(
    entries: Sequence[Any], changing: Sequence[Collection[str]] = ()
) -> tuple[SharedBuffer, ...]:
    """Return the buffers that must be on one stage: each by its first and its last layer.

    Args:
        entries: the layers, or callables that build them.
        changing: the names of the buffers in each layer that its forward may change; layers for
            which there are none given may change all.
    """
    return tuple(
        sorted(
            {
                SharedBuffer(places[0][0], places[-1][0])
                for places in buffer_places(entries)
                if any(i >= len(changing) or key in changing[i] for i, key in places)
            }
        )
    )


def _is_sequence(model: Any) -> bool:
    """Return whether a model is a sequence of layers, without a hook that none of them has."""
    return job_layers.is_sequence(model) and not (isinstance(model, nn.Module) and is_hooked(model))


def _hint(error: BaseException) -> str:
    """Return advice for an error whose message from torch gives none."""
    if isinstance(error, TypeError) and "is not a Module subclass" in str(error):
        return "layers are instances: nn.ReLU(), neither nn.ReLU nor torch.relu"
    return ""
