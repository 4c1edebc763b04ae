"""Other pipelines on the papers' networks, beside pipeworker's schedules."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parts import SKIPPED_STEPS, pipeworker_step
from peer import PLACED, Measured, peer
from prediction import pipeworker

from papers.networks import EXAMPLES, SAMPLES, TRANSFORMER, Network
from papers.throughput import BETTER, BYTES, scaled
from papers.throughput import JOB as EMULATED

TEXT = """\
Each pipeline trains the same layers with the same split and micro-batches, all activations kept,
one after the other in one run: two workers that compute (Transformer of 4 layers of width 256,
texts of 128 words; AmoebaNet-D(6, 96), images of 32 points; mini-batches of 32 in 8 parts), and
eight emulated accelerators with the costs of Transformer-48 (first table; M=32). A figure is the
rate relative to pipeworker's `gpipe`, and of the two that compute also the peak memory of the
largest process in MiB, interpreter and torch included. torchgpipe's CPU stages share one thread, so
that nothing overlaps: it is made for GPUs. DeepSpeed has one schedule, 1F1B. A network without a
figure was refused. One run each: on this machine the rate of the two that compute differs by up to
15 % from run to run.
"""
TORCH = [kind for kind in PLACED if kind != "ScheduleDualPipeV"]
OURS = {
    "gpipe": (),
    "1f1b": ("--schedule", "1f1b"),
    "interleaved-1f1b": BETTER,
    "zb-h1": ("--schedule", "zb-h1"),
    "zbv": ("--schedule", "zbv"),
}
STEPS = SKIPPED_STEPS + 3


@dataclass(frozen=True)
class Case:
    """A network that computes, or an emulated one of so many workers."""

    network: Network
    workers: int
    microbatches: int
    emulated: bool

    def job(self, interleaved: bool) -> tuple[Path, tuple[str, ...]]:
        """Return the job file and its arguments, for one or two stages a worker."""
        if not self.emulated:
            return EXAMPLES / self.network.file, tuple(self.network.words.split())
        stages = scaled(self.network, self.workers, 0.010, *(BETTER if interleaved else ()))
        return EMULATED, (json.dumps(stages), str(len(stages)), str(BYTES), str(SAMPLES))

    def balance(self, interleaved: bool) -> list[int]:
        """Return the layers of each stage, as `pipeworker plan` divides them."""
        if self.emulated:
            return [1] * self.workers * (1 + interleaved)
        job, words = self.job(interleaved)
        line = ["--stages", str(self.workers), "--microbatches", str(self.microbatches)]
        line += ["--recompute", "never", "--json", *(BETTER if interleaved else ())]
        found = json.loads(pipeworker(dict(os.environ), "plan", *line, str(job), "--", *words))
        stages = sorted(found["stages"], key=lambda stage: int(stage["stage"]))
        return [stage["layers"][1] - stage["layers"][0] for stage in stages]

    def ours(self, *options: str) -> Measured:
        """Measure pipeworker."""
        interleaved = "--schedule" in options and options[1] in ("interleaved-1f1b", "zbv")
        job, words = self.job(interleaved)
        balance = ",".join(map(str, self.balance(interleaved)))
        peaks: list[int] = []

        def look(run: Path) -> None:
            summary = json.loads((run / "summary.json").read_text())
            peaks.append(max(summary["peak_memory_bytes"]))

        run = partial(pipeworker_step, job, self.workers, self.microbatches, STEPS, "never")
        seconds = run(*words, options=("--balance", balance, *options), look=look)
        return Measured(seconds, peaks[0])

    def peer(self, kind: str) -> Measured:
        """Measure another pipeline."""
        interleaved = bool(PLACED.get(kind))
        job, words = self.job(interleaved)
        return peer(kind, job, self.balance(interleaved), self.microbatches, STEPS, *words)


CASES = (
    Case(
        Network(
            "Transformer",
            "transformer.py",
            "--layers 4 --width 256 --inner 1024 --heads 8 --context 128 --batch 32",
        ),
        2,
        8,
        emulated=False,
    ),
    Case(
        Network(
            "AmoebaNet-D", "amoebanet.py", "--cells 6 --filters 96 --side 32 --batch 32 --noise"
        ),
        2,
        8,
        emulated=False,
    ),
    Case(TRANSFORMER, 8, 32, emulated=True),
)


def lines() -> Iterator[str]:
    """Yield the table, as Markdown."""
    names = [f"{case.network.title}, K={case.workers}" for case in CASES]
    yield f"| pipeline | {' | '.join(names)} |"
    yield "|---" * (1 + len(CASES)) + "|"
    first: list[Measured] = []
    for name, options in OURS.items():
        found = [case.ours(*options) for case in CASES]
        first = first or found
        yield _row(f"pipeworker `{name}`", found, first)
    kinds = [*TORCH, *(kind for kind in ("deepspeed", "torchgpipe") if _exists(kind))]
    for kind in kinds:
        title = f"torch `{kind}`" if kind in PLACED else kind
        yield _row(title, [_tried(case.peer, kind) for case in CASES], first)


def _exists(kind: str) -> bool:
    return importlib.util.find_spec(kind) is not None


def _tried(run: Callable[[str], Measured], kind: str) -> Measured | None:
    """Measure a peer; None if it refuses the network."""
    try:
        return run(kind)
    except SystemExit as error:
        print(str(error)[:400], file=sys.stderr, flush=True)
        return None


def _row(title: str, found: list[Measured | None] | list[Measured], first: list[Measured]) -> str:
    cells = [title]
    for case, one, ours in zip(CASES, found, first, strict=True):
        cell = "" if one is None else f"{ours.seconds / one.seconds:.2f}"
        cells.append(cell if case.emulated or one is None else f"{cell}; {one.peak / 2**20:.0f}")
    return f"| {' | '.join(cells)} |"
