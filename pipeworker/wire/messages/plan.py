"""Messages about the model, its division into stages, and the stages that are built."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.facts.connections import Cached, Existing, SharedBuffer, Skip, Tie
from pipeworker.facts.layer_names import LayerNames, is_numbered
from pipeworker.facts.limits import LONGEST_TEXT, MOST_NOTES, MOST_TYPES, check, check_names
from pipeworker.facts.outline import Machine, Outline
from pipeworker.facts.step import Batch


@dataclass(frozen=True, slots=True)
class Source:
    """A source file of the job: its name in the job file's folder, and a digest of its content."""

    name: str
    digest: str

    def __post_init__(self) -> None:
        check_names((self.name, self.digest), "names of files")


@dataclass(frozen=True, slots=True)
class Described:
    """A worker's description of the job file's model.

    Attributes:
        layers: the class of each layer, or ``"?"`` for one that is not built yet.
        skips: the skip connections, from the worker with stage 0, which reads the data.
        weights: a digest of the initial weights of the layers that are built.
        types: names of the user's classes whose instances this worker can send.
        names: the layers' names in the user's module, empty if they are their indices.
        sources: the job file and the files that it imports from its folder.
        notes: hints for the user about code that may not do what is intended.
        settings: torch's global settings that results depend on, as
            ``torch.get_default_dtype() = …``.
        epoch_length: mini-batches in an epoch, from the worker with stage 0; 0 if unknown, or if
            the number of steps does not depend on it.
        hooks: names of the job file's functions that are called with what is recorded.
        outline: the outline of the network, from the worker that reads the data, if facts of the
            layers are wanted and they could be run on fake tensors.
        machine: what the worker computes on, if facts are wanted.
        frozen: the layers that have nothing to train, ascending.
        shared_buffers: buffers that are in several layers and may change in a forward.
        problem: why the network could not be run on fake tensors, if it has no outline, or why the
            operations of a layer could not be counted.
    """

    rank: int
    layers: tuple[str, ...]
    skips: tuple[Skip, ...]
    ties: tuple[Tie, ...] = ()
    weights: int = 0
    types: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    epoch_length: int = 0
    hooks: tuple[str, ...] = ()
    outline: Outline | None = None
    machine: Machine | None = None
    frozen: tuple[int, ...] = ()
    shared_buffers: tuple[SharedBuffer, ...] = ()
    problem: str = ""

    def __post_init__(self) -> None:
        check_names(self.types, "names of types")
        check_names(self.hooks, "names of hooks")
        check_names(self.notes, "notes", MOST_NOTES)
        check_names(self.settings, "settings")
        check(self.epoch_length >= 0, f"an epoch of {self.epoch_length} mini-batches")
        check(len(self.sources) <= MOST_TYPES, f"{len(self.sources)} files")
        count = len(self.layers)
        check(len(self.names) in (0, count), f"{len(self.names)} names for {count} layers")
        LayerNames(self.names)
        outlined = self.outline is None or len(self.outline.of_layer) == count
        check(outlined, f"an outline of other layers than {count}")
        known = sorted({*self.frozen} & {*range(count)})
        check(list(self.frozen) == known, "frozen layers that are none, or out of order")
        check(len(self.problem) <= LONGEST_TEXT, "too long a problem")
        for buffer in self.shared_buffers:
            inside = 0 <= buffer.first < buffer.last < count
            check(inside, f"a buffer of layer {buffer.last}")
        for skip in self.skips:
            check(0 <= skip.source <= skip.target < count, f"a skip to layer {skip.target}")
            check_names((skip.name,), "names of skips")
        for tie in self.ties:
            check(bool(tie.names), "tied weights without a name")
            check_names(tie.names, "names of tied weights")
            for name in tie.names:
                check(is_numbered(name, count), f"a tied weight {name!r}")


@dataclass(frozen=True, slots=True)
class Built:
    """A stage that is built: its first layer, its layers' classes, its number of parameters.

    Attributes:
        batch_norms: the number of modules that normalize by each micro-batch itself.
    """

    stage: int
    first: int
    layers: tuple[str, ...]
    parameters: int
    batch_norms: int = 0

    def __post_init__(self) -> None:
        least = min(self.stage, self.first, self.parameters, self.batch_norms)
        check(least >= 0, f"a stage of {least}")


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's stages are built and connected.

    Attributes:
        batch: the first mini-batch, from the worker with stage 0.
        unmatched: the number of names of ``--init-from`` and of its stages without a counterpart.
        epoch_length: mini-batches in an epoch, from the worker that reads the data; 0 if unknown.
        accelerator: identifies the device on its host, whatever its number in the process; empty
            for the CPU.
        existing: the parameters that layers train, and that existed before a callable built them.
        cached: functions of the job that keep parameters which were built with these layers.
    """

    rank: int
    stages: tuple[Built, ...]
    device: str
    batch: Batch | None
    unmatched: int = 0
    epoch_length: int = 0
    accelerator: str = ""
    existing: tuple[Existing, ...] = ()
    cached: tuple[Cached, ...] = ()

    def __post_init__(self) -> None:
        check_names((self.device, self.accelerator), "names of devices")
        stop = max((one.first + len(one.layers) for one in self.stages), default=0)
        for parameter in self.existing:
            check_names((parameter.name, parameter.origin), "names of parameters")
            check(is_numbered(parameter.name, stop), f"a parameter {parameter.name!r}")
        for function in self.cached:
            check_names((function.origin, function.name), "names of functions")


@dataclass(frozen=True, slots=True)
class StageRange:
    """Layers ``first`` to ``stop - 1`` of the model are `stage`; its recompute mode."""

    stage: int
    first: int
    stop: int
    recompute: str = "auto"

    def __post_init__(self) -> None:
        check_names((self.recompute,), "recompute modes")


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages of a worker, and its channels.

    Attributes:
        edges: its channels, in connection order.
        skips: the skip connections that begin or end on its stages.
        ties: the tied weights with a place on its stages.
        evaluation: its actions for one micro-batch of a forward-only pass.
        held: by worker of a replica, its stages, ascending; worker 0 has the first stage.
        types: the user's classes that all workers know; a channel sends an index in this list.
        steps: the number of steps of the job, for its scheduler; 0 if unknown.
    """

    ranges: tuple[StageRange, ...]
    edges: tuple[str, ...]
    skips: tuple[Skip, ...]
    ties: tuple[Tie, ...]
    evaluation: str
    held: tuple[tuple[int, ...], ...]
    types: tuple[str, ...] = ()
    steps: int = 0

    def __post_init__(self) -> None:
        check_names(self.types, "names of types")
        check(self.steps >= 0, f"a job of {self.steps} steps")
        stages = sorted(stage for held in self.held for stage in held)
        check(stages == [*range(len(stages))], "a stage that no worker has, or several")
        check(not stages or 0 in self.held[0], "a first stage that worker 0 does not have")
