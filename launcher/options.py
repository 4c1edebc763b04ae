"""The options of `launch` and of a torchrun rank, by group."""

from __future__ import annotations

import platform
import sys
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import click

from launcher.choose import CLUSTERS
from launcher.command import NonEmptyPath, Option
from pipeworker.display.style import OUTPUTS
from pipeworker.job.options import (
    BACKENDS,
    CHECKPOINT_BUSY,
    DATA_READERS,
    DEVICES,
    PRECISIONS,
    Options,
)
from pipeworker.job.renamed import hyphened, written
from pipeworker.plan.orders import AUTO, ORDERS
from pipeworker.plan.recompute import RECOMPUTE_MODES
from pipeworker.runs.schedule_file import read_schedule

ANYWHERE = (
    "A new run also takes options of a job from variables, as PIPEWORKER_STEPS=100, and from "
    "pipeworker.toml: see docs/commands.md."
)
"""The epilog of the help of a job's commands."""

_PATH = NonEmptyPath(readable=False)
"""A path whose readability is checked when it is read: click checks for the real user only."""
_HINTS = get_type_hints(Options)
_DEFAULTS = {field.name: field.default for field in fields(Options)}
_NODES = ("nvidiactl", "nvidia0", "dxg", "kfd")
"""Files in /dev that the driver of an accelerator of type ``cuda`` creates."""


class _Offered(click.Choice):  # type: ignore[type-arg]
    """A choice that shows the values for this host and accepts those for other hosts.

    The job may run on another host, and a value is checked where the job runs.
    """

    def __init__(self, offered: tuple[str, ...], elsewhere: tuple[str, ...]) -> None:
        super().__init__(offered)
        self._elsewhere = elsewhere

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if value in self._elsewhere else super().convert(value, param, ctx)


class ScheduleType(click.ParamType):  # type: ignore[type-arg]
    """The name of an order, or a schedule file, whose text is the value."""

    name = "schedule"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        return read_schedule(value)


def devices_here(
    system: Path = Path("/dev"), machine: str = f"{sys.platform} {platform.machine()}"
) -> tuple[str, ...]:
    """Return the DEVICES that this host seems to have, without importing torch."""
    torch = find_spec("torch")
    library = Path(torch.origin or "").parent / "lib" if torch else Path()
    built = any((library / f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip"))
    here = {
        "auto": True,
        "cpu": True,
        "cuda": built and any((system / node).exists() for node in _NODES),
        "mps": machine == "darwin arm64",
    }
    return tuple(name for name in DEVICES if here.get(name, False))


def backends_here(devices: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return the BACKENDS of a host with these devices."""
    cuda = "cuda" in (devices_here() if devices is None else devices)
    return tuple(name for name in BACKENDS if cuda or name != "nccl")


def _of(name: str, text: str, kind: Any = None, **settings: Any) -> Option:
    """Return the option of a field of Options, with its type and its default value.

    A default that the help explains by itself is decided later than here.
    """
    types, default = {*(get_args(_HINTS[name]) or (_HINTS[name],))} - {NoneType}, _DEFAULTS[name]
    if types == {bool}:
        return Option(f"{written(name)}/--no-{hyphened(name)}", text)
    if default not in (None, MISSING) and "[default:" not in text:
        settings["default"] = default
    numbers = types if types <= {int, float} else {None}
    return Option(written(name), text, kind or next(iter(numbers)), **settings)


def _in(group: str, *options: Option, once: bool = False) -> list[click.Parameter]:
    for option in options:
        option.group, option.once, option.allow_from_autoenv = group, once, not once
    return [*options]


JOB_PARAMETERS: list[click.Parameter] = [
    click.Argument(["job_file"], metavar="JOB_FILE", type=_PATH, required=False),
    click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED),
    *_in(
        "Workers",
        _of("replicas", "Copies of the pipeline, each with a part of every mini-batch."),
        _of("threads", "Intra-op threads of a worker. [default: OMP_NUM_THREADS, 1]"),
        _of(
            "device",
            "Where stages compute; auto: on accelerators, if the host has any.",
            _Offered(devices_here(), DEVICES),
        ),
        _of(
            "backend",
            "How tensors are sent; auto: by shared memory on a host, by gloo between hosts, and "
            "directly between accelerators where they can. tls encrypts between hosts.",
            _Offered(backends_here(), BACKENDS),
        ),
        _of(
            "interface",
            "Network interface between hosts, as eth1. [default: by route]",
            metavar="NAME",
        ),
        _of("worker_timeout", "Seconds of silence after which a worker counts as lost."),
    ),
    *_in(
        "Training",
        _of("steps", "Number of optimizer steps; data() starts again when it ends."),
        _of("epochs", "Number of passes over data(). [default: 1]"),
        _of(
            "microbatches",
            "Micro-batches per mini-batch, over all replicas. [default: 4 × stages × replicas]",
        ),
        _of("accumulate", "Mini-batches per optimizer step."),
        _of(
            "evaluate_every",
            "Steps between evaluation passes, or epoch: at each end of data(). [default: off]",
            metavar="N",
        ),
        _of("evaluate_first", "Also evaluate before the first step."),
        _of(
            "patience",
            "Evaluations without a better one (--best) after which the job ends. [default: off]",
        ),
        _of(
            "data_reader",
            "Which replica reads data(): every one, each keeping its part, or the first for all.",
            click.Choice(DATA_READERS),
        ),
        _of("init_from", "Initial weights.", _PATH, metavar="FILE"),
        Option(
            ("init_strict", " /--init-partial", "--init-strict/--no-init-strict"),
            "Load the weights whose names and shapes match; leave the others as they are built.",
            written="--no-init-strict",
        ),
        _of("stop_on_nan", "End the run when the loss or gradient is not finite."),
    ),
    *_in(
        "Numbers",
        _of("seed", "Seed of initial weights, data and dropout."),
        _of(
            "precision",
            "Precision of the layers, by autocast; fp16 scales the loss.",
            click.Choice(PRECISIONS),
        ),
        _of("clip_grad_norm", "Bound on the global gradient norm. [default: off]"),
        _of("clip_grad_value", "Bound on each gradient element. [default: off]"),
        _of("deferred_batch_norm", "Batch-norm statistics of the whole mini-batch."),
        _of(
            "compile",
            "Compile each layer with torch.compile; rounding differs from uncompiled layers.",
        ),
        _of("deterministic", "Use only deterministic kernels; an operator without one raises."),
        Option(
            "--profile --profile-steps profile_steps",
            "Profile the steps A to B by torch.profiler, a file for each worker. [default: off]",
            metavar="A:B",
            written="--profile A:B",
        ),
        _of("trace", "Record the actions of every step, instead of some steps."),
    ),
    *_in(
        "Schedule and memory",
        _of(
            "schedule",
            f"Order of a worker's micro-batches: {', '.join(ORDERS)}; {AUTO}: the fastest that is "
            "found; or a schedule file.",
            ScheduleType(),
            metavar="NAME",
        ),
        _of(
            "virtual_stages",
            "Stages of each worker, for --schedule interleaved-1f1b. [default: 2]",
            metavar="V",
        ),
        _of(
            "recompute",
            "Which micro-batches run forward again before backward, to save memory; auto: those "
            "that must; offload: none, but an accelerator's saved tensors are kept in the host's "
            "memory.",
            click.Choice(RECOMPUTE_MODES),
        ),
        _of(
            "balance",
            "Layers of each stage, as 3,5,5,3, or even. [default: by the time of each layer]",
            metavar="N,N,...",
        ),
        _of(
            "memory",
            "Memory of a worker, as 16GB, or of each, as 16GB,8GB. [default: that of the device, "
            "or of the host]",
            metavar="SIZE",
        ),
        Option(
            "--no-profile",
            "Plan by counted operations instead of the measured times of layers.",
            is_flag=True,
        ),
        _of(
            "shard_optimizer",
            "Each replica updates a part of the weights, and keeps only its optimizer state.",
        ),
    ),
    *_in(
        "Checkpoints and recovery",
        _of(
            "checkpoint_every",
            "Steps between checkpoints, or time, as 30m, or end: only at the end.",
            metavar="N",
        ),
        _of(
            "checkpoint_busy",
            "What to do with a checkpoint that is due while earlier ones are being written. "
            "[default: wait with steps between checkpoints, skip with time]",
            click.Choice(CHECKPOINT_BUSY),
        ),
        _of("keep", "Number of checkpoints to keep."),
        _of(
            "best",
            "Figure of evaluation() by which the best checkpoint is kept too; max:accuracy where "
            "more is better.",
            metavar="NAME",
        ),
        _of("max_restarts", "Worker losses within an hour that the job recovers from."),
        _of(
            "min_stages",
            "Continue with fewer stages, down to MIN, when a worker cannot be replaced.",
            metavar="MIN",
        ),
        _of("snapshot_every", "Steps between snapshots in memory. [default: by their cost]"),
    ),
    *_in(
        "Resume",
        Option(
            "--resume",
            "Continue the run in --run-dir, or in a directory RUN given here, with its options "
            "unless they are given.",
            is_flag=True,
        ),
        Option(
            "--auto-resume", "Resume if --run-dir holds a run, else start one there.", is_flag=True
        ),
        Option(
            "--allow-change",
            "An option that may differ from the run's, as seed. Repeatable.",
            multiple=True,
            metavar="NAME",
        ),
        once=True,
    ),
    *_in(
        "Project file",
        Option(
            "--config",
            "File with options and arguments. [default: pipeworker.toml or pyproject.toml]",
            _PATH,
            metavar="FILE",
        ),
        once=True,
    ),
    *_in(
        "Output",
        Option(
            "--run-dir",
            "Run directory. [default: runs/<file stem>-<time>]",
            _PATH,
            metavar="FOLDER",
        ),
        _of("csv", "Also write metrics.csv and evaluation.csv."),
        _of("tensorboard", "Also write files for TensorBoard, to RUN/tensorboard."),
        _of("wandb", "Also send rows to this project of wandb.", metavar="PROJECT"),
        _of("mlflow", "Also send rows to this experiment of MLflow.", metavar="EXPERIMENT"),
        _of("metrics_port", "Serve figures for Prometheus on this port.", metavar="PORT"),
        Option("--log-every", "Steps between progress lines. [default: one line a second]", int),
        Option(
            "--output",
            "Which workers' output is shown: of the first and last stage (stage), all or none. "
            "[default: stage]",
            click.Choice(OUTPUTS),
        ),
    ),
    *_in(
        "Output",
        Option("--json", "Print events for programs, a JSON object a line.", is_flag=True),
        Option("-q --quiet", "Show only warnings and errors.", is_flag=True),
        Option("-v --verbose", "Show more of each step, and pipeworker's log.", is_flag=True),
        once=True,
    ),
]
"""The parameters of any job: those of a torchrun rank."""

LAUNCH_PARAMETERS = [
    *_in("Workers", Option("--stages", "Pipeline stages. [default: one per accelerator]", int)),
    *_in(
        "Workers",
        Option(
            "--debug", "With --stages 1: breakpoint() and input() use this terminal.", is_flag=True
        ),
        once=True,
    ),
    *_in(
        "Other hosts",
        Option("--hosts", "Hosts that ssh reaches, each with its workers.", metavar="A:2,B:2"),
        Option(
            "--hosts-file",
            "The same in a file: a host, its workers and its python per line.",
            _PATH,
            metavar="FILE",
        ),
        Option("--sync", "Send the job file's folder to the hosts first.", is_flag=True),
        Option(
            "--launcher-address",
            "Address of this host for the others, behind a jump host. [default: as they see it]",
            metavar="ADDRESS",
        ),
        Option("--on", "The cluster that runs the job.", click.Choice([*CLUSTERS])),
        Option("--nodes", "Hosts of the cluster. [default: 1]", int),
        Option(
            "--set settings",
            "A setting of the cluster's request, as image=IMAGE. Repeatable.",
            multiple=True,
            metavar="NAME=VALUE",
        ),
        Option("--dry-run", "Only print what would be submitted.", is_flag=True),
        once=True,
    ),
    *JOB_PARAMETERS,
]
"""The parameters of `launch`: where the job runs, and those of any job."""
