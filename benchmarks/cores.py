"""Real compute on a host with many cores: a Transformer and a U-Net by stages and micro-batches.

The speedup is over one stage with as many micro-batches, as GPipe's Table 2 and torchgpipe's have
it; the bound is one stage's time over the stages, in as many slots as the schedule has. Each stage
has a thread. The peer (torch.distributed.pipelining) runs the Transformer in the same round: it has
no skip connections.

    python benchmarks/cores.py [--nets transformer,unet] [--stages 2,4,8] [--microbatches 4,8,32]
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from parts import ours, peer

HERE = Path(__file__).resolve().parent
STEPS = 9


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def measured(args: argparse.Namespace) -> Iterator[tuple[str, int, int, list[float], list[float]]]:
    """By net, stages and micro-batches: seconds of ours and of the peer, one a round."""
    mine, theirs = defaultdict(list), defaultdict(list)
    nets, stages = args.nets.split(","), [1, *numbers(args.stages)]
    cases = [*product(nets, numbers(args.microbatches), stages)]
    for _ in range(args.rounds):
        for net, m, k in cases:
            job = HERE / f"{net}_job.py"
            mine[net, m, k].append(ours(job, k, m, STEPS, "never", str(m)))
            if k > 1 and net == "transformer":
                theirs[net, m, k].append(peer(job, k, m, STEPS, str(m)))
    for net, m, k in cases:
        yield net, m, k, mine[net, m, k], theirs[net, m, k]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nets", default="transformer,unet")
    parser.add_argument("--stages", default="2,4,8")
    parser.add_argument("--microbatches", default="4,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("net          K   M  s a step  speedup  of the bound (0.95 at 8, 32)  against the peer")
    alone: list[float] = []
    for net, m, k, mine, theirs in measured(args):
        alone = mine if k == 1 else alone
        pairs = [*zip(alone, mine, strict=True)]
        speedup = statistics.median(one / many for one, many in pairs)
        share = speedup * (m + k - 1) / (k * m)
        against = [p / t for p, t in zip(theirs, mine, strict=False)]
        print(
            f"{net:11} {k:2} {m:3}  {statistics.median(mine):8.4f}  {speedup:7.2f}  {share:28.3f}"
            + (f"  {statistics.median(against):16.3f}" if against else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
