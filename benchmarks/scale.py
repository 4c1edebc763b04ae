"""The coordinator's cost of a job with many workers: a real coordinator, simulated workers.

The workers are sockets of this process. The workers of all replicas answer at the same time, which
is the worst case. The columns are stages and replicas; seconds from the first Hello to the first
step; wall and CPU milliseconds a step, of the coordinator and its sockets; messages and bytes a
step.

python benchmarks/scale.py [--steps 20]
"""

from __future__ import annotations

import argparse
import resource
import statistics

from coordinator import job

SIZES = [(8, 1), (64, 1), (256, 1), (512, 1), (1024, 1), (128, 8), (64, 16), (32, 32)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"descriptors: {soft} -> {hard}")
    print("stages x replicas   joining     wall      CPU  messages     bytes")
    for stages, replicas in SIZES:
        with job(stages, replicas) as peers:
            peers.step(1)
            before = peers.cpu()
            walls = [peers.step(step) for step in range(2, args.steps + 2)]
            cpu = (peers.cpu() - before) / args.steps
            row = f"{stages:6} x {replicas:<9} {peers.joining:7.2f} s"
            row += f" {statistics.median(walls) * 1e3:5.1f} ms {cpu * 1e3:5.1f} ms"
            print(f"{row} {2 * len(peers.sockets):9} {peers.bytes:9}", flush=True)


if __name__ == "__main__":
    main()
