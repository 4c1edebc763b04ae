"""What copies of the state cost while steps go on: snapshots in memory, checkpoints on disk.

python benchmarks/checkpoint.py [--rounds 3] [--microbatches 16] [--steps 40]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from parts import python

JOB = Path(__file__).with_name("transformer_job.py").resolve()
SKIPPED_STEPS = 10
KINDS = {
    "neither": ("--restarts", "0"),
    "checkpoint every 10 steps": ("--restarts", "0", "--checkpoint-every", "10"),
    "snapshots by their cost": (),
    "snapshot every step": ("--snapshot-every", "1"),
    "both": ("--checkpoint-every", "10"),
}


def run(microbatches: int, steps: int, words: tuple[str, ...]) -> tuple[float, float]:
    """The mean seconds of a step, and the bytes of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        line = ["-m", "pipeworker", "launch", "--stages", "2", "--steps", str(steps)]
        line += ["--microbatches", str(microbatches), "--recompute", "never", *words]
        python(*line, "--run-dir", str(path), str(JOB), "--", str(microbatches), "adamw")
        rows = [json.loads(row) for row in (path / "metrics.jsonl").open()]
        *_, last = (path / "checkpoints").glob("step-*")
        size = sum(file.stat().st_size for file in last.iterdir())
    return statistics.mean(row["seconds"] for row in rows[SKIPPED_STEPS:]), size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(args.rounds):
        for kind, words in KINDS.items():
            seconds, size = run(args.microbatches, args.steps, words)
            times[kind].append(seconds)
    print(f"K=2 M={args.microbatches}, AdamW, {size / 2**20:.0f} MB of state; seconds a step")
    for kind, measured in times.items():
        ratios = [a / b for a, b in zip(measured, times["neither"], strict=True)]
        print(f"{kind:28} {statistics.median(measured):.4f}  {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
