"""What can be said of a job: the options of `launch`, and of a rank of a torchrun job."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from launcher.choose import ELSEWHERE
from launcher.command import Option
from launcher.templates import EXAMPLES
from pipeworker.job.options import BACKENDS, DEVICES, PRECISIONS, READERS, WHEN_BUSY
from pipeworker.plan.orders import ORDERS
from pipeworker.plan.schedule import RECOMPUTE_MODES
from pipeworker.session.show.view import OUTPUTS

Function = Callable[..., Any]
Decorate = Callable[[Function], Function]

ANYWHERE = (
    "For a run that begins, options of a job may also be said by variables, as "
    "PIPEWORKER_STEPS=100, or in pipeworker.toml: see docs/commands.md."
)
"""Below the help of a job's commands."""

_PATH = click.Path(readable=False)
"""Whether it can be read is found where it is read: click asks as another user would."""
_METAVARS = {int: "N", float: "X"}
_NODES = ("nvidiactl", "nvidia0", "dxg", "kfd")
"""Of /dev, where a driver has an accelerator that torch calls ``cuda``."""


class _Offered(click.Choice):  # type: ignore[type-arg]
    """A choice that offers what works here.

    What works on other hosts is taken as well: the job may run there, and where it runs is where it
    is looked at.
    """

    def __init__(
        self,
        offered: tuple[str, ...],
        elsewhere: tuple[str, ...],
    ) -> None:
        super().__init__(offered)
        self._elsewhere = elsewhere

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if value in self._elsewhere else super().convert(value, param, ctx)


def devices_here(
    system: Path = Path("/dev"), machine: str = f"{sys.platform} {platform.machine()}"
) -> tuple[str, ...]:
    """Those of DEVICES that this host has, as far as can be seen without importing torch."""
    torch = find_spec("torch")
    library = Path(torch.origin or "").parent / "lib" if torch else Path()
    built = any((library / f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip"))
    here = {
        "cuda": built and any((system / node).exists() for node in _NODES),
        "mps": machine == "darwin arm64",
    }
    return tuple(name for name in DEVICES if here.get(name, True))


def backends_here(devices: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Those of BACKENDS that a host with these devices has."""
    cuda = "cuda" in (devices_here() if devices is None else devices)
    return tuple(name for name in BACKENDS if cuda or name != "nccl")


def _option(name: str, text: str, kind: Any = None, **how: Any) -> Callable[..., Decorate]:
    """An option, for a group; what it is by default is shown where that is a value."""
    shown = "default" in how
    if kind in _METAVARS:
        how.setdefault("metavar", _METAVARS[kind])
    return partial(
        click.option, *name.split(), cls=Option, help=text, type=kind, show_default=shown, **how
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
_RESUMED = "A run that goes on"
_OUTPUT = "Output"

_STAGES = _in(_WORKERS, _option("--stages", "Pipeline stages. [default: one per accelerator]", int))
_ELSEWHERE = _in(
    _HOSTS,
    _option("--hosts", "Hosts that ssh reaches, each with its workers.", metavar="A:2,B:2"),
    _option(
        "--hosts-file",
        "The same: a host, its workers and its python a line.",
        _PATH,
        metavar="FILE",
    ),
    _flag("--sync", "Send the job file's folder to the hosts first."),
    _option("--on", "The cluster to submit the job to.", click.Choice(ELSEWHERE)),
    _option("--nodes", "Hosts of the cluster. [default: 1]", int),
    _many(
        *("--set settings", "What the cluster is asked for besides, as image=IMAGE. Repeatable."),
        metavar="NAME=VALUE",
    ),
    _flag("--dry-run", "Only print what would be asked for."),
    once=True,
)

_HERE = _in(
    _WORKERS,
    _flag("--debug", "With --stages 1: breakpoint() and input() have this terminal."),
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
            "Where stages compute; auto: on accelerators, of any kind, where there are some.",
            _Offered(devices_here(), DEVICES),
            default="auto",
        ),
        _option(
            "--backend",
            "What carries tensors; auto: shared memory on a host, gloo between hosts; between "
            "accelerators what they have of their own. tls encrypts what hosts say.",
            _Offered(backends_here(), BACKENDS),
            default="auto",
        ),
        _option(
            "--interface",
            "What carries tensors between hosts, as eth1. [default: by route]",
            metavar="NAME",
        ),
        _option(
            "--worker-timeout",
            "Seconds after which a silent worker is given up.",
            float,
            default=60.0,
        ),
    ),
    *_in(
        _TRAINING,
        _option("--steps", "Optimizer steps; data() starts again when it ends.", int),
        _option("--epochs", "Passes of data(), each to its end. [default: 1]", int),
        _option(
            "--microbatches",
            "Micro-batches a mini-batch is cut into, over all replicas. [default: 4 × stages × "
            "replicas]",
            int,
        ),
        _option("--accumulate", "Mini-batches an optimizer step.", int, default=1),
        _option(
            "--evaluate-every",
            "Steps between evaluation passes, or epoch: at each end of data(). [default: off]",
            metavar="N",
        ),
        _choice(
            *("--read-data", READERS, "every"),
            "Whether every replica reads data() and keeps its part, or one reads for all.",
        ),
        _option("--init-from", "Weights that training begins with.", _PATH, metavar="FILE"),
        _option(
            "--init-partial/--no-init-partial",
            "Take of them what the model has too, and leave the rest as it is.",
        ),
        _option("--stop-on-nan/--no-stop-on-nan", "End the run when the loss is not finite."),
    ),
    *_in(
        _NUMBERS,
        _option(
            "--seed",
            "Of all that is random in the job: initial weights, data, dropout.",
            int,
            default=0,
        ),
        _choice(
            *("--precision", PRECISIONS, "fp32"),
            "What layers compute in, by autocast; fp16 scales the loss.",
        ),
        _option("--clip-grad-norm", "Bound on the global gradient norm. [default: off]", float),
        _option("--clip-grad-value", "Bound on each gradient element. [default: off]", float),
        _option(
            "--deferred-batch-norm/--no-deferred-batch-norm",
            "Batch-norm statistics of the whole mini-batch.",
        ),
        _option(
            "--compile/--no-compile",
            "Each layer compiled by torch.compile: kernels of its own, and other rounding.",
        ),
        _option(
            "--deterministic/--no-deterministic",
            "Kernels alone that give the same bits each time; one that has no such kernel raises.",
        ),
    ),
    *_in(
        _SCHEDULE,
        _choice("--schedule", tuple(ORDERS), "gpipe", "In which order micro-batches run."),
        _choice(
            *("--recompute", RECOMPUTE_MODES, "auto"),
            "Which micro-batches run forward again before backward, to save memory; offload: none, "
            "and what an accelerator keeps for backward waits in the host's memory.",
        ),
        _option("--balance", "Layers of each stage, as 3,5,5,3. [default: even]"),
        _option(
            "--shard-optimizer/--no-shard-optimizer",
            "Each replica updates a part of the weights, and keeps its state alone.",
        ),
    ),
    *_in(
        _KEPT,
        _option(
            "--checkpoint-every",
            "Steps between checkpoints, or time, as 30m. [default: at the end alone]",
            metavar="N",
        ),
        _choice(
            *("--checkpoint-busy", WHEN_BUSY, "skip"),
            "What becomes of a checkpoint that is due while another is still being written.",
        ),
        _option("--keep", "Checkpoints that stay.", int, default=2),
        _option(
            "--restarts",
            "Losses of workers within an hour that the job goes on after.",
            int,
            default=3,
        ),
        _option(
            "--elastic",
            "Go on with fewer stages, down to MIN, when a worker cannot be replaced.",
            int,
            metavar="MIN",
        ),
        _option(
            "--snapshot-every",
            "Steps between copies of the state in memory. [default: by their cost]",
            int,
        ),
    ),
    *_in(
        _RESUMED,
        _flag(
            "--resume", "Go on with the run in --run-dir, with its options where none are given."
        ),
        _flag("--go-on", "As --resume where --run-dir holds a run; else begin it."),
        _many(
            *("--allow", "An option that may be another than the run's, as seed. Repeatable."),
            metavar="NAME",
        ),
        once=True,
    ),
    *_in(
        _OUTPUT,
        _option(
            "--run-dir",
            "Where to record. [default: runs/<file stem>-<time>]",
            _PATH,
            metavar="FOLDER",
        ),
        _option("--csv/--no-csv", "Write metrics.csv and evaluation.csv as well."),
        _option(
            "--tensorboard/--no-tensorboard",
            "Write files for TensorBoard as well, to RUN/tensorboard.",
        ),
        _option("--log-every", "Steps between lines. [default: one a second]", int, metavar="N"),
        _option(
            "--output",
            "Whose output is shown: of the first and last stage, of all, of none. [default: stage]",
            click.Choice(OUTPUTS),
        ),
    ),
    *_in(
        _OUTPUT,
        _flag("-q --quiet", "Show warnings and errors alone."),
        _flag("-v --verbose", "Show more of each step, and what pipeworker logs."),
        once=True,
    ),
]


def _all(decorators: list[Decorate], function: Function) -> Function:
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


def job_options(function: Function) -> Function:
    """The options of a training job, for `launch` and for a torchrun job; and the job file."""
    arguments = [
        click.argument("job_file", metavar="JOB_FILE", type=_PATH),
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
    ]
    return _all([*arguments, *_OF_JOB], function)


def launch_options(function: Function) -> Function:
    """The options of `launch`: where the job runs, and those of any job."""
    return _all([*_STAGES, *_HERE, *_ELSEWHERE], job_options(function))


def init_options(function: Function) -> Function:
    """The options of `init`."""
    said = "; ".join(f"{name}: {what}" for name, what in EXAMPLES.items())
    return _all(_in("Options", _choice("--example", tuple(EXAMPLES), "mlp", f"{said}.")), function)


def export_options(function: Function) -> Function:
    """The options of `export`."""
    of_export = _in(
        "Options",
        _option(
            "--dtype", "Of all floating tensors. [default: as they are]", click.Choice(PRECISIONS)
        ),
        _option(
            "--shard-size", "Of each file in a folder, as 500MB. [default: 5GB]", metavar="SIZE"
        ),
    )
    return _all(of_export, function)
