"""The options of a job, as every process sees them. Imports neither torch nor the job file."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pipeworker.errors import ProtocolError, UsageError
from pipeworker.plan.orders import ORDERS, placement
from pipeworker.plan.partition import check_entries
from pipeworker.plan.schedule import RECOMPUTE_MODES

DEVICES = ("auto", "cpu", "cuda", "mps")
"""Accelerators of other kinds are taken by ``auto``."""
BACKENDS = ("auto", "gloo", "nccl", "tls")
WHEN_BUSY = ("skip", "wait")
READERS = ("every", "once")
PRECISIONS = ("fp32", "bf16", "fp16")
MOST_STAGES = 1 << 16
MOST_REPLICAS = 1 << 8  # each is connected to each other
MOST_MICROBATCHES = 1 << 20  # that messages can speak of
EPOCH = "epoch"
"""Said for a number of steps: at each end of the data."""
RIVALS = {"steps": "epochs", "epochs": "steps"}
"""Options of which one is said, or none."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_CHOICES: dict[str, Collection[str]] = {
    "schedule": ORDERS,
    "recompute": RECOMPUTE_MODES,
    "precision": PRECISIONS,
    "device": DEVICES,
    "backend": BACKENDS,
    "checkpoint_busy": WHEN_BUSY,
    "read_data": READERS,
}


@dataclass(frozen=True, slots=True)
class Every:
    """How often: after so many steps, or else after so many seconds."""

    steps: int = 0
    seconds: float = 0.0

    def due(self, step: int, seconds: float) -> bool:
        """Whether it is time again, at this step and so long after the last time."""
        return step % self.steps == 0 if self.steps else seconds >= self.seconds

    @staticmethod
    def parse(text: str) -> Every:
        """Read ``100`` (steps), ``90s``, ``30m`` or ``2h``.

        Raises:
            UsageError: it is nothing of that.
        """
        number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "")
        if not (number.isascii() and number.isdigit() and len(number) < 10 and int(number)):
            raise UsageError(
                f"--checkpoint-every {text}: must be a number of steps, as 100, or a time, as 30m"
            )
        return Every(seconds=int(number) * _UNITS[unit]) if unit else Every(int(number))


@dataclass(frozen=True, slots=True)
class Options:
    """What `pipeworker launch` was asked for; the meaning of each is in ``docs/options.md``.

    Attributes:
        job_file: absolute path of the job file.
        steps: optimizer steps; None for passes over the data.
        epochs: these; None for one. A step then ends with its epoch.
        balance: layers per stage; None to choose.
        evaluate_every: steps between evaluation passes, or EPOCH; None for none.
        accumulate: mini-batches an optimizer step.
        threads: intra-op threads per worker.
        interface: of each host, that carries what hosts say to each other; None to choose by route.
        worker_timeout: seconds after which a worker that does not answer is given up.
        checkpoint_every: steps between checkpoints, or time, as ``30m``; None: at the end alone.
        checkpoint_busy: what becomes of a checkpoint that is due while one is still being written.
        keep: checkpoints that stay; the oldest go.
        snapshot_every: steps between copies of the state in memory; None to choose by their cost.
        restarts: losses of workers within an hour that the job goes on after.
        elastic: stages that the job may go on with when a worker cannot be replaced; None: all.
        init_from: absolute path of the weights that training begins with.
        init_partial: they may be others than those of the model; what is of both is taken.
        own_loop: mini-batches come one call at a time from a loop of the user's own.
        resume: absolute path of the checkpoint that the run goes on from; empty at its beginning.
        resume_step: the step which that one holds.
        replicas: copies of the pipeline; micro-batches count over all of them.
        shard_optimizer: each replica updates a part of the weights, and keeps its state alone.
        read_data: by ``every`` replica, which keeps its part; or ``once``, by replica 0 for all.
        csv, tensorboard: figures are recorded in these formats as well.
        compile: each layer is compiled by ``torch.compile``.
        deterministic: kernels without a fixed order are refused.
    """

    job_file: str
    stages: int
    microbatches: int
    arguments: tuple[str, ...] = ()
    steps: int | None = None
    epochs: int | None = None
    schedule: str = "gpipe"
    recompute: str = "auto"
    balance: tuple[int, ...] | None = None
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
    checkpoint_every: str | None = None
    checkpoint_busy: str = "skip"
    keep: int = 2
    snapshot_every: int | None = None
    restarts: int = 3
    elastic: int | None = None
    init_from: str | None = None
    init_partial: bool = False
    own_loop: bool = False
    resume: str = ""
    resume_step: int = 0
    replicas: int = 1
    shard_optimizer: bool = False
    read_data: str = "every"
    csv: bool = False
    tensorboard: bool = False
    compile: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            *(("stages", 1), ("microbatches", 1), ("threads", 1)),
            *(("accumulate", 1), ("seed", 0), ("keep", 1), ("restarts", 0), ("replicas", 1)),
        ):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} {getattr(self, name)}: must be {least} or more")
        for name, most in (
            *(("stages", MOST_STAGES), ("microbatches", MOST_MICROBATCHES)),
            ("replicas", MOST_REPLICAS),
        ):
            if getattr(self, name) > most:
                raise UsageError(f"--{name} {getattr(self, name)}: must be {most} or less")
        if self.microbatches < self.replicas:
            raise UsageError(
                f"--microbatches {self.microbatches}: they count over all replicas, of which there "
                f"are {self.replicas}, so there must be {self.replicas} or more"
            )
        for name in ("seed", "steps", "epochs"):
            if (getattr(self, name) or 0) >= 1 << 63:
                raise UsageError(f"--{name} {getattr(self, name)}: must be less than 2**63")
        if self.steps is not None and self.epochs is not None:
            raise UsageError(f"--steps {self.steps} and --epochs {self.epochs}: choose one")
        if isinstance(self.evaluate_every, str) and self.evaluate_every != EPOCH:
            raise UsageError(
                f"--evaluate-every {self.evaluate_every}: must be a number of steps, or {EPOCH}"
            )
        for name in ("steps", "epochs", "evaluate_every", "snapshot_every"):
            count = getattr(self, name)
            if isinstance(count, int) and count < 1:
                raise UsageError(f"--{name.replace('_', '-')} {count}: must be 1 or more")
        if self.init_partial and self.init_from is None:
            raise UsageError("--init-partial is of --init-from: there is no file")
        if self.checkpoint_every is not None:
            Every.parse(self.checkpoint_every)
        if self.elastic is not None and not 1 <= self.elastic <= self.stages:
            raise UsageError(f"--elastic {self.elastic}: must be 1 to --stages {self.stages}")
        for name in ("clip_grad_norm", "clip_grad_value"):
            bound = getattr(self, name)
            if bound is not None and not bound > 0:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} {bound}: must be greater than 0")
        if not self.worker_timeout > 0:
            raise UsageError(f"--worker-timeout {self.worker_timeout}: must be greater than 0")

        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise UsageError(
                    f"--{name} {getattr(self, name)}: must be one of {', '.join(known)}"
                )
        if self.balance is not None:
            check_entries(self.balance, placement(self.schedule, self.stages).stages)

    @property
    def redundant(self) -> bool:
        """Whether another replica has all of the state: weights, optimizer's, and place in data."""
        alike = not self.shard_optimizer and self.read_data == "every"
        return self.replicas > 1 and alike

    @property
    def passes(self) -> int | None:
        """Over the data; None where its end is not the job's."""
        return None if self.steps is not None else self.epochs or 1

    def evaluates(self, step: int, *, epoch_ended: bool) -> bool:
        """Whether an evaluation pass comes after a step."""
        every = self.evaluate_every
        return epoch_ended if every == EPOCH else isinstance(every, int) and step % every == 0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Options:
        """Read :meth:`to_json`.

        Raises:
            ProtocolError: it is not that.
            UsageError: an option is out of its range.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolError("not a job's options") from error
        if type(fields) is not dict or fields.keys() != _HINTS.keys():
            raise ProtocolError("not a job's options")
        return Options.of(fields)

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Options:
        """Of values as JSON gave them; what is not there is the default.

        Raises:
            ProtocolError: one is of the wrong type, unknown, or one without a default is missing.
            UsageError: an option is out of its range.
        """
        if unknown := sorted(fields.keys() - _HINTS.keys()):
            raise ProtocolError(f"there is no option {reprlib.repr(unknown[0])}")
        if missing := sorted(_REQUIRED - fields.keys()):
            raise ProtocolError(f"the option {missing[0]} is missing")
        return Options(**{name: _read(value, _HINTS[name]) for name, value in fields.items()})


_HINTS: dict[str, str] = {field.name: str(field.type) for field in dataclasses.fields(Options)}
_REQUIRED = {f.name for f in dataclasses.fields(Options) if f.default is dataclasses.MISSING}


def _read(value: Any, hint: str) -> Any:
    """A value as JSON gave it, for a field with this annotation."""
    kinds = hint.split(" | ")
    if value is None and "None" in kinds:
        return None
    if kinds[0].startswith("tuple[") and type(value) is list:
        return tuple([_read(item, kinds[0][len("tuple[") : -len(", ...]")]) for item in value])
    if type(value).__name__ in kinds or (kinds[0] == "float" and type(value) is int):
        return value
    raise ProtocolError(f"an option is a {type(value).__name__}, not a {kinds[0]}")
