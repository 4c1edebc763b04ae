"""The options of `launch` and of a torchrun rank, by group."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from launcher.choose import CLUSTERS
from launcher.command import Option
from launcher.templates import EXAMPLES
from pipeworker.display.style import OUTPUTS
from pipeworker.job.options import BACKENDS, CHECKPOINT_BUSY, DATA_READERS, DEVICES, PRECISIONS
from pipeworker.plan.orders import ORDERS
from pipeworker.plan.recompute import RECOMPUTE_MODES

Function = Callable[..., Any]
Decorate = Callable[[Function], Function]

ANYWHERE = (
    "A new run also takes options of a job from variables, as PIPEWORKER_STEPS=100, and from "
    "pipeworker.toml: see docs/commands.md."
)
"""The epilog of the help of a job's commands."""

_PATH = click.Path(readable=False)
"""A path whose readability is checked when it is read: click checks for the real user only."""
_METAVARS = {int: "N", float: "X"}
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


def devices_here(
    system: Path = Path("/dev"), machine: str = f"{sys.platform} {platform.machine()}"
) -> tuple[str, ...]:
    """Return the DEVICES that this host seems to have, without importing torch."""
    torch = find_spec("torch")
    library = Path(torch.origin or "").parent / "lib" if torch else Path()
    built = any((library / f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip"))
    here = {
        "cuda": built and any((system / node).exists() for node in _NODES),
        "mps": machine == "darwin arm64",
    }
    return tuple(name for name in DEVICES if here.get(name, True))


def backends_here(devices: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return the BACKENDS of a host with these devices."""
    cuda = "cuda" in (devices_here() if devices is None else devices)
    return tuple(name for name in BACKENDS if cuda or name != "nccl")


def _option(
    name: str | tuple[str, ...], text: str, kind: Any = None, **how: Any
) -> Callable[..., Decorate]:
    """Declare an option for a group; the help shows its default value if it has one."""
    words = name.split() if isinstance(name, str) else name
    shown = "default" in how
    if kind in _METAVARS:
        how.setdefault("metavar", _METAVARS[kind])
    return partial(
        click.option, *words, cls=Option, help=text, type=kind, show_default=shown, **how
    )


def _choice(name: str, values: tuple[str, ...], default: str, text: str) -> Callable[..., Decorate]:
    return _option(name, text, click.Choice(values), default=default)


def _in(group: str, *options: Callable[..., Decorate], once: bool = False) -> list[Decorate]:
    return [option(group=group, once=once) for option in options]


_flag = partial(_option, is_flag=True)
_many = partial(_option, multiple=True)

_WORKERS = "Workers"
_HOSTS = "Other hosts"
_TRAINING = "Training"
_NUMBERS = "Numbers"
_SCHEDULE = "Schedule and memory"
_KEPT = "Checkpoints and recovery"
_RESUMED = "Resume"
_OUTPUT = "Output"

_STAGES = _in(_WORKERS, _option("--stages", "Pipeline stages. [default: one per accelerator]", int))
_ELSEWHERE = _in(
    _HOSTS,
    _option("--hosts", "Hosts that ssh reaches, each with its workers.", metavar="A:2,B:2"),
    _option(
        "--hosts-file",
        "The same in a file: a host, its workers and its python per line.",
        _PATH,
        metavar="FILE",
    ),
    _flag("--sync", "Send the job file's folder to the hosts first."),
    _option("--on", "The cluster to submit the job to.", click.Choice([*CLUSTERS])),
    _option("--nodes", "Hosts of the cluster. [default: 1]", int),
    _many(
        *("--set settings", "A setting of the cluster's request, as image=IMAGE. Repeatable."),
        metavar="NAME=VALUE",
    ),
    _flag("--dry-run", "Only print what would be submitted."),
    once=True,
)

_HERE = _in(
    _WORKERS,
    _flag("--debug", "With --stages 1: breakpoint() and input() use this terminal."),
    once=True,
)

_OF_JOB = [
    *_in(
        _WORKERS,
        _option(
            "--replicas",
            "Copies of the pipeline, each with a part of every mini-batch.",
            int,
            default=1,
        ),
        _option("--threads", "Intra-op threads of a worker. [default: OMP_NUM_THREADS, 1]", int),
        _option(
            "--device",
            "Where stages compute; auto: on accelerators, if the host has any.",
            _Offered(devices_here(), DEVICES),
            default="auto",
        ),
        _option(
            "--backend",
            "How tensors are sent; auto: by shared memory on a host, by gloo between hosts, and "
            "directly between accelerators where they can. tls encrypts between hosts.",
            _Offered(backends_here(), BACKENDS),
            default="auto",
        ),
        _option(
            "--interface",
            "Network interface between hosts, as eth1. [default: by route]",
            metavar="NAME",
        ),
        _option(
            "--worker-timeout",
            "Seconds of silence after which a worker counts as lost.",
            float,
            default=60.0,
        ),
    ),
    *_in(
        _TRAINING,
        _option("--steps", "Number of optimizer steps; data() starts again when it ends.", int),
        _option("--epochs", "Number of passes over data(). [default: 1]", int),
        _option(
            "--microbatches",
            "Micro-batches per mini-batch, over all replicas. [default: 4 × stages × replicas]",
            int,
        ),
        _option("--accumulate", "Mini-batches per optimizer step.", int, default=1),
        _option(
            "--evaluate-every",
            "Steps between evaluation passes, or epoch: at each end of data(). [default: off]",
            metavar="N",
        ),
        _choice(
            *("--data-reader", DATA_READERS, "every"),
            "Which replica reads data(): every one, each keeping its part, or the first for all.",
        ),
        _option("--init-from", "Initial weights.", _PATH, metavar="FILE"),
        _option(
            ("init_strict", " /--init-partial", "--init-strict/--no-init-strict"),
            "Load the weights whose names and shapes match; leave the others as they are built.",
            written="--no-init-strict",
        ),
        _option("--stop-on-nan/--no-stop-on-nan", "End the run when the loss is not finite."),
    ),
    *_in(
        _NUMBERS,
        _option("--seed", "Seed of initial weights, data and dropout.", int, default=0),
        _choice(
            *("--precision", PRECISIONS, "fp32"),
            "Precision of the layers, by autocast; fp16 scales the loss.",
        ),
        _option("--clip-grad-norm", "Bound on the global gradient norm. [default: off]", float),
        _option("--clip-grad-value", "Bound on each gradient element. [default: off]", float),
        _option(
            "--deferred-batch-norm/--no-deferred-batch-norm",
            "Batch-norm statistics of the whole mini-batch.",
        ),
        _option(
            "--compile/--no-compile",
            "Compile each layer with torch.compile; rounding differs from uncompiled layers.",
        ),
        _option(
            "--deterministic/--no-deterministic",
            "Use only deterministic kernels; an operator without one raises.",
        ),
    ),
    *_in(
        _SCHEDULE,
        _choice("--schedule", tuple(ORDERS), "gpipe", "Order in which micro-batches run."),
        _choice(
            *("--recompute", RECOMPUTE_MODES, "auto"),
            "Which micro-batches run forward again before backward, to save memory; offload: none, "
            "but an accelerator's saved tensors are kept in the host's memory.",
        ),
        _option(
            "--balance", "Layers of each stage, as 3,5,5,3. [default: even]", metavar="N,N,..."
        ),
        _option(
            "--shard-optimizer/--no-shard-optimizer",
            "Each replica updates a part of the weights, and keeps only its optimizer state.",
        ),
    ),
    *_in(
        _KEPT,
        _option(
            "--checkpoint-every",
            "Steps between checkpoints, or time, as 30m. [default: only at the end]",
            metavar="N",
        ),
        _choice(
            *("--checkpoint-busy", CHECKPOINT_BUSY, "skip"),
            "What to do with a checkpoint that is due while another one is being written.",
        ),
        _option("--keep", "Number of checkpoints to keep.", int, default=2),
        _option(
            "--max-restarts",
            "Worker losses within an hour that the job recovers from.",
            int,
            default=3,
        ),
        _option(
            "--min-stages",
            "Continue with fewer stages, down to MIN, when a worker cannot be replaced.",
            int,
            metavar="MIN",
        ),
        _option(
            "--snapshot-every", "Steps between snapshots in memory. [default: by their cost]", int
        ),
    ),
    *_in(
        _RESUMED,
        _flag("--resume", "Continue the run in --run-dir, with its options unless they are given."),
        _flag("--auto-resume", "Resume if --run-dir holds a run, else start one there."),
        _many(
            *("--allow-change", "An option that may differ from the run's, as seed. Repeatable."),
            metavar="NAME",
        ),
        once=True,
    ),
    *_in(
        _OUTPUT,
        _option(
            "--run-dir",
            "Run directory. [default: runs/<file stem>-<time>]",
            _PATH,
            metavar="FOLDER",
        ),
        _option("--csv/--no-csv", "Also write metrics.csv and evaluation.csv."),
        _option(
            "--tensorboard/--no-tensorboard",
            "Also write files for TensorBoard, to RUN/tensorboard.",
        ),
        _option(
            "--log-every",
            "Steps between progress lines. [default: one line a second]",
            int,
            metavar="N",
        ),
        _option(
            "--output",
            "Which workers' output is shown: of the first and last stage (stage), all or none. "
            "[default: stage]",
            click.Choice(OUTPUTS),
        ),
    ),
    *_in(
        _OUTPUT,
        _flag("-q --quiet", "Show only warnings and errors."),
        _flag("-v --verbose", "Show more of each step, and pipeworker's log."),
        once=True,
    ),
]


def _all(decorators: list[Decorate], function: Function) -> Function:
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


def job_options(function: Function) -> Function:
    """Add the job file and the options of a job, for `launch` and a torchrun rank."""
    arguments = [
        click.argument("job_file", metavar="JOB_FILE", type=_PATH),
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
    ]
    return _all([*arguments, *_OF_JOB], function)


def launch_options(function: Function) -> Function:
    """Add the options of `launch`: where the job runs, and those of any job."""
    return _all([*_STAGES, *_HERE, *_ELSEWHERE], job_options(function))


def init_options(function: Function) -> Function:
    """Add the options of `init`."""
    text = "; ".join(f"{name}: {what}" for name, what in EXAMPLES.items())
    return _all(_in("Options", _choice("--example", tuple(EXAMPLES), "mlp", f"{text}.")), function)


def export_options(function: Function) -> Function:
    """Add the options of `export`."""
    of_export = _in(
        "Options",
        _option(
            "--dtype",
            "Data type of floating tensors. [default: as they are]",
            click.Choice(PRECISIONS),
        ),
        _option(
            "--shard-size",
            "Largest size of each file in a folder, as 500MB. [default: 5GB]",
            metavar="SIZE",
        ),
    )
    return _all(of_export, function)
