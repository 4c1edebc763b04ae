"""Every schedule's step relative to its own limit, beside torch.distributed.pipelining's.

The layers sleep (`schedules_job.py`): per worker and micro-batch `--forward` seconds forward, as
long for the gradient of the input and as long for that of the weights, in 2 K layers. The limit of
a schedule is its simulated makespan with the seconds that a plain process measures for a layer. The
peer runs its own schedule of that name on the same layers, in turn; medians over the rounds.

"replayed" is the share of the limit with each action as long as it took in the pipeline: several
workers share a core, and each wakes later there than a plain process does (`replay.py`).

"live" is the largest number of micro-batches that a worker holds, in those of all its layers.

    python benchmarks/schedules.py [--rounds 3] [--stages 8] [--microbatches 32] [--no-peer]
    python benchmarks/schedules.py --only 1f1b zbv
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from launches import launched, result
from parts import load_job
from peer import PLACED, peer
from replay import replayed

from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.check import check
from pipeworker.plan.orders import ORDERS
from pipeworker.plan.simulate import Costs, simulate

HERE = Path(__file__).resolve()
JOB = HERE.with_name("schedules_job.py")
PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", type=int, default=8, help="workers")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--forward", type=float, default=0.010, help="seconds a worker")
    parser.add_argument("--bytes", type=int, default=64 << 10, help="of an activation")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=list(ORDERS), default=list(ORDERS))
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    k, m = args.stages, args.microbatches
    words = (2 * k, args.forward / 2, args.bytes, m)
    options = f"--stages {k} --microbatches {m} --steps {args.steps} --recompute never"
    print(f"K={k} M={m}, medians of {args.rounds} rounds, seconds a step")
    print(f"{'schedule':18}   bound    ours  share  replayed  live    peer  share  ours/peer")
    for name in args.only:
        order = ORDERS[name]
        schedule = order.build(order.place(k), m, ["never"] * (k * order.virtual_stages))
        check(schedule)
        live = max(map(most_live, schedule.workers)) / order.virtual_stages
        bounds, times, peers = [], [], []
        shares: list[float] = []
        for _ in range(args.rounds):
            layer = result(HERE, "layer", *words)
            costs = [seconds * 2 / order.virtual_stages for seconds in layer]
            even = [(each,) * schedule.placement.stages for each in costs]
            bounds.append(simulate(schedule, Costs(even[0], even[1], even[2])).makespan)
            with launched(JOB, f"{options} --schedule {name}", *words) as run:
                times.append(run.seconds)
                shares.append(replayed(run.path))
            refused = name == "dualpipev" and m < 2 * k  # by the peer
            if name in PEERS and not (args.no_peer or refused):
                layers = [1] * 2 * k if PLACED[PEERS[name]] else [2] * k
                peers.append(peer(PEERS[name], JOB, layers, m, args.steps, *words).seconds)
        share = statistics.median(b / t for b, t in zip(bounds, times, strict=True))
        line = f"{name:18} {statistics.median(bounds):7.4f} {statistics.median(times):7.4f}"
        line += f"  {share:5.3f}     {statistics.median(shares):5.3f} {live:5.1f}"
        if peers:
            peer_share = statistics.median(b / t for b, t in zip(bounds, peers, strict=True))
            rate = statistics.median(p / t for p, t in zip(peers, times, strict=True))
            line += f" {statistics.median(peers):7.4f}  {peer_share:5.3f}  {rate:9.3f}"
        print(line, flush=True)


def most_live(actions: Sequence[Action]) -> int:
    """Return the largest number of micro-batches, over all stages of a worker, that are live."""
    changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    return max(accumulate(changes.get(action.kind, 0) for action in actions))


def run_layer(job: Any) -> None:
    """Print the seconds of one layer: its forward, its backward, and the input's part of that."""
    import torch

    layer = job.model()[0]()
    x = torch.zeros(1, int(sys.argv[3]) // 4)
    times: list[tuple[float, float, float]] = []
    for _ in range(20):
        value = x.clone().requires_grad_()
        began = time.perf_counter()
        output = layer(value)
        middle = time.perf_counter()
        output.backward(torch.ones_like(output), retain_graph=True)
        end = time.perf_counter()
        torch.autograd.grad(output, value, torch.ones_like(output))
        times.append((middle - began, end - middle, time.perf_counter() - end))
    print(json.dumps([statistics.median(time[part] for time in times) for part in range(3)]))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["layer", *words]:
            run_layer(load_job(str(JOB), words))
        case _:
            main()
