"""What the model is, what each worker holds of it, and that this is built."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.wire.messages.limits import MOST_NOTES, MOST_TYPES, check, check_names
from pipeworker.wire.messages.step import Batch


@dataclass(frozen=True, slots=True)
class SkipRoute:
    """A skip connection: between layers in `Described`, between stages in `Plan`."""

    source: int
    target: int
    name: str


@dataclass(frozen=True, slots=True)
class TiedWeights:
    """One parameter at several places: its names, and in `Plan` the stages of the places."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the job's, by its name in the job file's folder, and a digest of what is in it."""

    name: str
    digest: str

    def __post_init__(self) -> None:
        check_names((self.name, self.digest), "names of files")


@dataclass(frozen=True, slots=True)
class Described:
    """What the job file's model is.

    Attributes:
        layers: the class of each layer, or ``"?"`` for one that is not built yet.
        weights: a digest of those layers' initial weights.
        skips: from the rank with stage 0, which reads the data.
        types: the classes of the user's that this worker can tell others of, by name.
        names: of the layers in the user's module, where they are not their indices.
        sources: the job file and what it imports from its folder.
        notes: for the user, who may have meant something else.
        settings: of torch's, that numbers depend on, as ``torch.get_default_dtype() = …``.
    """

    rank: int
    layers: tuple[str, ...]
    skips: tuple[SkipRoute, ...]
    ties: tuple[TiedWeights, ...] = ()
    weights: int = 0
    types: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_names(self.types, "names of types")
        check_names(self.notes, "notes", MOST_NOTES)
        check_names(self.settings, "settings")
        check(len(self.sources) <= MOST_TYPES, f"{len(self.sources)} files")
        count = len(self.layers)
        check_names(self.names, "names of layers", count)
        right = len({*self.names}) in (0, count) and not any("." in name for name in self.names)
        check(right, "names that are not those of the layers")
        for skip in self.skips:
            check(0 <= skip.source <= skip.target < count, f"a skip to layer {skip.target}")
            check_names((skip.name,), "names of skips")
        for tie in self.ties:
            check(bool(tie.names), "tied weights without a name")
            check_names(tie.names, "names of tied weights")
            for name in tie.names:
                layer = name.partition(".")[0]
                check(layer.isdecimal() and int(layer) < count, f"a tied weight {name!r}")


@dataclass(frozen=True, slots=True)
class Built:
    """A stage that is built: the classes of its layers, from layer `first` on."""

    stage: int
    first: int
    layers: tuple[str, ...]
    parameters: int

    def __post_init__(self) -> None:
        least = min(self.stage, self.first, self.parameters)
        check(least >= 0, f"a stage of {least}")


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's stages are built and connected.

    Attributes:
        batch: from where stage 0 is.
        left_out: how many names of ``--init-from`` and of its stages had no counterpart.
        length: mini-batches of an epoch, from where data is read; 0 where that is not known.
        unit: which accelerator of its host the device is, whatever its number in the process; empty
            for the CPU.
    """

    rank: int
    stages: tuple[Built, ...]
    device: str
    batch: Batch | None
    left_out: int = 0
    length: int = 0
    unit: str = ""

    def __post_init__(self) -> None:
        check_names((self.device, self.unit), "names of devices")


@dataclass(frozen=True, slots=True)
class StageRange:
    """Layers ``first`` to ``stop - 1`` of the model are `stage`."""

    stage: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What this worker holds, and what it is connected to.

    Attributes:
        ranges: this worker's stages.
        edges: its channels, in connection order.
        skips: those that begin or end on its stages; `ties` those with a place on them.
        evaluation: its actions for one micro-batch of a forward-only pass.
        types: the classes that all workers know; a channel says their numbers in this list.
    """

    ranges: tuple[StageRange, ...]
    edges: tuple[str, ...]
    skips: tuple[SkipRoute, ...]
    ties: tuple[TiedWeights, ...]
    evaluation: str
    types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_names(self.types, "names of types")
