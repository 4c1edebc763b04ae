"""Predicted step time and memory beside measured ones.

Each configuration is planned (`pipeworker plan --json`) and then run with the plan's balance. The
emulated jobs sleep, so that two cores can host many stages; the others compute, with two stages.
The cache of facts is empty for each plan.

    python benchmarks/prediction.py [--rounds 3] [--only 0 5]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from launches import balance_of, launched, planned

HERE = Path(__file__).resolve().parent


class Case(NamedTuple):
    """A configuration, and how far the prediction of its step time may be off."""

    job: str
    words: str
    stages: int
    microbatches: int
    options: str
    within: float
    steps: int = 10


def emulated(stages: int, microbatches: int, options: str, seconds: float = 0.010) -> Case:
    words = f"{2 * stages} {seconds / 2} 65536 {microbatches}"
    return Case("schedules_job.py", words, stages, microbatches, options, 0.05)


def computed(job: str, microbatches: int, options: str) -> Case:
    return Case(job, str(microbatches), 2, microbatches, options, 0.10)


CASES = [
    emulated(8, 32, "--recompute never"),
    emulated(8, 8, "--recompute never --schedule 1f1b"),
    emulated(4, 16, "--recompute always"),
    emulated(4, 16, "--recompute never --schedule interleaved-1f1b"),
    emulated(4, 16, "--recompute never --schedule zb-h1"),
    emulated(4, 16, "--recompute never --schedule zbv"),
    emulated(4, 16, "--recompute never --schedule v-half"),
    emulated(4, 16, "--recompute never --schedule dualpipev"),
    computed("transformer_job.py", 16, "--recompute never"),
    computed("transformer_job.py", 16, "--recompute always"),
    computed("transformer_job.py", 8, "--recompute never --schedule 1f1b"),
    computed("transformer_job.py", 16, "--recompute never --schedule zbv"),
    computed("unet_job.py", 16, "--recompute never"),
    computed("unet_job.py", 16, "--recompute except_first"),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, nargs="+", default=range(len(CASES)))
    args = parser.parse_args()
    print(
        "medians of", args.rounds, "rounds; memory: predicted and measured peak, the worst worker"
    )
    print(f"{'':50} {'planned':>8} {'took':>8} {'off':>6}  {'MB':>6} {'peak':>6} {'off':>6}")
    for case in (CASES[number] for number in args.only):
        seconds, memory = zip(*(compare(case) for _ in range(args.rounds)), strict=True)
        planned, took = (statistics.median(pair[side] for pair in seconds) for side in (0, 1))
        off = statistics.median(b / a - 1 for a, b in seconds)
        worst = max((pair for some in memory for pair in some), key=lambda p: abs(p[1] - p[0]))
        name = f"{case.job} K={case.stages} M={case.microbatches} {case.options}"
        name = name.replace("_job.py", "").replace("--recompute ", "").replace("--schedule ", "")
        line = f"{name:50} {planned:8.4f} {took:8.4f} {off:+6.1%}{' !'[abs(off) > case.within]}"
        first, second = (size / 2**20 for size in worst)
        wrong = abs(second - first) > 0.05 * first + 20
        print(
            f"{line} {first:6.0f} {second:6.0f} {second / first - 1:+6.1%}{' !'[wrong]}", flush=True
        )


def compare(case: Case) -> tuple[tuple[float, float], list[tuple[float, float]]]:
    """Return seconds of a step, and bytes of each worker: both as planned and as measured."""
    job, words = HERE / case.job, case.words.split()
    options = f"--stages {case.stages} --microbatches {case.microbatches} {case.options}"
    with tempfile.TemporaryDirectory() as cache:
        env = {"XDG_CACHE_HOME": cache}
        plan = planned(job, options, *words, env=env)
        options += f" --steps {case.steps} --balance {','.join(map(str, balance_of(plan)))}"
        with launched(job, options, *words, env=env) as run:
            seconds, peaks = run.seconds, run.peaks
    by_worker = {stage["worker"]: stage["memory_bytes"] for stage in plan["stages"]}
    return (plan["step_seconds"], seconds), [*zip(by_worker.values(), peaks, strict=True)]


if __name__ == "__main__":
    main()
