"""The time that finding facts of layers adds to a job's start, from its first process to its plan.

Without facts, with facts measured for the first time, with facts that an earlier job has measured,
and with counted operations: each with a small network, and with a Transformer of 48 alike layers.

python benchmarks/facts.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from startup import JOB

from pipeworker.host.line_process import LineProcess, start_agent, start_coordinator
from pipeworker.job.options import Options
from pipeworker.wire.keys import new_token
from pipeworker.wire.lines import (
    Bound,
    Configuration,
    Fork,
    FromAgent,
    Planned,
    ToAgent,
    Verdict,
    WorkerExited,
)

TRANSFORMER = """
import torch
from torch import nn

class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 128)

    def forward(self, tokens):
        return self.table(tokens)

def block():
    return nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)

def model():
    return [Embedding, *[block] * 48, lambda: nn.Linear(128, 1000)]

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(params):
    return torch.optim.AdamW(params)

def data():
    tokens = torch.randint(0, 1000, (8, 32))
    yield tokens, tokens
"""
WAYS: dict[str, dict[str, Any]] = {
    "none": {"balance": "even", "recompute": "always"},
    "first": {},
    "known": {},
    "counted": {"no_profile": True},
}


def seconds_to_plan(
    agent: LineProcess[ToAgent, FromAgent],
    path: Path,
    stages: int,
    way: dict[str, Any],
    number: int,
) -> float:
    """Return the seconds from the start of a job's coordinator until its stages are built."""
    run_dir = path.parent / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    (run_dir / "logs").mkdir(parents=True)
    options = Options(str(path), stages, 4, steps=1, max_restarts=0, **way)
    token, planned, verdict, endpoint = new_token(), 0.0, None, ""
    start = time.perf_counter()
    coordinator = start_coordinator()
    coordinator.send(Configuration(options.to_json(), str(run_dir), token, "127.0.0.1", number))
    while verdict is None:
        events, _ = coordinator.receive()
        for event in events:
            match event:
                case Bound():
                    endpoint = event.endpoint
                    for rank in range(stages):
                        agent.send(Fork(rank, number, endpoint, token, rank))
                case Planned():
                    planned = time.perf_counter() - start
                case Verdict():
                    verdict = event
    assert verdict.status == "done", verdict.error
    left = stages
    while left:
        reports, _ = agent.receive()
        left -= sum(isinstance(report, WorkerExited) for report in reports)
    coordinator.close_input()
    coordinator.wait(60.0)
    return planned


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    agent = start_agent()
    agent.receive()  # it has imported torch
    number = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        path = folder / "job.py"
        for text, stages, shown in ((JOB, 4, "small"), (TRANSFORMER, 2, "Transformer")):
            path.write_text(text)
            found: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(rounds + 1):
                shutil.rmtree(folder / "cache", ignore_errors=True)
                for way, facts in WAYS.items():
                    number += 1
                    found[way].append(seconds_to_plan(agent, path, stages, facts, number))
            medians = {way: statistics.median(times[1:]) for way, times in found.items()}
            without = medians.pop("none")
            more = ", ".join(f"{way} {time - without:+.2f} s" for way, time in medians.items())
            print(f"{shown}, {stages} stages: {without:.2f} s without facts; {more}")
    agent.close_input()
    agent.wait(60.0)


if __name__ == "__main__":
    main()
