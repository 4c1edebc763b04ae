"""Memory of a worker by replicas, with and without --shard-optimizer.

    python benchmarks/replica_memory.py [--parameters 27] [--replicas 1 2 4]

Each worker has one stage of so many million weights, which AdamW updates. A figure is the largest
peak of a job's workers in MiB, interpreter and torch (about 220) included.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from prediction import pipeworker

JOB = """
import sys

import torch
from torch import nn

WIDTH, LAYERS = 1024, round(float(sys.argv[1]) * 2**20 / 1024**2)

def model():
    return [lambda: nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]

def loss(output, target):
    return (output - target).square().mean()

def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)

def data():
    while True:
        x = torch.randn(8, WIDTH)
        yield x, x
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", default="27", help="million, of each stage")
    parser.add_argument("--replicas", nargs="+", default=["1", "2", "4"])
    args = parser.parse_args()
    print("| replicas | plain | `--shard-optimizer` |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.py")
        job.write_text(JOB)
        for replicas in args.replicas:
            cells = [replicas]
            for options in ((), ("--shard-optimizer",)):
                run = Path(folder, f"run-{replicas}-{len(options)}")
                words = ["--stages", "1", "--replicas", replicas, "--microbatches", "8"]
                words += ["--steps", "6", "--balance", "even", "--recompute", "never", "--quiet"]
                words += ["--max-restarts", "0", "--checkpoint-every", "end", *options]
                words += ["--run-dir", str(run), str(job), "--", args.parameters]
                pipeworker(dict(os.environ), "launch", *words)
                peaks = json.loads((run / "summary.json").read_text())["peak_memory_bytes"]
                cells.append(f"{max(peaks) / 2**20:.0f}")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
