"""The options of a job, as every process sees them. Imports neither torch nor the job file."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec

from pipeworker.errors import ProtocolError, UsageError
from pipeworker.facts.criterion import Criterion
from pipeworker.facts.limits import MOST_MICROBATCHES
from pipeworker.job.interval import Interval
from pipeworker.job.renamed import written
from pipeworker.plan import text
from pipeworker.plan.figures import plural
from pipeworker.plan.orders import AUTO, DEFAULT_SCHEDULE, Order, resolve
from pipeworker.plan.partition import EVEN, block, check_entries
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import OFFLOAD, RECOMPUTE_MODES

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu")
"""The types of torch's accelerators; ``auto`` also uses those of other backends."""
BACKENDS = ("auto", "gloo", "nccl", "tls")
CHECKPOINT_BUSY = ("skip", "wait")
DATA_READERS = ("every", "first")
PRECISIONS = ("fp32", "bf16", "fp16")
MAX_STAGES = 1 << 16
MAX_REPLICAS = 1 << 8  # each is connected to each other
MAX_THREADS = 1 << 12  # more than any host has cores
EPOCH = "epoch"
"""A value for a number of steps: at each end of the data."""
BEST = "loss"
EXCLUSIVE = {"steps": "epochs", "epochs": "steps"}
"""Options of which at most one is given."""
LOGGERS = {"wandb": "wandb", "mlflow": "mlflow", "metrics_port": "prometheus_client"}
"""Options that pass rows on to other programs, and the package that each needs."""
_MOST = (1 << 63) - 1
_LONGEST_TIMEOUT = 12 * 3600
"""The most seconds of a timeout: poll() waits for 2**31 milliseconds at most, 49 times as long."""
_STEPS = re.compile(r"(\d{1,18}):(\d{1,18})", re.ASCII)
_T = TypeVar("_T")
_RANGES: dict[str, tuple[int, int]] = {
    "stages": (1, MAX_STAGES),
    "virtual_stages": (1, MAX_STAGES),
    "replicas": (1, MAX_REPLICAS),
    "microbatches": (1, MOST_MICROBATCHES),  # by default a multiple of those before
    **dict.fromkeys(("seed", "max_restarts"), (0, _MOST)),
    "threads": (1, MAX_THREADS),
    **dict.fromkeys(("accumulate", "keep", "steps", "epochs"), (1, _MOST)),
    **dict.fromkeys(("evaluate_every", "snapshot_every", "patience"), (1, _MOST)),
    "metrics_port": (1, (1 << 16) - 1),
}
"""The least and the largest value of each option that is a whole number."""
_CHOICES: dict[str, Collection[str]] = {
    "recompute": RECOMPUTE_MODES,
    "precision": PRECISIONS,
    "device": DEVICES,
    "backend": BACKENDS,
    "checkpoint_busy": CHECKPOINT_BUSY,
    "data_reader": DATA_READERS,
}


def default_microbatches(stages: int, replicas: int) -> int:
    """Return M, four for each stage: from there, the bubble is small (GPipe, Huang et al. 2019)."""
    return 4 * stages * replicas


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `pipeworker launch`; ``docs/options.md`` explains each.

    Attributes:
        job_file: absolute path of the job file.
        stages: workers of one replica; `placement` has the stages that each of them holds.
        virtual_stages: stages of each worker; None for as many as the schedule has by default.
        microbatches: M, over all replicas.
        arguments: the words after ``--``, for the job file.
        epochs: None, as `steps`, for one pass over the data. A step ends with its epoch.
        schedule: the name of an order, the text of the job's own, or ``auto``: the fastest.
        recompute: a recompute mode for all stages, or ``auto``: what the memory of each permits.
        balance: layers per stage; None for those of the shortest step.
        memory: bytes that each worker may use, one number for all or one for each; None for what
            its device or its host has.
        no_profile: operations of layers are counted, rather than their seconds measured.
        best: figure of evaluation passes by which the best checkpoint is kept, as ``max:accuracy``.
        patience: evaluation passes without a better one after which the job ends; None for any.
        checkpoint_every: steps or time between checkpoints, as ``30m``; ``end``: only at the end.
        checkpoint_busy: None for ``wait`` with steps between checkpoints, for ``skip`` with time.
        wandb, mlflow: the project, or the experiment, to which rows are sent.
        metrics_port: where Prometheus asks for figures.
        init_from: absolute path of the weights that training begins with.
        own_loop: mini-batches come from calls of a script's own loop.
        plan_only: the facts of the layers are the whole job.
        evaluate_only: one evaluation pass of the weights at `resume` is the whole job.
        resume: absolute path of the checkpoint that the run is resumed from; "" at its beginning.
        resume_step: the step of that checkpoint.

    Raises:
        UsageError: an option is out of its range.
    """

    job_file: str
    stages: int
    microbatches: int
    arguments: tuple[str, ...] = ()
    steps: int | None = None
    epochs: int | None = None
    schedule: str = DEFAULT_SCHEDULE
    virtual_stages: int | None = None
    recompute: str = "auto"
    balance: tuple[int, ...] | Literal["even"] | None = None
    memory: tuple[int, ...] | None = None
    no_profile: bool = False
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    precision: str = "fp32"
    accumulate: int = 1
    evaluate_every: int | str | None = None
    deferred_batch_norm: bool = False
    seed: int = 0
    threads: int = 1
    device: str = "auto"
    backend: str = "auto"
    interface: str | None = None
    stop_on_nan: bool = False
    worker_timeout: float = 60.0
    checkpoint_every: str = "30m"
    checkpoint_busy: str | None = None
    keep: int = 2
    best: str = BEST
    patience: int | None = None
    evaluate_first: bool = False
    snapshot_every: int | None = None
    max_restarts: int = 3
    min_stages: int | None = None
    init_from: str | None = None
    init_strict: bool = True
    own_loop: bool = False
    evaluate_only: bool = False
    plan_only: bool = False
    resume: str = ""
    resume_step: int = 0
    replicas: int = 1
    shard_optimizer: bool = False
    data_reader: str = "every"
    csv: bool = False
    tensorboard: bool = False
    wandb: str | None = None
    mlflow: str | None = None
    metrics_port: int | None = None
    compile: bool = False
    deterministic: bool = False
    profile_steps: str | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, int) and not least <= value <= most:
                bound = f"{least} or more" if value < least else f"{most} or less"
                raise UsageError(f"{written(name)} {value}: must be {bound}")
        if self.microbatches < self.replicas:
            raise UsageError(
                f"--microbatches {self.microbatches}: must be {self.replicas} or more, because "
                f"they are divided among {self.replicas} replicas"
            )
        if self.steps is not None and self.epochs is not None:
            raise UsageError(f"--steps {self.steps} and --epochs {self.epochs}: choose one")
        if isinstance(self.evaluate_every, str) and self.evaluate_every != EPOCH:
            raise UsageError(
                f"--evaluate-every {self.evaluate_every}: must be a number of steps, or {EPOCH}"
            )
        if not Criterion.parse(self.best).name:
            raise UsageError(f"--best {self.best}: must name a figure, as loss or max:accuracy")
        if not self.own_loop and not self.evaluate_every:
            for name, given in (("best", self.best != BEST), ("patience", self.patience)):
                if given and (name == "patience" or not self.evaluate_first):
                    option = f"--{name} {getattr(self, name)}"
                    raise UsageError(f"{option}: no evaluation is requested; add --evaluate-every")
        if not self.init_strict and self.init_from is None:
            raise UsageError("--no-init-strict: no file is given; add --init-from")
        Interval.parse(self.checkpoint_every)
        if self.min_stages is not None and not 1 <= self.min_stages <= self.stages:
            raise UsageError(
                f"--min-stages {self.min_stages}: must be 1 to {self.stages}, the number of stages"
            )
        for name in ("clip_grad_norm", "clip_grad_value", "worker_timeout"):
            bound = getattr(self, name)
            if bound is not None and not 0 < bound < math.inf:
                must = "finite" if bound == math.inf else "greater than 0"
                raise UsageError(f"{written(name)} {bound}: must be {must}")
        if self.worker_timeout > _LONGEST_TIMEOUT:
            must = f"must be {_LONGEST_TIMEOUT} seconds or less"
            raise UsageError(f"--worker-timeout {self.worker_timeout:g}: {must}")
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known and value is not None:
                option = f"{written(name)} {value}"
                raise UsageError(f"{option}: must be one of {', '.join(known)}")
        if self.profiled and self.steps is not None and self.profiled[0] > self.steps:
            raise UsageError(f"--profile {self.profile_steps}: the run ends with step {self.steps}")
        if self.stages * (self.virtual_stages or 1) > MAX_STAGES:
            raise UsageError(
                f"--virtual-stages {self.virtual_stages}: must be {MAX_STAGES // self.stages} or "
                f"less on {self.stages} workers"
            )
        stages = self.schedule_source.place(self.stages).stages
        if text.is_text(self.schedule):
            self._check_written()
        if self.schedule == AUTO and self.balance is not None:
            raise UsageError(
                "--schedule auto and --balance: each schedule that is tried has a balance of its "
                "own; leave --balance out, or name a schedule"
            )
        if isinstance(self.balance, tuple):
            check_entries(self.balance, stages)
        if self.memory is not None and len(self.memory) not in (1, self.stages):
            raise UsageError(
                f"--memory has {len(self.memory)} sizes, and a replica has "
                f"{plural(self.stages, 'worker')}; write one size for all of them, or one for each"
            )

    def _check_written(self) -> None:
        """Check that a schedule of the job's own fits the other options."""
        option, most = (
            f"--schedule {text.name_of(self.schedule)}",
            self.schedule_source.microbatches,
        )
        part = len(block(self.microbatches, self.replicas, 0))
        if part != most and not self.evaluate_only:
            of_replica = " in a replica" if self.replicas > 1 else ""
            raise UsageError(
                f"{option}: is for {plural(most or 0, 'micro-batch')}, and the job has {part}"
                f"{of_replica}; use --microbatches {(most or 0) * self.replicas}, or another "
                "schedule"
            )
        if self.recompute not in ("auto", OFFLOAD):
            raise UsageError(
                f"{option} and --recompute {self.recompute}: the schedule has an R for each "
                "recomputed micro-batch; leave --recompute out, and edit the schedule"
            )

    @property
    def schedule_source(self) -> Order:
        """The source of the job's schedules."""
        return resolve(self.schedule, self.virtual_stages)

    @property
    def placement(self) -> Placement:
        """The assignment of stages to the workers of replicas."""
        return self.schedule_source.place(self.stages, self.replicas)

    @property
    def workers(self) -> int:
        """The number of worker processes, over all replicas."""
        return self.placement.ranks

    def with_stages(self, stages: int) -> Options:
        """Return the same options for another number of stages, whose layers are divided anew.

        A schedule of the job's own is for its number of workers; others run the default one.
        """
        if stages == self.stages:
            return self
        changed: dict[str, Any] = {"stages": stages}
        if self.balance != EVEN:
            changed["balance"] = None
        if self.memory is not None:
            changed["memory"] = (*self.memory, *(self.memory[-1:] * stages))[:stages]
        if self.min_stages is not None:  # the last snapshot is saved by fewer than the minimum
            changed["min_stages"] = min(self.min_stages, stages)
        if text.is_text(self.schedule):
            changed |= {"schedule": DEFAULT_SCHEDULE, "virtual_stages": None}
        return dataclasses.replace(self, **changed)

    @property
    def waits_for_checkpoints(self) -> bool:
        """Whether a checkpoint that is due is written, however long earlier ones take."""
        if self.checkpoint_busy is None:
            return Interval.parse(self.checkpoint_every).steps > 0
        return self.checkpoint_busy == "wait"

    @property
    def redundant(self) -> bool:
        """Whether each replica has the whole state: weights, optimizer state, and data position."""
        return self.replicas > 1 and not self.shard_optimizer and self.data_reader == "every"

    @property
    def trains(self) -> bool:
        """Whether the job runs steps on mini-batches of ``data()``."""
        return not self.own_loop and not self.evaluate_only

    @property
    def loggers(self) -> tuple[str, ...]:
        """The options that are given of those that pass rows on to other programs."""
        return tuple(name for name in LOGGERS if getattr(self, name) is not None)

    @property
    def is_planned(self) -> bool:
        """Whether facts of the layers decide the plan; the input of an own loop comes too late."""
        chosen = self.balance is None or self.recompute == "auto" or self.schedule == AUTO
        return self.plan_only or (self.trains and chosen)

    @property
    def passes(self) -> int | None:
        """The number of passes over the data; None if the job has a number of steps instead."""
        return None if self.steps is not None else self.epochs or 1

    @property
    def profiled(self) -> tuple[int, int] | None:
        """The first and the last step to profile; None if there is none.

        Raises:
            UsageError: the option is not two numbers of steps.
        """
        if self.profile_steps is None:
            return None
        found = _STEPS.fullmatch(self.profile_steps)
        first, last = map(int, found.groups()) if found else (0, 0)
        if not 1 <= first <= last:
            raise UsageError(
                f"--profile {self.profile_steps}: must be the first and the last step to profile, "
                "as 10:12"
            )
        return first, last

    @property
    def has_default_microbatches(self) -> bool:
        """Whether the number of micro-batches is the default one."""
        return self.microbatches == default_microbatches(self.stages, self.replicas)

    def total_steps(self, epoch_length: int) -> int:
        """Return the number of steps of the run, 0 if unknown; a step ends with its epoch.

        `epoch_length` is the number of mini-batches of an epoch, 0 if it is unknown.
        """
        return self.steps or (self.passes or 0) * -(-epoch_length // self.accumulate)

    def evaluates(self, step: int, *, epoch_ended: bool) -> bool:
        """Return whether an evaluation pass follows a step, which may be the last of its epoch."""
        every = self.evaluate_every
        return epoch_ended if every == EPOCH else isinstance(every, int) and step % every == 0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Options:
        """Read what :meth:`to_json` wrote.

        Raises:
            ProtocolError: the text is not JSON, or has other options.
            UsageError: as :meth:`of`.
        """
        with suppress(ValueError, RecursionError):
            fields = json.loads(text)
            if type(fields) is dict and fields.keys() == _NAMES:
                return Options.of(fields)
        raise ProtocolError("not a job's options")

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Options:
        """Return options from values as JSON has them; missing ones have their defaults.

        Raises:
            UsageError: an option is unknown, of the wrong type or out of its range, or a required
                one is missing.
        """
        if unknown := sorted(fields.keys() - _NAMES):
            raise UsageError(f"there is no option {reprlib.repr(unknown[0])}")
        if missing := sorted(_REQUIRED - fields.keys()):
            raise UsageError(f"the option {missing[0]} is missing")
        return _convert(fields, Options)


def check_types(fields: Mapping[str, Any]) -> None:
    """Check the types of options of any version: none need be there, and others may be.

    Raises:
        UsageError: an option is of the wrong type.
    """
    _convert(fields, _Recorded)


def _convert(fields: Mapping[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(dict(fields), kind)
    except msgspec.ValidationError as error:
        name = str(error).partition("$.")[2].strip("`").partition("[")[0]
        given = f"{written(name)} {reprlib.repr(fields.get(name))}"
        if found := _MISMATCH.match(str(error)):
            wanted = found[1].replace(" | null", "")
            raise UsageError(f"{given}: must be of type {wanted}, not {found[2]}") from None
        raise UsageError(f"{given}: is invalid") from None
    except UnicodeEncodeError as error:  # a text in place of another type
        raise UsageError(f"an option is {reprlib.repr(error.object)}, which is no text") from None


_Recorded = msgspec.defstruct(
    "_Recorded", [(name, kind | None, None) for name, kind in get_type_hints(Options).items()]
)
_NAMES = {field.name for field in dataclasses.fields(Options)}
_REQUIRED = {f.name for f in dataclasses.fields(Options) if f.default is dataclasses.MISSING}
_MISMATCH = re.compile("Expected `(.+?)`, got `(.+?)`")


def override(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults with the `given` options that are not None in their place."""
    chosen = {name: value for name, value in given.items() if value is not None}
    excluded = {EXCLUSIVE.get(name) for name in chosen}
    return {**{name: value for name, value in defaults.items() if name not in excluded}, **chosen}
