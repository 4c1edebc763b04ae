"""Other pipelines on the papers' networks, beside pipeworker's schedules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from operator import methodcaller
from pathlib import Path
from statistics import median

from launches import SKIPPED_STEPS, balance_of, launched, planned
from peer import PLACED, Measured, peer

from papers.networks import AMOEBANET, EXAMPLES, TRANSFORMER, Network
from papers.throughput import BETTER, scaled, words_of
from papers.throughput import JOB as EMULATED

TEXT = """\
Each pipeline trains the same layers with the same split and micro-batches, all activations kept,
one after the other in one run: two workers that compute (Transformer of 4 layers of width 256,
texts of 128 words; AmoebaNet-D(6, 96), images of 32 points; mini-batches of 32 in 8 parts), and
eight emulated accelerators with the costs of Transformer-48 and AmoebaNet-D (18, 256) (first table;
M=32). A figure is the rate relative to pipeworker's `gpipe`, and the peak memory of the largest
process in MiB, interpreter and torch included (the emulated ones hold little else). Those that
compute are the medians of three rounds, each of which runs all pipelines in turn, because a rate
differs by up to 15 % here from run to run; the emulated ones, which sleep, were run once.
torchgpipe's CPU stages share one thread, so that nothing overlaps: it is made for GPUs. DeepSpeed
has one schedule, 1F1B. A network without a figure was refused.
"""
TORCH = [kind for kind in PLACED if kind != "ScheduleDualPipeV"]
OURS = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv")
STEPS = SKIPPED_STEPS + 3
ROUNDS = 3
"""Rounds of the networks that compute."""


@dataclass(frozen=True)
class Case:
    """A network that computes, or an emulated one of so many workers."""

    network: Network
    workers: int
    microbatches: int
    emulated: bool

    def job(self, interleaved: bool) -> tuple[Path, tuple[object, ...]]:
        """Return the job file and its arguments, for one or two stages a worker."""
        if not self.emulated:
            return EXAMPLES / self.network.file, tuple(self.network.words.split())
        stages = scaled(self.network, self.workers, 0.010, BETTER if interleaved else "")
        return EMULATED, words_of(stages)

    @property
    def shape(self) -> str:
        """The options of its commands."""
        return f"--stages {self.workers} --microbatches {self.microbatches} --recompute never"

    def ours(self, schedule: str) -> Measured:
        """Measure pipeworker."""
        interleaved = schedule in ("interleaved-1f1b", "zbv")
        job, words = self.job(interleaved)
        balance = ",".join(map(str, _balance(self, interleaved)))
        options = f"{self.shape} --steps {STEPS} --balance {balance} --schedule {schedule}"
        with launched(job, options, *words) as run:
            return Measured(run.seconds, max(run.peaks))

    def peer(self, kind: str) -> Measured:
        """Measure another pipeline."""
        interleaved = bool(PLACED.get(kind))
        job, words = self.job(interleaved)
        return peer(kind, job, _balance(self, interleaved), self.microbatches, STEPS, *words)


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
    Case(AMOEBANET, 8, 32, emulated=True),
)
Runner = Callable[[Case], Measured]


@cache
def _balance(case: Case, interleaved: bool) -> list[int]:
    """Return the layers of each stage, as `pipeworker plan` divides them."""
    if case.emulated:
        return [1] * case.workers * (1 + interleaved)
    job, words = case.job(interleaved)
    return balance_of(planned(job, f"{case.shape} {BETTER if interleaved else ''}", *words))


def lines() -> Iterator[str]:
    """Yield the table, as Markdown."""
    names = [f"{case.network.title}, K={case.workers}" for case in CASES]
    yield f"| pipeline | {' | '.join(names)} |"
    yield "|---" * (1 + len(CASES)) + "|"
    pipelines = dict(_pipelines())
    columns = [_column(case, pipelines) for case in CASES]
    for title in pipelines:
        yield f"| {' | '.join([title, *(column[title] for column in columns)])} |"


def _pipelines() -> Iterator[tuple[str, Runner]]:
    """Yield the name of each pipeline and how it is measured, pipeworker's `gpipe` first."""
    for name in OURS:
        yield f"pipeworker `{name}`", methodcaller("ours", name)
    for kind in (*TORCH, *filter(importlib.util.find_spec, ("deepspeed", "torchgpipe"))):
        title = f"torch `{kind}`" if kind in PLACED else kind
        yield title, methodcaller("peer", kind)


def _column(case: Case, pipelines: dict[str, Runner]) -> dict[str, str]:
    """Return the figures of a network by pipeline, the medians of its rounds."""
    found: dict[str, list[Measured]] = {title: [] for title in pipelines}
    for _ in range(1 if case.emulated else ROUNDS):
        for title, run in pipelines.items():
            try:
                found[title].append(run(case))
            except SystemExit as error:  # a peer refuses the network
                print(title, str(error)[:400], sep=": ", file=sys.stderr, flush=True)
    first = next(iter(found.values()))
    cells = dict.fromkeys(found, "")
    for title, some in found.items():
        if some:
            both = zip(first, some, strict=True)
            rate = median(ours.seconds / one.seconds for ours, one in both)
            cells[title] = f"{rate:.2f}; {median(one.peak for one in some) / 2**20:.0f}"
    return cells
