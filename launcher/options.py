"""The options of `launch` and of a torchrun rank, by group."""

from __future__ import annotations

import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from launcher.choose import CLUSTERS
from launcher.command import Option
from pipeworker.display.style import OUTPUTS
from pipeworker.job.options import (
    BACKENDS,
    BEST,
    CHECKPOINT_BUSY,
    DATA_READERS,
    DEVICES,
    PRECISIONS,
)
from pipeworker.plan.orders import AUTO, DEFAULT_SCHEDULE, ORDERS
from pipeworker.plan.recompute import RECOMPUTE_MODES
from pipeworker.runs.schedule_file import read_schedule

ANYWHERE = (
    "A new run also takes options of a job from variables, as PIPEWORKER_STEPS=100, and from "
    "pipeworker.toml: see docs/commands.md."
)
"""The epilog of the help of a job's commands."""

_PATH = click.Path(readable=False)
"""A path whose readability is checked when it is read: click checks for the real user only."""
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


def _choice(name: str, values: tuple[str, ...], default: str, text: str) -> Option:
    return Option(name, text, click.Choice(values), default=default)


def _in(group: str, *options: Option, once: bool = False) -> list[click.Parameter]:
    for option in options:
        option.group, option.once, option.allow_from_autoenv = group, once, not once
    return [*options]


JOB_PARAMETERS: list[click.Parameter] = [
    click.Argument(["job_file"], metavar="JOB_FILE", type=_PATH, required=False),
    click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED),
    *_in(
        "Workers",
        Option(
            "--replicas",
            "Copies of the pipeline, each with a part of every mini-batch.",
            int,
            default=1,
        ),
        Option("--threads", "Intra-op threads of a worker. [default: OMP_NUM_THREADS, 1]", int),
        Option(
            "--device",
            "Where stages compute; auto: on accelerators, if the host has any.",
            _Offered(devices_here(), DEVICES),
            default="auto",
        ),
        Option(
            "--backend",
            "How tensors are sent; auto: by shared memory on a host, by gloo between hosts, and "
            "directly between accelerators where they can. tls encrypts between hosts.",
            _Offered(backends_here(), BACKENDS),
            default="auto",
        ),
        Option(
            "--interface",
            "Network interface between hosts, as eth1. [default: by route]",
            metavar="NAME",
        ),
        Option(
            "--worker-timeout",
            "Seconds of silence after which a worker counts as lost.",
            float,
            default=60.0,
        ),
    ),
    *_in(
        "Training",
        Option("--steps", "Number of optimizer steps; data() starts again when it ends.", int),
        Option("--epochs", "Number of passes over data(). [default: 1]", int),
        Option(
            "--microbatches",
            "Micro-batches per mini-batch, over all replicas. [default: 4 × stages × replicas]",
            int,
        ),
        Option("--accumulate", "Mini-batches per optimizer step.", int, default=1),
        Option(
            "--evaluate-every",
            "Steps between evaluation passes, or epoch: at each end of data(). [default: off]",
            metavar="N",
        ),
        Option("--evaluate-first/--no-evaluate-first", "Also evaluate before the first step."),
        Option(
            "--patience",
            "Evaluations without a better one (--best) after which the job ends. [default: off]",
            int,
        ),
        _choice(
            *("--data-reader", DATA_READERS, "every"),
            "Which replica reads data(): every one, each keeping its part, or the first for all.",
        ),
        Option("--init-from", "Initial weights.", _PATH, metavar="FILE"),
        Option(
            ("init_strict", " /--init-partial", "--init-strict/--no-init-strict"),
            "Load the weights whose names and shapes match; leave the others as they are built.",
            written="--no-init-strict",
        ),
        Option(
            "--stop-on-nan/--no-stop-on-nan", "End the run when the loss or gradient is not finite."
        ),
    ),
    *_in(
        "Numbers",
        Option("--seed", "Seed of initial weights, data and dropout.", int, default=0),
        _choice(
            *("--precision", PRECISIONS, "fp32"),
            "Precision of the layers, by autocast; fp16 scales the loss.",
        ),
        Option("--clip-grad-norm", "Bound on the global gradient norm. [default: off]", float),
        Option("--clip-grad-value", "Bound on each gradient element. [default: off]", float),
        Option(
            "--deferred-batch-norm/--no-deferred-batch-norm",
            "Batch-norm statistics of the whole mini-batch.",
        ),
        Option(
            "--compile/--no-compile",
            "Compile each layer with torch.compile; rounding differs from uncompiled layers.",
        ),
        Option(
            "--deterministic/--no-deterministic",
            "Use only deterministic kernels; an operator without one raises.",
        ),
        Option(
            "--profile --profile-steps profile_steps",
            "Profile the steps A to B by torch.profiler, a file for each worker. [default: off]",
            metavar="A:B",
            written="--profile A:B",
        ),
        Option(
            "--trace/--no-trace",
            "Record the actions of every step, instead of some steps.",
        ),
    ),
    *_in(
        "Schedule and memory",
        Option(
            "--schedule",
            f"Order of a worker's micro-batches: {', '.join(ORDERS)}; {AUTO}: the fastest that is "
            "found; or a schedule file.",
            ScheduleType(),
            default=DEFAULT_SCHEDULE,
            metavar="NAME",
        ),
        Option(
            "--virtual-stages",
            "Stages of each worker, for --schedule interleaved-1f1b. [default: 2]",
            int,
            metavar="V",
        ),
        _choice(
            *("--recompute", RECOMPUTE_MODES, "auto"),
            "Which micro-batches run forward again before backward, to save memory; auto: those "
            "that must; offload: none, but an accelerator's saved tensors are kept in the host's "
            "memory.",
        ),
        Option(
            "--balance",
            "Layers of each stage, as 3,5,5,3, or even. [default: by the time of each layer]",
            metavar="N,N,...",
        ),
        Option(
            "--memory",
            "Memory of a worker, as 16GB, or of each, as 16GB,8GB. [default: that of the device, "
            "or of the host]",
            metavar="SIZE",
        ),
        Option(
            "--no-profile",
            "Plan by counted operations instead of the measured times of layers.",
            is_flag=True,
        ),
        Option(
            "--shard-optimizer/--no-shard-optimizer",
            "Each replica updates a part of the weights, and keeps only its optimizer state.",
        ),
    ),
    *_in(
        "Checkpoints and recovery",
        Option(
            "--checkpoint-every",
            "Steps between checkpoints, or time, as 30m, or end: only at the end.",
            default="30m",
            metavar="N",
        ),
        _choice(
            *("--checkpoint-busy", CHECKPOINT_BUSY, "skip"),
            "What to do with a checkpoint that is due while another one is being written.",
        ),
        Option("--keep", "Number of checkpoints to keep.", int, default=2),
        Option(
            "--best",
            "Figure of evaluation() by which the best checkpoint is kept too; max:accuracy where "
            "more is better.",
            default=BEST,
            metavar="NAME",
        ),
        Option(
            "--max-restarts",
            "Worker losses within an hour that the job recovers from.",
            int,
            default=3,
        ),
        Option(
            "--min-stages",
            "Continue with fewer stages, down to MIN, when a worker cannot be replaced.",
            int,
            metavar="MIN",
        ),
        Option(
            "--snapshot-every", "Steps between snapshots in memory. [default: by their cost]", int
        ),
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
        Option("--csv/--no-csv", "Also write metrics.csv and evaluation.csv."),
        Option(
            "--tensorboard/--no-tensorboard",
            "Also write files for TensorBoard, to RUN/tensorboard.",
        ),
        Option("--wandb", "Also send rows to this project of wandb.", metavar="PROJECT"),
        Option("--mlflow", "Also send rows to this experiment of MLflow.", metavar="EXPERIMENT"),
        Option("--metrics-port", "Serve figures for Prometheus on this port.", int, metavar="PORT"),
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
