"""Real compute on a host with many cores: a Transformer and a U-Net by stages and micro-batches.

The speedup is relative to one stage with the same number of micro-batches, as in GPipe's Table 2
and in torchgpipe. The bound is the time of one stage divided by the stages, for the number of slots
of the schedule. Each stage has one thread. The peer (torch.distributed.pipelining) runs the
Transformer in the same round; it cannot run the U-Net, because it has no skip connections.

    python benchmarks/cores.py [--nets transformer,unet] [--stages 2,4,8] [--microbatches 4,8,32]
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from launches import step_seconds
from peer import GPIPE, peer

HERE = Path(__file__).resolve().parent
CPU = "--device cpu"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def measured(args: argparse.Namespace) -> Iterator[tuple[str, int, int, list[float], list[float]]]:
    """Yield net, stages, micro-batches, and the seconds of pipeworker and of the peer by round."""
    seconds, peer_seconds = defaultdict(list), defaultdict(list)
    nets, stages = args.nets.split(","), [1, *numbers(args.stages)]
    cases = [*product(nets, numbers(args.microbatches), stages)]
    for _ in range(args.rounds):
        for net, m, k in cases:
            job = HERE / f"{net}_job.py"
            found = step_seconds(job, k, m, args.steps, "never", str(m), options=CPU)
            seconds[net, m, k].append(found)
            if k > 1 and net == "transformer":
                theirs = peer(GPIPE, job, k, m, args.steps, str(m))
                peer_seconds[net, m, k].append(theirs.seconds)
    for net, m, k in cases:
        yield net, m, k, seconds[net, m, k], peer_seconds[net, m, k]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nets", default="transformer,unet")
    parser.add_argument("--stages", default="2,4,8")
    parser.add_argument("--microbatches", default="4,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9)
    args = parser.parse_args()
    print("net          K   M  s a step  speedup  of the bound (0.95 at 8, 32)  against the peer")
    alone: list[float] = []
    for net, m, k, seconds, peer_seconds in measured(args):
        alone = seconds if k == 1 else alone
        pairs = [*zip(alone, seconds, strict=True)]
        speedup = statistics.median(one / many for one, many in pairs)
        share = speedup * (m + k - 1) / (k * m)
        against = [p / t for p, t in zip(peer_seconds, seconds, strict=False)]
        middle = statistics.median(seconds)
        print(
            f"{net:11} {k:2} {m:3}  {middle:8.4f}  {speedup:7.2f}  {share:28.3f}"
            + (f"  {statistics.median(against):16.3f}" if against else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
