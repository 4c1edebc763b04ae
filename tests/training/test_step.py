"""Steps: their cost on the control plane, and numbers of micro-batches and tensors."""

from __future__ import annotations

import re

import pytest

from support.real_jobs.compare import plain_loop
from support.real_jobs.jobs import Jobs
from support.real_jobs.sources import JOB
from support.slow import slow


def control_messages(jobs: Jobs, *words: str) -> tuple[int, int]:
    """Return the control messages (received, sent) of a job of two stages, without heartbeats."""
    run = jobs.train("--stages", "2", *words)
    found = re.search(r"control messages: (\d+) received, (\d+) sent", run.log("coordinator"))
    assert found
    return int(found[1]), int(found[2])


def test_two_control_messages_per_worker_and_step_for_any_m(jobs: Jobs) -> None:
    few = control_messages(jobs, "--microbatches", "2", "--steps", "1")
    more = control_messages(jobs, "--microbatches", "10", "--steps", "4")
    assert [a - b for a, b in zip(more, few, strict=True)] == [2 * 3, 2 * 3]


@pytest.mark.parametrize("microbatches", [*(pytest.param(m, marks=slow) for m in (1, 2)), 16])
def test_fewer_micro_batches_than_stages_or_more_than_samples(
    jobs: Jobs, microbatches: int
) -> None:
    losses, _, _ = plain_loop(jobs.write(JOB), microbatches=microbatches, steps=3)
    run = jobs.train("--stages", "3", "--microbatches", f"{microbatches}", "--steps", "3")
    assert [row["loss"] for row in run.metrics] == losses
    assert len(losses) == 3


def test_the_checked_actions_are_in_the_plan(jobs: Jobs) -> None:
    run = jobs.train("--stages", "2", "--microbatches", "2", "--steps", "1", source=JOB)
    assert run.plan["actions"] == [
        "gpipe stages=2 microbatches=2",
        "0: 0F0 0>A0 0>T0@1 0F1 0>A1 0>T1@1 0L0 0R0 0<G0 0B0 0R1 0<G1 0B1",
        "1: 1<A0 1<T0@0 1F0 1<A1 1<T1@0 1F1 1R0 1B0 1>G0 1R1 1B1 1>G1",
    ]
    assert run.plan["balance"] == [3, 2]
    assert run.plan["stages"][1]["classes"] == ["Tanh", "Linear"]


SLOW_UPDATE = JOB.replace(
    "    def optimizer(params):\n",
    """    import time

    class Slow(torch.optim.SGD):
        def step(self):
            time.sleep(0.2)
            return super().step()

    def optimizer(params):
        return Slow(params, lr=0.1)

    def unused(params):
""",
    1,
)


def test_the_time_of_an_update_is_no_idle_time(jobs: Jobs) -> None:
    """The update of a step is at the beginning of the next one's time."""
    words = ("--stages", "1", "--microbatches", "2", "--steps", "3")
    run = jobs.train(*words, source=SLOW_UPDATE)
    assert run.metrics[0]["bubble"] > 0
    for row in run.metrics[1:]:
        busy = (1 - row["bubble"]) * row["seconds"]  # however slow the host is
        assert busy > 0.19
    assert all(seconds > 0.2 for seconds in run.summary["busy_seconds"])


MANY_JOB = """
    import time
    import torch
    from torch import nn

    class Fan(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(60))
            self.calls = 0

        def forward(self, x):
            if self.calls % 20 == 0:  # the first forward of a step, or its first recompute
                time.sleep(0.1)
            self.calls += 1
            columns = x if isinstance(x, list) else [x] * 60
            return [column * scale for column, scale in zip(columns, self.scale)]

    def model():
        return nn.Sequential(Fan(), Fan(), Fan())

    def loss(output, target):
        return sum(column.mean() for column in output) * 0.01

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    def data():
        for _ in range(2):
            yield torch.ones(40, 2), torch.zeros(40)
"""
"""Sixty tensors at each boundary, and a slow receiver, so that they accumulate."""


@slow
def test_many_tensors_and_many_micro_batches(jobs: Jobs) -> None:
    losses, _, _ = plain_loop(jobs.write(MANY_JOB), microbatches=20, steps=2)
    assert len(losses) == 2
    for backend in ("auto", "gloo"):
        words = ("--stages", "3", "--microbatches", "20", "--backend", backend)
        assert [row["loss"] for row in jobs.train(*words, source=MANY_JOB).metrics] == losses
