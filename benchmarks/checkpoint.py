"""The cost of checkpoints on disk and snapshots in memory while steps run.

The steps right after a checkpoint are compared with those before the next one, in one run. A
snapshot may follow every step, so jobs with and without snapshots run at the same time, each on its
own core, and then change cores: no cost of copying can hide in a bubble there.

python benchmarks/checkpoint.py [--rounds 3] [--microbatches 4] [--steps 120]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launches import launched

JOB = Path(__file__).with_name("transformer_job.py").resolve()
EVERY = 10
NEITHER = "--max-restarts 0"
KINDS = {"snapshots by their cost": "", "snapshot every step": "--snapshot-every 1"}


def run(
    microbatches: int, steps: int, options: str, core: int | None = None
) -> tuple[list[float], float]:
    """Run a job, and return the seconds of each step and the bytes of a checkpoint."""
    shape = f"--stages 2 --steps {steps} --microbatches {microbatches} --recompute never"
    with launched(JOB, f"{shape} {options}", microbatches, "adamw", core=core) as found:
        *_, last = (found.path / "checkpoints").glob("step-*")
        size = sum(file.stat().st_size for file in last.iterdir())
        return [row["seconds"] for row in found.rows], size


def checkpoints(microbatches: int, steps: int) -> float:
    """Return the cost of a checkpoint every ten steps: mean of ten over median of the last six."""
    seconds, size = run(microbatches, steps, f"{NEITHER} --checkpoint-every {EVERY}")
    rounds = [seconds[i : i + EVERY] for i in range(2 * EVERY, len(seconds) - EVERY + 1, EVERY)]
    cost = statistics.median(statistics.mean(r) / statistics.median(r[-6:]) for r in rounds)
    step, state = statistics.median(seconds), size / 2**20
    print(f"checkpoint every {EVERY}: {cost:.3f} ({state:.0f} MB, {step:.2f} s a step)", flush=True)
    return cost


def snapshots(microbatches: int, steps: int, options: str) -> float:
    """Return the cost of snapshots: seconds a step with them over seconds without."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    ratios = []
    for first, second in (cores, reversed(cores)):
        with ThreadPoolExecutor() as pool:
            copying = pool.submit(run, microbatches, steps, options, first)
            plain = pool.submit(run, microbatches, steps, NEITHER, second)
        (slow, _), (quick, _) = copying.result(), plain.result()
        ratios.append(statistics.mean(slow[EVERY:]) / statistics.mean(quick[EVERY:]))
    return math.sqrt(math.prod(ratios))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    costs = [checkpoints(args.microbatches, args.steps) for _ in range(args.rounds)]
    print(f"checkpoint every {EVERY} steps: {statistics.median(costs):.3f} (target <= 1.03)")
    for kind, options in KINDS.items():
        cost = snapshots(args.microbatches, args.steps // 3, options)
        print(f"{kind}: {cost:.3f} (target <= 1.02)", flush=True)


if __name__ == "__main__":
    main()
