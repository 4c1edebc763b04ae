"""The time of a step relative to the schedule's own limit, on emulated accelerators.

A stage is a layer that sleeps in forward, and twice as long in backward, so that two cores can host
eight stages. The bound of a step is M + K - 1 times the time of one stage for one micro-batch in a
plain single process (with recompute, M (2 f + b) + (K - 1) (f + b)), measured in the same run. The
peer is torch.distributed.pipelining's ScheduleGPipe on the same layers. All of them run in turn,
and the table gives medians over the rounds.

    python benchmarks/emulated.py [--rounds 3] [--stages 8] [--microbatches 32] [--no-peer]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from launches import step_seconds
from parts import plain
from peer import GPIPE, peer

JOB = Path(__file__).with_name("emulated_job.py").resolve()
CASES = [  # forward seconds, activation bytes, recompute, steps, target share
    (0.010, 64 << 10, "never", 10, 0.98),
    (0.001, 64 << 10, "never", 40, 0.92),
    (0.010, 4 << 20, "never", 10, 0.82),
    (0.010, 64 << 10, "always", 10, 1 / 1.03),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="run only this case")
    args = parser.parse_args()
    k, m = args.stages, args.microbatches
    print(f"K={k} M={m}, medians of {args.rounds} rounds, seconds a step")
    print("forward  activation  recompute   bound    ours  share (target)    peer  share")
    for forward, size, mode, steps, target in CASES if args.case is None else [CASES[args.case]]:
        words = (str(k), str(forward), str(size), str(m))
        bounds, times, peers = [], [], []
        for _ in range(args.rounds):
            f, both = max(plain(JOB, k, m, *words), key=lambda pair: pair[1])
            recompute = f if mode == "always" else 0.0
            bounds.append(m * (both + recompute) + (k - 1) * both)
            times.append(step_seconds(JOB, k, m, steps, mode, *words))
            if mode == "never" and not args.no_peer:
                peers.append(peer(GPIPE, JOB, k, m, steps, *words).seconds)
        share = statistics.median(b / t for b, t in zip(bounds, times, strict=True))
        line = f"{forward * 1e3:4.0f} ms  {size >> 10:7d} KB  {mode:9} "
        line += f"{statistics.median(bounds):7.4f} {statistics.median(times):7.4f}"
        line += f"  {share:5.3f}   ({target:.2f})"
        if peers:
            peer_share = statistics.median(b / t for b, t in zip(bounds, peers, strict=True))
            line += f"  {statistics.median(peers):7.4f}  {peer_share:5.3f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
