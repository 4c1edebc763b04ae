"""torchgpipe's ablation: what each of three features brings."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from launches import SKIPPED_STEPS, step_seconds

TEXT = """\
A U-shaped network of eight emulated accelerators, each of which sleeps 10 ms in forward and 20 ms
in backward: the output of the first layer skips to the last one, that of the second to the last but
one, and so on. Activations and skip connections have 1 MB a micro-batch. M=32, all recompute,
`gpipe`, medians of three rounds in turn. Only the benchmark can take a feature away (its job file
replaces functions of the worker); receives are posted with `--backend gloo` alone, so that its row
and the one before it have that. torchgpipe's ablation takes away what orders its work on a GPU
(2004.09910), which pipeworker's actions order.
"""
JOB = Path(__file__).parents[1].resolve() / "ablation_job.py"
WORKERS, MICROBATCHES, SECONDS, BYTES, ROUNDS = 8, 32, 0.010, 1 << 20, 3
GLOO = "--backend gloo"
ROWS = (
    ("all features", "nothing", ""),
    ("without early recompute", "recompute", ""),
    ("without direct skips", "skips", ""),
    ("all features, gloo", "nothing", GLOO),
    ("without posted receives, gloo", "receives", GLOO),
)


def lines() -> Iterator[str]:
    """Yield the table, as Markdown."""
    yield "| | seconds a step | relative |"
    yield "|---|---|---|"
    times: dict[str, list[float]] = {name: [] for name, *_ in ROWS}
    for _ in range(ROUNDS):
        for name, lacks, options in ROWS:
            times[name].append(_step(lacks, options))
    base = 0.0
    for name, lacks, _ in ROWS:
        took = statistics.median(times[name])
        base = took if lacks == "nothing" else base
        yield f"| {name} | {took:.3f} | {took / base:.3f} |"


def _step(lacks: str, options: str) -> float:
    words = (WORKERS, SECONDS, BYTES, MICROBATCHES, lacks)
    shape = WORKERS, MICROBATCHES, SKIPPED_STEPS + 3, "always"
    return step_seconds(JOB, *shape, *words, options=f"--balance even {options}")
