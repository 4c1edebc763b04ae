"""The cost of a lost worker: windows with and without a loss in turn, K=4.

python benchmarks/recovery.py [--stages 4] [--rounds 5] [--every 30]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = """
import sys
import torch
from torch import nn

def block():
    return nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.Dropout(0.1))

def model():
    return [block] * (2 * int(sys.argv[1]))

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)

def data():
    while True:
        x = torch.randn(64, 128)
        yield x, x.roll(1, 1)
"""


class Run:
    """A job that trains without end."""

    def __init__(self, folder: Path, stages: int) -> None:
        job = folder / "job.py"
        job.write_text(JOB)
        self.path, self.stages = folder / "run", stages
        line = [sys.executable, "-m", "pipeworker", "launch", "--stages", str(stages)]
        line += ["--microbatches", "8", "--steps", "1000000000", "--max-restarts", "1000000"]
        line += ["--run-dir", str(self.path), str(job), "--", str(stages)]
        self.process = subprocess.Popen(
            line,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def steps(self) -> int:
        path = self.path / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def pids(self) -> list[int]:
        plan = json.loads((self.path / "plan.json").read_text())
        return [stage["pid"] for stage in plan["stages"]]

    def window(self, seconds: float, lost: bool) -> tuple[int, float]:
        """Return the steps done in `seconds`, and the seconds from a loss to the next step."""
        started, before, recovery = time.monotonic(), self.steps, 0.0
        if lost:
            old = self.pids
            os.kill(random.choice(old), signal.SIGKILL)
            while self.pids == old:
                time.sleep(0.002)
            resumed = self.steps
            while self.steps == resumed:
                time.sleep(0.002)
            recovery = time.monotonic() - started
        time.sleep(started + seconds - time.monotonic())
        return self.steps - before, recovery

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=float, default=30.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), args.stages)
        try:
            while run.steps < 50:
                time.sleep(0.1)
            shares, times = [], []
            for _ in range(args.rounds):
                quiet, _ = run.window(args.every, lost=False)
                steps, recovery = run.window(args.every, lost=True)
                shares.append(steps / quiet)
                times.append(recovery)
                print(f"{quiet} steps, {steps} with a loss: {recovery:.2f} s", flush=True)
        finally:
            run.end()
    print(f"share {statistics.median(shares):.3f} at a loss every {args.every:g} s (target >= 0.9)")
    print(f"to the next step {statistics.median(times):.2f} s, at most {max(times):.2f} s")


if __name__ == "__main__":
    main()
