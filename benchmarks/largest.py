"""The largest networks that a GPU can train: the first columns of GPipe's Table 1.

The size of a Transformer is its number of layers, and that of an AmoebaNet-like network its number
of channels (``largest_job.py``). Each is measured with the whole device and with an eighth of it,
as one micro-batch that keeps all activations, and as 32 that are recomputed or offloaded. Searches
that run at once, each in its part of the device, find the same sizes in less time, but no times.

    python benchmarks/largest.py [--nets transformer,amoebanet] [--fractions 1,0.125] [--at-once 1]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

JOB = Path(__file__).with_name("largest_job.py")
WAYS = {"never": 1, "always": 32, "offload": 32}
"""Micro-batches, by recompute mode."""
STEP = {"transformer": 1, "amoebanet": 16}
"""The step of the sizes, by network."""
NEAR = 16
"""The search ends when the size is known to one part in this number."""


@dataclass(frozen=True)
class Fits:
    size: int
    parameters: int
    peak: int
    seconds: float


def fits(net: str, size: int, fraction: float, mode: str) -> Fits | None:
    """Train a network of this size; return its memory and time, or None if it does not fit."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        line = [sys.executable, "-m", "pipeworker", "launch", "--stages", "1", "--steps", "9"]
        line += ["--recompute", mode, "--microbatches", str(WAYS[mode]), "--run-dir", str(run)]
        line += ["--quiet", str(JOB), "--", net, str(size), str(fraction)]
        done = subprocess.run(line, capture_output=True, text=True)
        if "out of memory" in done.stderr:
            return None
        if "it fits" not in done.stderr:
            raise SystemExit(done.stderr)
        plan, summary = (json.loads((run / f"{n}.json").read_text()) for n in ("plan", "summary"))
        rows = [json.loads(row) for row in (run / "metrics.jsonl").open()]
    (peak,) = summary["peak_memory_bytes"]
    return Fits(size, plan["stages"][0]["parameters"], peak, rows[-1]["seconds"])


def largest(net: str, fraction: float, mode: str) -> Fits | None:
    """Return the largest size that fits: double until one does not fit, then bisect."""
    best, low, high = None, 0, 0
    while not high or (high - low) * NEAR > max(low, NEAR):
        size = (low + high) // 2 if high else max(1, 2 * low)
        found = fits(net, size * STEP[net], fraction, mode)
        if found is None:
            high = size
        else:
            best, low = found, size
        if high == 1:
            break
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nets", default=",".join(STEP))
    parser.add_argument("--fractions", default="1,0.125")
    parser.add_argument("--at-once", type=int, default=1)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU's memory, and torch sees no CUDA device here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| network | of the device | micro-batches | size | parameters | peak | seconds a step |")
    print("|---|---|---|---|---|---|---|")
    fractions = map(float, args.fractions.split(","))
    cases = [*product(args.nets.split(","), fractions, WAYS)]
    with ThreadPoolExecutor(args.at_once) as pool:
        results = pool.map(lambda case: largest(*case), cases)
        for (net, fraction, mode), found in zip(cases, results, strict=True):
            cells = "does not fit | | |"
            if found is not None:
                million, gib = found.parameters / 1e6, found.peak / 2**30
                seconds = f"{found.seconds:.2f}" if args.at_once == 1 else ""
                cells = f"{found.size} | {million:.0f}M | {gib:.1f} GiB | {seconds}"
            print(f"| {net} | {fraction:g} | {WAYS[mode]}, {mode} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
