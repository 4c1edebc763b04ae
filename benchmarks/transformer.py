"""Real compute: transformer blocks at K=2 on two cores, relative to the bound and the peer.

python benchmarks/transformer.py [--rounds 5] [--microbatches 16]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from launches import step_seconds
from parts import plain
from peer import GPIPE, peer

JOB = Path(__file__).with_name("transformer_job.py").resolve()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    k, m = 2, args.microbatches
    bounds, times, peers = [], [], []
    for _ in range(args.rounds):
        both = max(both for _, both in plain(JOB, k, m, str(m)))
        bounds.append((m + k - 1) * both)
        times.append(step_seconds(JOB, k, m, args.steps, "never", str(m)))
        peers.append(peer(GPIPE, JOB, k, m, args.steps, str(m)).seconds)
    share = statistics.median(b / t for b, t in zip(bounds, times, strict=True))
    ratio = statistics.median(p / t for p, t in zip(peers, times, strict=True))
    print(f"K={k} M={m}, medians of {args.rounds} rounds, seconds a step")
    print(f"bound {statistics.median(bounds):.4f}  ours {statistics.median(times):.4f}  ", end="")
    print(f"peer {statistics.median(peers):.4f}")
    print(f"share of the bound {share:.3f} (0.96)  rate against the peer {ratio:.3f} (1.00)")


if __name__ == "__main__":
    main()
