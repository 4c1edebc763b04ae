"""The share of the reduction over replicas that is hidden in the drain of other stages.

The layers sleep instead of computing, so that all workers run in parallel on a small machine. The
job records, for each stage, the time from the first byte that is sent to the last sum that is
received. The part of it after the last backward of all stages is exposed.

    python benchmarks/replicas.py [--stages 4] [--replicas 2] [--parameters 1000000] [--steps 12]
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import groupby

from launches import launched

JOB = """
import json
import sys
import time
import torch
from torch import nn

from pipeworker.worker.step import reduction

STAGES, PARAMETERS, SECONDS = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

def recorded(name):
    call = getattr(reduction.Reduction, name)
    def record(self):
        began = time.monotonic()
        call(self)
        print("recorded", json.dumps([name, began, time.monotonic()]), flush=True)
    setattr(reduction.Reduction, name, record)

for name in ("scatter", "sum", "gather"):
    recorded(name)

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        time.sleep(SECONDS)
        ctx.save_for_backward(weight)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * SECONDS)
        (weight,) = ctx.saved_tensors
        return gradient, torch.ones_like(weight)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PARAMETERS))

    def forward(self, x):
        return Sleep.apply(x, self.weight)

def model():
    return [Layer] * STAGES

def loss(output, target):
    return output.mean()

def optimizer(params):
    return torch.optim.SGD(params, lr=0.0)

def data():
    while True:
        yield torch.ones(64, 16), torch.ones(64, 1)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=1_000_000, help="of a stage")
    parser.add_argument("--seconds", type=float, default=0.01, help="of a forward")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    count = args.stages * args.replicas
    options = f"--stages {args.stages} --replicas {args.replicas} --microbatches {4 * count}"
    options += f" --steps {args.steps} --recompute never"
    with launched(JOB, options, args.stages, args.parameters, args.seconds) as run:
        logs = {
            (stage, replica): run.log(replica * args.stages + stage)
            for replica in range(args.replicas)
            for stage in range(args.stages)
        }
    notes = {
        place: [
            json.loads(line.split(" ", 1)[1]) for line in text.splitlines() if "recorded" in line
        ]
        for place, text in logs.items()
    }
    whole, exposed, after = [], [], []
    for step in range(2, args.steps):  # the first two describe frames and allocate buffers
        spans = {place: (some[3 * step][1], some[3 * step + 2][2]) for place, some in notes.items()}
        drained = max(began for began, _ in spans.values())
        whole.append(sum(end - began for began, end in spans.values()))
        exposed.append(sum(max(0.0, end - max(began, drained)) for began, end in spans.values()))
        after.append(max(end for _, end in spans.values()) - drained)
    share = sum(exposed) / sum(whole)
    megabytes = 4 * args.parameters / 1e6
    print(
        f"K={args.stages} R={args.replicas}, {megabytes:g} MB of gradients a stage: "
        f"{statistics.median(after) * 1e3:.1f} ms of a step are after the drain; "
        f"{share:.0%} of all reductions is exposed (one of {args.stages} stages ends the drain)"
    )
    for stage, some in groupby(sorted(notes), key=lambda place: place[0]):
        seconds = [
            notes[place][3 * step + 2][2] - notes[place][3 * step][1]
            for place in some
            for step in range(2, args.steps)
        ]
        print(f"  stage {stage}: {statistics.median(seconds) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
