"""The timeline in a run directory: the workers of real jobs recorded it."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest

from pipeworker.plan.actions import COMPUTE, parse_actions
from pipeworker.trace.recorder import EVALUATION, SAVE, UPDATE, seconds
from support.jobs import Jobs, Run, until
from support.slow import slow
from support.sources import JOB

EVALUATED = (
    JOB
    + """
    def evaluation():
        return data()
"""
)
WORDS = ("--stages", "2", "--microbatches", "4")


def timelines(path: Path, workers: int = 2) -> list[list[Any]]:
    files = [path / "timeline" / f"worker-{rank}.jsonl" for rank in range(workers)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def test_every_action_of_every_step_is_recorded_with_trace(jobs: Jobs) -> None:
    words = ("--steps", "3", "--evaluate-every", "2", "--trace")
    run = jobs.train(*WORDS, *words, source=EVALUATED)
    for rank, (start, program, *rest) in enumerate(timelines(run.path)):
        assert start["worker"] == rank
        assert start["stages"] == str(rank)
        actions = parse_actions(program["actions"])
        assert {a.kind for a in actions} & COMPUTE
        steps = [row for row in rest if "times" in row]
        assert [row["step"] for row in steps] == [1, 2, 3]
        last = 0.0
        for row in steps:
            times = seconds(row["began"], row["times"])
            assert len(times) == 2 * len(actions)
            assert last <= row["received"] <= row["began"] <= times[0] <= times[-1]
            assert times[-1] <= row["answered"]
            last = row["answered"]
        names = [name for row in rest for name, *_ in row.get("spans", ())]
        assert names.count(UPDATE) >= 3  # and what evaluations change
        assert names.count(EVALUATION) == 1
        assert names.count(SAVE) == 1


SLEEPING = """
    import time

    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(0.015)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(0.015)
            return gradient

    class Sleeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return Sleep.apply(x * self.scale)

    def model():
        return [Sleeping] * 6

    def loss(output, target):
        return (output - target).pow(2).mean()

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.01)

    def data():
        while True:
            yield torch.ones(8, 4), torch.zeros(8, 4)
"""


def median_step(run: Run) -> float:
    return float(statistics.median(row["seconds"] for row in run.metrics[2:]))


@slow
def test_the_advice_of_a_report_is_worth_what_it_says(jobs: Jobs) -> None:
    shape = ("--stages", "2", "--microbatches", "6", "--steps", "5")
    words = (*shape, "--schedule", "zb-h1", "--recompute", "never")
    run = jobs.train(*words, "--balance", "5,1", source=SLEEPING)
    text = jobs.pipeworker("report", str(run.path)).stdout
    found = json.loads(jobs.pipeworker("report", str(run.path), "--json").stdout)
    advice = found["advice"]
    first = rf"stage 0 takes 6\d% longer than the mean: {advice['option']} would give 1\.\d+ times"
    assert re.match(first, text), text
    assert advice["option"] == "--balance 3,3"
    for time in found["workers"]:
        parts = [time[name] for name in ("forward", "recompute", "backward", "optimizer")]
        assert sum(parts) + sum(time["idle"].values()) == pytest.approx(found["seconds"], rel=0.01)
    assert found["steps"] == [2, 3, 4, 5]
    idle = found["workers"][1]["idle"]
    assert idle["imbalance"] > 0.4 * found["seconds"]
    better = jobs.train(*words, *advice["option"].split(), source=SLEEPING)
    both = jobs.pipeworker("report", str(run.path), "--compare", str(better.path)).stdout
    assert re.match(rf"a step of {better.path} takes \d+% less time than one of {run.path}", both)
    assert both.splitlines()[3].split()[0] == "imbalance"  # the largest difference
    gained = median_step(run) / median_step(better)
    assert gained - 1 == pytest.approx(advice["gain"] - 1, rel=1 / 3)


def test_what_the_workers_of_a_running_job_do_is_shown(jobs: Jobs) -> None:
    words = ("--stages", "2", "--microbatches", "4", "--steps", "100000")
    process, path = jobs.start(*words, source=SLEEPING)
    until(lambda: (path / "metrics.jsonl").exists() and (path / "metrics.jsonl").read_text())
    found = json.loads(jobs.pipeworker("top", str(path), "--json").stdout)
    assert [one["stages"] for one in found["workers"]] == [[0], [1]]
    assert found["doing"] == "stepping"
    assert all(one["step"] > 0 and one["memory_bytes"] > 0 for one in found["workers"])
    text = jobs.pipeworker("top", str(path)).stdout
    assert re.search(r"step \d+  loss [\d.e-]+  .* samples/s", text)
    assert re.search(r"^worker +stages +does +step", text, re.MULTILINE)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert not {".watch", ".now.json"} & {entry.name for entry in path.iterdir()}
    over = jobs.pipeworker("top", str(path))
    assert over.returncode == 2
    assert "no job is running there" in over.stderr
