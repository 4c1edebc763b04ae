"""How close a step comes to the schedule's own limit, on emulated accelerators.

A stage is a layer that sleeps in forward and twice as long in backward, so that two cores can host
eight stages. The bound of a step is M + K - 1 times what one stage takes for one micro-batch in a
plain single process, measured in the same run. The peer is torch.distributed.pipelining's
ScheduleGPipe on the same layers. All are run in turn; the table gives medians of several rounds.

    python benchmarks/emulated.py [--rounds 3] [--stages 8] [--microbatches 32] [--no-peer]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
JOB = HERE.with_name("emulated_job.py")
CASES = [  # forward seconds, activation bytes, recompute, steps, target share
    (0.010, 64 << 10, "never", 10, 0.98),
    (0.001, 64 << 10, "never", 40, 0.92),
    (0.010, 4 << 20, "never", 10, 0.82),
    (0.010, 64 << 10, "always", 10, None),
]


def python(*words: str, timeout: float = 300) -> str:
    """Run a Python program; returns what it printed last."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip().splitlines()[-1]


def plain(forward: float, size: int, microbatches: int) -> float:
    """Seconds one stage takes for one micro-batch in a single process."""
    return float(python(str(HERE), "--part=plain", f"--of={forward},{size},{microbatches}"))


def ours(forward: float, size: int, stages: int, microbatches: int, mode: str, steps: int) -> float:
    """Median seconds of a step of `pipeworker launch`, the first three left out."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = ["-m", "pipeworker", "launch", "--stages", str(stages), "--steps", str(steps)]
        words += ["--microbatches", str(microbatches), "--recompute", mode]
        words += ["--run-dir", str(run_dir), str(JOB), "--"]
        python(*words, str(stages), str(forward), str(size), str(microbatches))
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    return statistics.median(row["seconds"] for row in rows[3:])


def peer(forward: float, size: int, stages: int, microbatches: int, steps: int) -> float:
    """Median seconds of a step of ScheduleGPipe under torchrun."""
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(stages), str(HERE)]
    said = python(*words, "--part=peer", f"--of={forward},{size},{microbatches},{steps}")
    return float(said)


def table(rounds: int, stages: int, microbatches: int, with_peer: bool) -> None:
    print(f"K={stages} M={microbatches}, medians of {rounds} rounds, seconds a step")
    print("forward  activation  recompute   bound    ours   share  target    peer   share")
    for forward, size, mode, steps, target in CASES:
        bounds, times, peers = [], [], []
        for _ in range(rounds):
            one = plain(forward, size, microbatches)
            if mode == "always":  # forward again, early: M (2f + b) + (K - 1) (f + b)
                again = plain_forward = one / 3
                bounds.append(microbatches * (one + again) + (stages - 1) * (3 * plain_forward))
            else:
                bounds.append((microbatches + stages - 1) * one)
            times.append(ours(forward, size, stages, microbatches, mode, steps))
            if with_peer and mode == "never":
                peers.append(peer(forward, size, stages, microbatches, steps))
        bound, mine = statistics.median(bounds), statistics.median(times)
        share = statistics.median(b / t for b, t in zip(bounds, times, strict=True))
        line = f"{forward * 1e3:4.0f} ms  {size >> 10:6d} KB   {mode:9} {bound:7.4f} {mine:7.4f}"
        line += f"  {share:6.3f}  " + (f"{target:6.2f}" if target else "  0.97")
        if peers:
            theirs = statistics.median(b / t for b, t in zip(bounds, peers, strict=True))
            line += f" {statistics.median(peers):7.4f}  {theirs:6.3f}"
        print(line, flush=True)


def run_plain(forward: float, size: int, microbatches: int) -> None:
    """One stage by itself: all micro-batches forward, then all backward."""
    import torch
    from emulated_job import Sleeping

    torch.set_num_threads(1)
    layer = Sleeping(forward)
    data = [torch.zeros(1, size // 4) for _ in range(microbatches)]
    gradient = torch.zeros(1, size // 4)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        outputs = [layer(x.detach().requires_grad_()) for x in data]
        for output in outputs:
            output.backward(gradient)
        times.append((time.perf_counter() - start) / microbatches)
    print(statistics.median(times[1:]))


def run_peer(forward: float, size: int, microbatches: int, steps: int) -> None:
    """One rank of ScheduleGPipe."""
    import torch
    import torch.distributed as dist
    from emulated_job import Sleeping, loss
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = Sleeping(forward)
    stage = PipelineStage(layer, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, microbatches, loss_fn=loss)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, y = torch.zeros(microbatches, size // 4), torch.zeros(microbatches, 1)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == world - 1:
            schedule.step(target=y, losses=[])
        else:
            schedule.step()
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - start)
    if rank == 0:
        print(statistics.median(times[3:]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--part")
    parser.add_argument("--of", default="")
    args = parser.parse_args()
    of = [float(part) for part in args.of.split(",") if part]
    if args.part == "plain":
        run_plain(of[0], int(of[1]), int(of[2]))
    elif args.part == "peer":
        run_peer(of[0], int(of[1]), int(of[2]), int(of[3]))
    else:
        table(args.rounds, args.stages, args.microbatches, not args.no_peer)


if __name__ == "__main__":
    main()
