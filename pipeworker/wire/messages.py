"""The messages between a worker and the coordinator: typed, frozen, plain values only.

The direction is in the section headings. What a message may hold is what the codec can check:
whole numbers, floats, strings, bytes, booleans, enums, tuples of these, optional values and other
messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from pipeworker import exact
from pipeworker.errors import ProtocolError

MOST_TYPES = 1 << 14
LONGEST_NAME = 512
LONGEST_TEXT = 1 << 20
LONGEST_VALUE = 1 << 13
MOST_KEYS = 1 << 6
MOST_VERSIONS = 1 << 4
MOST_MICROBATCHES = 1 << 20
MOST_SAMPLES = 1 << 40
MOST_STATUSES = 1 << 8
MOST_NOTES = 1 << 4
"""What a message may hold. Each checks its own ranges where it is made, and so where it is read;
what depends on the job, the coordinator checks."""


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolError(what)


def _check_names(names: tuple[str, ...], what: str, most: int = MOST_TYPES) -> None:
    if len(names) > most or max(map(len, names), default=0) > LONGEST_NAME:
        raise ProtocolError(f"too many {what}, or too long ones")


class Phase(IntEnum):
    """What a worker is doing; shown in failure messages. A number, because it is written often."""

    STARTING = 0
    LOADING = 1
    BUILDING = 2
    CONNECTING = 3
    READING = 4
    WAITING = 5
    FORWARD = 6
    RECOMPUTE = 7
    BACKWARD = 8
    LOSS = 9
    UPDATE = 10
    SAVING = 11
    EVALUATION = 12
    SURVEY = 13
    RESTORING = 14

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Position:
    """Where a worker is. A field that does not apply is -1; steps count from 1."""

    phase: Phase = Phase.STARTING
    step: int = -1
    microbatch: int = -1
    layer: int = -1

    def __post_init__(self) -> None:
        least = min(self.step, self.microbatch, self.layer)
        _check(least >= -1, f"a position of {least}")


class Cause(Enum):
    """Why a job ends early."""

    USAGE = "usage"
    """The command or the job file is wrong."""
    USER = "user"
    """The user's code raised."""
    PEER = "peer"
    """A neighbour's connection closed: an echo, never the cause while another is known."""
    SIGNAL = "signal"
    """Something outside asked a worker to end; an echo too, where a job's ranks end together."""
    LOST = "lost"
    """A process ended that should not have."""
    HUNG = "hung"
    """A process stopped answering."""
    TRANSIENT = "transient"
    """The user's code raised what the job file declares to be worth another try."""
    INTERNAL = "internal"
    """A defect in pipeworker."""
    EXIT = "exit"
    """The job file ended its process when it was run; the message is what it said."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, whole: enough to show the user.

    Attributes:
        rank: -1 for the job itself.
        stage: how the rank is called by what it holds: ``stage 1``.
        status: the exit status that a job file chose.
    """

    cause: Cause
    message: str
    rank: int = -1
    position: Position = Position()
    layer_class: str = ""
    traceback: str = ""
    stage: str = ""
    status: int = 1

    def __post_init__(self) -> None:
        longest = max(len(self.message), len(self.traceback))
        _check(longest <= LONGEST_TEXT, f"a failure of {longest} characters")
        _check(0 <= self.status < MOST_STATUSES, f"an exit status of {self.status}")


@dataclass(frozen=True, slots=True)
class Batch:
    """The mini-batch the first stage holds ready for the next step.

    Attributes:
        signature: numbers its shapes: equal numbers mean equal structure, shapes and dtypes.
        samples, microbatches: of all replicas; both are 0 where a step ends without another one,
            and the replicas' gradients are to be added up.
        digest: of all that it holds, with several replicas: all have read the same.
    """

    signature: int
    samples: int
    microbatches: int
    epoch: int
    digest: int = 0

    def __post_init__(self) -> None:
        count = self.microbatches
        possible = 0 <= self.samples <= MOST_SAMPLES and 0 <= count <= MOST_MICROBATCHES
        both = bool(count) == bool(self.samples)
        _check(
            possible and both, f"a mini-batch of {self.samples} samples in {count} micro-batches"
        )
        _check(self.epoch >= 0, f"epoch {self.epoch}")
        _check(0 <= self.digest < 1 << 32, f"a digest of {self.digest}")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, over all stages: a row of metrics.jsonl.

    Attributes:
        step: counts from 1.
        loss: mean over the samples, or Σsum / Σcount.
        samples, samples_per_second: of all its mini-batches.
        seconds: from the step's start to its last gradient.
        grad_norm: 2-norm of the whole gradient, before clipping.
        lr: of the first parameter group.
        bubble: measured idle share, 0 to 1, over all stages.
        epoch: counts from 0.
        loss_scale: with fp16 alone.
    """

    step: int
    loss: float
    samples: int
    seconds: float
    samples_per_second: float
    grad_norm: float
    lr: float
    bubble: float
    epoch: int
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation pass after `step` gave: a row of evaluation.jsonl.

    The loss is averaged over samples, or Σsum / Σcount; `values` are the metrics, by `names`.
    """

    step: int
    loss: float
    names: tuple[str, ...] = ()
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_names(self.names, "metrics")
        names, values = len(self.names), len(self.values)
        _check(names == values, f"{names} names of metrics for {values} values")

    def row(self) -> dict[str, float]:
        """``loss`` and the metrics."""
        return {"loss": self.loss, **dict(zip(self.names, self.values, strict=True))}


# Worker to coordinator.


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker is there.

    The first two fields are read by other versions of the protocol too, to name who speaks it: they
    stay as they are.

    Attributes:
        versions: what it runs, as ``torch 2.13.0``.
    """

    rank: int
    host: str
    pid: int
    versions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self.pid >= 0 and len(self.host) <= LONGEST_NAME, "a host or pid that cannot be")
        _check_names(self.versions, "versions", MOST_VERSIONS)


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
        _check_names((self.name, self.digest), "names of files")


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

    def __post_init__(self) -> None:
        _check_names(self.types, "names of types")
        _check_names(self.notes, "notes", MOST_NOTES)
        _check(len(self.sources) <= MOST_TYPES, f"{len(self.sources)} files")
        count = len(self.layers)
        _check_names(self.names, "names of layers", count)
        right = len({*self.names}) in (0, count) and not any("." in name for name in self.names)
        _check(right, "names that are not those of the layers")
        for skip in self.skips:
            _check(0 <= skip.source <= skip.target < count, f"a skip to layer {skip.target}")
            _check_names((skip.name,), "names of skips")
        for tie in self.ties:
            _check(bool(tie.names), "tied weights without a name")
            _check_names(tie.names, "names of tied weights")
            for name in tie.names:
                layer = name.partition(".")[0]
                _check(layer.isdecimal() and int(layer) < count, f"a tied weight {name!r}")


@dataclass(frozen=True, slots=True)
class Built:
    """A stage that is built: the classes of its layers, from layer `first` on."""

    stage: int
    first: int
    layers: tuple[str, ...]
    parameters: int

    def __post_init__(self) -> None:
        least = min(self.stage, self.first, self.parameters)
        _check(least >= 0, f"a stage of {least}")


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's stages are built and connected.

    Attributes:
        batch: from where stage 0 is.
        left_out: how many names of ``--init-from`` and of its stages had no counterpart.
        length: mini-batches of an epoch, from where data is read; 0 where that is not known.
    """

    rank: int
    stages: tuple[Built, ...]
    device: str
    batch: Batch | None
    left_out: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class Upcoming:
    """Where stage 0 is, the next mini-batch is cut into a number of micro-batches that is new.

    Told when it is read, within a step, so that its schedule is made before it is needed.
    """

    rank: int
    microbatches: int

    def __post_init__(self) -> None:
        count = self.microbatches
        _check(1 <= count <= MOST_MICROBATCHES, f"a mini-batch of {count} micro-batches")


@dataclass(frozen=True, slots=True)
class StepDone:
    """A worker has run its tuple; gradients are accumulated and not applied.

    Attributes:
        losses: from where the last stage is, each micro-batch's share of the loss (already weighted
            by samples), or each sum where the loss function returns ``(sum, count)``.
        counts: with `losses`, the counts of ``(sum, count)`` losses, else empty.
        squares: their exact sum is the squared 2-norm of this worker's gradient; a few, however
            many parameters there are (:func:`pipeworker.exact.partials`).
        busy: seconds spent computing (forward, recompute, backward, data).
        learning_rate: of the first parameter group; NaN where the worker has no optimizer.
        batch: from where stage 0 is, the next mini-batch; None when the data ended.
        copied: the last step whose state is copied as a whole (:class:`Copy`), -1 for none.
        copying: seconds of work that copy took.
    """

    rank: int
    step: int
    losses: tuple[float, ...]
    counts: tuple[float, ...]
    squares: tuple[float, ...]
    busy: float
    learning_rate: float
    peak_memory: int
    batch: Batch | None
    copied: int = -1
    copying: float = 0.0

    def __post_init__(self) -> None:
        losses, counts = len(self.losses), len(self.counts)
        _check(losses <= MOST_MICROBATCHES, f"{losses} losses")
        _check(counts in (0, losses), f"{counts} counts for {losses} losses")
        _check(len(self.squares) <= exact.MOST, f"{len(self.squares)} squares")
        _check(not exact.total(self.squares) < 0.0, "a negative sum of squares")
        _check(self.busy >= 0.0, f"{self.busy} seconds of work")
        _check(self.copied >= -1 and self.copying >= 0.0, "a copy that cannot be")
        _check(self.peak_memory >= 0, f"{self.peak_memory} bytes of memory")


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """A worker has run an evaluation pass to its end; `result` comes with the last stage alone."""

    rank: int
    step: int
    peak_memory: int
    result: Evaluation | None

    def __post_init__(self) -> None:
        _check(self.peak_memory >= 0, f"{self.peak_memory} bytes of memory")


class CallKind(Enum):
    """What the user's own loop asks for."""

    STEP = "step"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    SAVE = "save"
    LOAD = "load"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checkpoint that a loop of the user's own goes on from: its step and loss scale."""

    step: int
    scale: float = 0.0
    good_steps: int = 0

    def __post_init__(self) -> None:
        _check(min(self.step, self.scale, self.good_steps) >= 0, "a checkpoint that cannot be")


@dataclass(frozen=True, slots=True)
class Call:
    """The user's own loop made its next call on this rank; all ranks make the same ones.

    Attributes:
        batch: of STEP, the mini-batch that the first stage was given; None from the others.
        last: of STEP, whether the optimizer step is complete with this mini-batch.
        everywhere: of PREDICT, whether every stage wants the output.
        loaded: of LOAD, what was.
    """

    rank: int
    kind: CallKind
    batch: Batch | None = None
    last: bool = True
    everywhere: bool = False
    loaded: Loaded | None = None

    def __post_init__(self) -> None:
        right = (self.loaded is not None) == (self.kind is CallKind.LOAD)
        _check(right, "a checkpoint is loaded by LOAD")


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint, its size and the CRC-32 of what is in it."""

    name: str
    bytes: int
    crc32: int

    def __post_init__(self) -> None:
        _check_names((self.name,), "names of files")
        _check("/" not in self.name, "a file in another folder")
        _check(self.bytes >= 0 and 0 <= self.crc32 < 1 << 32, "a file that cannot be")


@dataclass(frozen=True, slots=True)
class Saved:
    """A worker's part of the checkpoint of `step` is on disk; or it is not, for this reason."""

    rank: int
    step: int
    files: tuple[File, ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        _check(len(self.error) <= LONGEST_TEXT, f"a reason of {len(self.error)} characters")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker is alive, and where it is.

    Attributes:
        sent: how many numbered messages it has sent (:mod:`pipeworker.wire.exchange`).
        received: how many it has.
        again: it lacks some that were sent to it.
        waits: for another worker, or to be told what is next.
    """

    rank: int
    position: Position
    sent: int = 0
    received: int = 0
    again: bool = False
    waits: bool = False

    def __post_init__(self) -> None:
        _check(min(self.sent, self.received) >= 0, "a negative number of messages")


@dataclass(frozen=True, slots=True)
class Failed:
    rank: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Signalled:
    """A worker was sent a signal from outside; it goes on until it hears what then."""

    rank: int
    signal: str

    def __post_init__(self) -> None:
        _check_names((self.signal,), "names of signals")


class StoreOperation(Enum):
    SET = "set"
    GET = "get"
    ADD = "add"
    CHECK = "check"
    COMPARE_SET = "compare_set"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """One operation of torch.distributed's rendezvous store; GET waits until every key is set.

    So few keys, and such short values, that every answer fits a frame many times.
    """

    rank: int
    number: int
    operation: StoreOperation
    keys: tuple[str, ...]
    value: bytes = b""
    expected: bytes = b""

    def __post_init__(self) -> None:
        _check_names(self.keys, "keys", MOST_KEYS)
        longest = max(len(self.value), len(self.expected))
        _check(longest <= LONGEST_VALUE, f"a value of {longest} bytes")


# Coordinator to worker.


@dataclass(frozen=True, slots=True)
class Restore:
    """The state that a generation begins with, which is that after `step`.

    Attributes:
        path: of a checkpoint; or, where that is empty,
        slot: of the memories that workers of an earlier generation left behind: `ranks` of them,
            one after the other, have the whole state.
    """

    step: int
    path: str = ""
    slot: int = 0
    ranks: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the job is.

    Attributes:
        options: as JSON.
        held: the placement: by worker of a replica, its stages.
        restore: what to begin with; None for the initial weights.
    """

    options: str
    run_dir: str
    held: tuple[tuple[int, ...], ...]
    replicas: int
    restore: Restore | None = None


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
        _check_names(self.types, "names of types")


@dataclass(frozen=True, slots=True)
class Update:
    """Apply the gradients of `step`, and step the scheduler.

    Attributes:
        divisor: what gradients are divided by: Σcount, mini-batches, the loss scale.
        scale: what they are then multiplied by, to clip their norm.
        overflow: somewhere a gradient is not finite, so on all stages the optimizer does nothing.
        epoch_ended: the next mini-batch belongs to another epoch than the step's first.
    """

    step: int
    divisor: float = 1.0
    scale: float = 1.0
    overflow: bool = False
    epoch_ended: bool = False


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation pass gave this loss: a scheduler may look at it."""

    loss: float


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run one mini-batch of a step; its gradients are added to those of the ones before.

    Attributes:
        last: no further mini-batch will be needed.
        actions: the worker's tuple as text, when it differs from the last one.
        first: the number of its first micro-batch within the step, for the random streams.
        loss_scale: what gradients are multiplied by on their way (fp16).
        whole: the step's gradients are complete with it: replicas add theirs up.
    """

    step: int
    batch: Batch
    last: bool
    actions: str = ""
    first: int = 0
    loss_scale: float = 1.0
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Run an evaluation pass, or a prediction, after `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the state after `step` into a memory of this worker's, while the next step runs.

    Attributes:
        slot: the number of the memory.
        save: write the copy to disk as well, as the worker's part of a checkpoint.
    """

    step: int
    slot: int
    save: bool = False


@dataclass(frozen=True, slots=True)
class Save:
    """Write this worker's part of the checkpoint of `step`, by way of the memory `slot`."""

    step: int
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """For the next call of the user's own loop; `gave` is what the last one gave."""

    gave: StepResult | Evaluation | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """All is done: leave."""


Next = RunStep | Evaluate | Save | Wait | Finish


@dataclass(frozen=True, slots=True)
class Advance:
    """What is next; before it, what is due of the last step or pass, and what is copied then."""

    next: Next
    update: Update | Evaluated | None = None
    copy: Copy | None = None


@dataclass(frozen=True, slots=True)
class StoreReply:
    """Answer to a StoreRequest: `values` for GET, the sum or truth as a number otherwise."""

    number: int
    values: tuple[bytes, ...]
    result: int


@dataclass(frozen=True, slots=True)
class Ping:
    """The coordinator is alive; the counts are those of Heartbeat, the other way."""

    sent: int = 0
    received: int = 0
    again: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """The job is over, and not by its own end: `reason` is why."""

    reason: str
    exit_status: int


FromWorker = (
    Hello
    | Described
    | Ready
    | Upcoming
    | StepDone
    | EvaluationDone
    | Call
    | Saved
    | Heartbeat
    | Failed
    | Signalled
    | StoreRequest
)
ToWorker = Welcome | Plan | Advance | StoreReply | Ping | Abort
Message = FromWorker | ToWorker
