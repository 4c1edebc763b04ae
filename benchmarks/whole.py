"""A module that is cut by its own forward, relative to the same network as a list of layers.

python benchmarks/whole.py [--rounds 5] [--microbatches 8] [--stages 1 2]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from launches import step_seconds

JOB = Path(__file__).with_name("whole_job.py").resolve()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    m = args.microbatches
    print(f"M={m}, medians of {args.rounds} rounds, seconds a step")
    for k in args.stages:
        times: dict[str, list[float]] = {"module": [], "list": []}
        for _ in range(args.rounds):
            for kind, found in times.items():
                step = step_seconds(JOB, k, m, args.steps, "never", str(m), kind)
                found.append(step)
        ratios = [a / b for a, b in zip(times["module"], times["list"], strict=True)]
        medians = "  ".join(f"{kind} {statistics.median(t):.4f}" for kind, t in times.items())
        print(f"K={k}  {medians}  module / list {statistics.median(ratios):.3f} (1.02)", flush=True)


if __name__ == "__main__":
    main()
