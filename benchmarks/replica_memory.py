"""Memory of a worker by replicas, with and without --shard-optimizer.

    python benchmarks/replica_memory.py [--parameters 27] [--replicas 1 2 4]

Each worker has one stage of so many million weights, which AdamW updates. A figure is the largest
peak of a job's workers in MiB, interpreter and torch (about 220) included.
"""

from __future__ import annotations

import argparse

from launches import launched

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
    shape = "--stages 1 --microbatches 8 --steps 6 --balance even --recompute never --quiet"
    shape += " --max-restarts 0 --checkpoint-every end"
    for replicas in args.replicas:
        cells = [replicas]
        for option in ("", "--shard-optimizer"):
            options = f"{shape} --replicas {replicas} {option}"
            with launched(JOB, options, args.parameters) as run:
                cells.append(f"{max(run.peaks) / 2**20:.0f}")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
