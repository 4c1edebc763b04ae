"""GPipe's table 1: the largest network that a limit of memory allows."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from launches import balance_of, launched, planned

from papers.networks import EXAMPLES

TEXT = """\
Small versions of the networks are trained for two steps by `pipeworker launch`, under a limit that
Linux enforces on the private memory of each worker (RLIMIT_DATA: what it has before it makes its
optimizer, and this much more). The size is increased until an allocation fails. Naive-1 is one
process that keeps all activations of the mini-batch; pipeline-K has K workers, which recompute, and
32 micro-batches (8 of the two that convolve, whose layers are slower here). "Times" is relative to
the row of pipeline-1. The papers' figures are GPipe's, of 8 GB accelerators for AmoebaNet-D and
16 GB ones for the Transformer, and torchgpipe's of P40s for U-Net, all with other optimizers;
GPipe's AmoebaNet-D has 18, 18, 18, 36 and 72 cells. AmoebaNet-D grows faster than K here, because
pipeline-1 alone holds all activations of a micro-batch.
"""
JOB = Path(__file__).parents[1].resolve() / "limited_job.py"
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Else glibc keeps holes between tensors, which an accelerator's allocator uses again."""
STACK = 1 << 20
FAILED = "t allocate memory", "MemoryError", "bad_alloc", "a primitive"
REFUSED = "does not fit into the memory"


@dataclass(frozen=True)
class Growth:
    """A network whose size is one number.

    Attributes:
        words: returns its arguments for a number of workers and a size.
        named: returns what that is called.
        paper: the paper's parameters in millions, by row; 0 where it has none.
        first: the size with which the search begins.
        even: whether all layers are alike, so that a balance needs no measurement.
    """

    title: str
    file: str
    microbatches: int
    words: Callable[[int, int], str]
    named: Callable[[int, int], str]
    paper: tuple[float, ...]
    first: int
    even: bool = False


def _cells(workers: int) -> int:
    """Return a third of the cells of the paper's AmoebaNet-D: 18, 18, 36 and 72 for 1, 2, 4, 8."""
    return 6 * max(1, workers // 2)


NETWORKS = (
    Growth(
        "Transformer, width 128",
        "transformer.py",
        32,
        lambda _, size: (
            f"--layers {size} --width 128 --inner 512 --heads 4 --context 32 --batch 64"
        ),
        lambda _, size: f"{size} layers",
        (282.2, 785.8, 0, 0, 5300.0),
        5,
        even=True,
    ),
    Growth(
        "AmoebaNet-D",
        "amoebanet.py",
        8,
        lambda workers, size: (
            f"--cells {_cells(workers)} --filters {8 * size} --side 64 --batch 32 --noise"
        ),
        lambda workers, size: f"({_cells(workers)}, {8 * size})",
        (82, 318, 542, 1050, 1800),
        4,
    ),
    Growth(
        "U-Net",
        "unet.py",
        8,
        lambda _, size: f"--blocks {size} --channels 6 --side 64 --batch 16 --noise",
        lambda _, size: f"({size}, 6)",
        (362.2, 2213.8, 4993.9, 7802.9, 15822.2),
        3,
    ),
)
MIB = 128
"""The limit of a worker."""
WAYS = ((1, "never"), (1, "always"), (2, "always"), (4, "always"), (8, "always"))
"""Workers and recompute mode of each row: naive-1, pipeline-1, 2, 4 and 8."""


def lines() -> Iterator[str]:
    """Yield the table, as Markdown."""
    yield "| network | workers | size | parameters | times | the paper's | times |"
    yield "|---|---|---|---|---|---|---|"
    for network in NETWORKS:
        sizes = list(_sizes(network))
        for (workers, mode), (size, count), paper in zip(WAYS, sizes, network.paper, strict=True):
            name = f"{'naive' if mode == 'never' else 'pipeline'}-{workers}"
            cells = [network.title, name, network.named(workers, size), f"{count / 1e6:.2f}M"]
            cells.append(f"{count / sizes[1][1]:.2f}")
            cells += [f"{paper:g}M", f"{paper / network.paper[1]:.2f}"] if paper else ["", ""]
            yield f"| {' | '.join(cells)} |"


def _sizes(network: Growth) -> Iterator[tuple[int, int]]:
    """Yield the largest size of each row, and its parameters."""
    guess = network.first
    for workers, mode in WAYS:
        found = largest(network, workers, mode, guess)
        yield found
        # The next row has four times the memory, or twice.
        guess = round(found[0] * (4 if mode == "never" else 1.9))


def largest(network: Growth, workers: int, mode: str, guess: int) -> tuple[int, int]:
    """Return the largest size that fits, to one part in 50, and its parameters.

    The search begins with `guess`, and goes on in steps that double until the size is between two.
    """
    parameters: dict[int, int] = {}
    low, high, size, step = 0, 0, guess, max(1, guess // 16)
    while not high or high - low > max(1, low // 50):
        count = fits(network, workers, mode, size)
        if count:
            low, parameters[size] = size, count
        else:
            high = size
        if low and high:
            size = (low + high) // 2
        else:
            size, step = max(1, size + step if low else size - step), 2 * step
    return low, parameters[low]


def fits(network: Growth, workers: int, mode: str, size: int) -> int:
    """Train a network; return its parameters, or 0 if an allocation fails."""
    microbatches = 1 if mode == "never" else network.microbatches
    words = network.words(workers, size).split()
    balance = "even" if workers == 1 or network.even else _balance(network, workers, words)
    if not balance:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        line = [sys.executable, "-m", "pipeworker", "launch", "--stages", str(workers)]
        line += ["--steps", "2", "--recompute", mode, "--microbatches", str(microbatches)]
        line += ["--max-restarts", "0", "--balance", balance, "--quiet", "--run-dir", str(run)]
        line += [str(JOB), "--", str(EXAMPLES / network.file), str(MIB), *words]
        # Each thread's stack is private memory too, and as large as this limit when it is made.
        small = partial(resource.setrlimit, resource.RLIMIT_STACK, (STACK, STACK))
        done = subprocess.run(
            line, capture_output=True, text=True, env=os.environ | ALLOCATOR, preexec_fn=small
        )
        if done.returncode == 0:
            stages = json.loads((run / "plan.json").read_text())["stages"]
            return sum(int(stage["parameters"]) for stage in stages)
    if any(text in done.stderr for text in FAILED):
        return 0
    raise SystemExit(done.stderr)


def _balance(network: Growth, workers: int, words: list[str]) -> str:
    """Return the balance of the plan that needs the least memory of a worker; "" if none is near.

    A plan counts what this benchmark does without, two copies of weights and states for recovery.
    """
    options = f"--stages {workers} --recompute always --microbatches {network.microbatches}"
    for times in (1.0, 1.5, 2.0, 2.5, 3.0):
        memory = round(_base() + times * MIB * 2**20)
        try:
            plan = planned(EXAMPLES / network.file, f"{options} --memory {memory}", *words)
        except SystemExit as error:
            if REFUSED not in str(error):
                raise
        else:
            return ",".join(map(str, balance_of(plan)))
    return ""


@cache
def _base() -> int:
    """Return the bytes that a worker without a network has in a plan."""
    with launched(EXAMPLES / "transformer.py", "--stages 1 --steps 1 --quiet") as run:
        base: int = run.read("plan")["facts"]["base_bytes"]
    return base
