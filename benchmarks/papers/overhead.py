"""GPipe's breakdown of overhead, from `pipeworker report`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from launches import SKIPPED_STEPS, launched, python

from papers.networks import AMOEBANET, SAMPLES, TRANSFORMER
from papers.throughput import JOB, scaled, words_of

TEXT = """\
Shares of a step's time, the mean of eight workers, as `pipeworker report` has them for the runs of
the first table with K=8, M=32 and `gpipe`: every step is recorded. GPipe's authors found 22.5 % of
recompute, 4.1 % of bubble, 3.2 % of imbalance and 2.9 % of setup.
"""
PARTS = {
    "computation": ("forward", "backward"),
    "recompute": ("recompute",),
    "bubble": ("fill_drain",),
    "imbalance": ("imbalance",),
    "transfer": ("transfer",),
    "setup": ("data", "coordinator"),
    "update": ("optimizer",),
    "snapshots": ("checkpoint",),
    "other": ("other", "recovery"),
}
"""The report's parts, by the paper's words."""
WORKERS, SECONDS = 8, 0.010
OPTIONS = f"--stages {WORKERS} --microbatches {SAMPLES} --steps {SKIPPED_STEPS + 3}"
OPTIONS += " --recompute always --balance even --trace"


def lines() -> Iterator[str]:
    """Yield the table, as Markdown."""
    yield f"| network | {' | '.join(PARTS)} |"
    yield "|---" * (1 + len(PARTS)) + "|"
    for network in (AMOEBANET, TRANSFORMER):
        words = words_of(scaled(network, WORKERS, SECONDS))
        with launched(JOB, OPTIONS, *words) as run:
            shares = _shares(json.loads(python("-m", "pipeworker", "report", run.path, "--json")))
        yield f"| {network.title} | {' | '.join(f'{100 * part:.1f} %' for part in shares)} |"


def _shares(report: dict[str, Any]) -> list[float]:
    """Return each part's share of the time, the mean of all workers."""
    workers = [worker | worker["idle"] for worker in report["workers"]]
    total = report["seconds"] * len(workers)
    return [
        sum(worker[name] for worker in workers for name in names) / total
        for names in PARTS.values()
    ]
