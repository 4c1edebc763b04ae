"""The time from the last backward of a step to the first forward of the next step, at K=8.

Both are on the first stage, so that one clock measures it.

    python benchmarks/gap.py [--stages 8] [--steps 60]
"""

from __future__ import annotations

import argparse
import statistics

from launches import launched

JOB = """
import sys
import time
import torch
from torch import nn

STEPS = int(sys.argv[2])
ended = []

class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        ended.append(time.perf_counter())
        return gradient, gradient.sum().reshape(1)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.gaps, self.calls = [], 0

    def forward(self, x):
        now = time.perf_counter()
        if self.calls and self.calls % 32 == 0 and ended:
            self.gaps.append(now - ended[-1])
            if len(self.gaps) == STEPS - 1:
                print("gaps", *self.gaps, flush=True)
        self.calls += 1
        time.sleep(0.001)
        return Mark.apply(x, self.weight)

def model():
    return [Layer] * int(sys.argv[1])

def loss(output, target):
    return output.mean()

def optimizer(params):
    return torch.optim.SGD(params, lr=0.0)

def data():
    while True:
        yield torch.ones(32, 16384), torch.ones(32, 1)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    options = f"--stages {args.stages} --steps {args.steps} --microbatches 32 --recompute never"
    with launched(JOB, options, args.stages, args.steps) as run:
        gaps = [float(word) for word in run.log(0).split("gaps")[1].split()][2:]
    print(f"K={args.stages}: median gap {statistics.median(gaps) * 1e3:.2f} ms (target <= 2)")


if __name__ == "__main__":
    main()
