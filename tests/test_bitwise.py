"""The promise: the same bits for any number of stages, and those of the plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.compare import assert_same, plain_loop
from support.jobs import Jobs
from support.sources import DROPOUT_JOB, JOB, NESTED_JOB


@pytest.mark.parametrize(
    ("source", "steps"),
    [(JOB.replace("SGD(params, lr=0.1)", "AdamW(params)"), 6), (NESTED_JOB, 4)],
    ids=["plain, AdamW", "nested, SGD with momentum"],
)
def test_equals_the_plain_loop(jobs: Jobs, source: str, steps: int) -> None:
    losses, weights, state = plain_loop(jobs.write(source), microbatches=4, steps=steps)
    runs = [
        jobs.train("--stages", str(k), "--microbatches", "4", *more, source=source)
        for k, more in (
            (1, ()),
            (2, ("--recompute", "offload")),
            (3, ("--recompute", "never")),
            (4, ()),
        )
    ]
    for run in runs:
        assert [row["loss"] for row in run.metrics] == losses
        assert run.weights.keys() == weights.keys()
        assert all(torch.equal(value, weights[key]) for key, value in run.weights.items())
        for actual, expected in zip(run.optimizer_state.values(), state, strict=True):
            for name, value in expected.items():
                assert torch.equal(torch.as_tensor(actual[name]), torch.as_tensor(value)), name


def test_random_numbers_are_the_same_for_any_number_of_stages(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "8", "--clip-grad-norm", "0.5", "--seed", "3")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB)
    for more in (
        ("--stages", "2", "--recompute", "never"),
        ("--stages", "3", "--recompute", "offload", "--balance", "1,6,1"),
        ("--stages", "4", "--recompute", "except_first"),
        ("--stages", "2", "--recompute", "always", "--balance", "3,5"),
    ):
        assert_same(base, jobs.train(*more, *words, source=DROPOUT_JOB))
    assert base.metrics[-1]["epoch"] == 1  # eight steps of five mini-batches
    assert any(row["grad_norm"] > 0.5 for row in base.metrics)  # clipping took part
    other = jobs.train("--stages", "1", *words[:-1], "4", source=DROPOUT_JOB)
    assert other.metrics[0]["loss"] != base.metrics[0]["loss"]


def test_batch_norm_statistics_change_once_per_step(jobs: Jobs) -> None:
    run = jobs.train("--stages", "2", "--microbatches", "4", "--steps", "3", source=DROPOUT_JOB)
    assert run.weights["3.num_batches_tracked"].item() == 3 * 4


def test_threads_come_from_the_environment(jobs: Jobs) -> None:
    source = JOB.replace("def loss", "print('threads', torch.get_num_threads())\n\n    def loss")
    run = jobs.train("--stages", "1", "--steps", "1", "--threads", "2", source=source)
    assert "threads 2" in run.log("worker-0")


def test_keys_are_those_of_a_sequential(jobs: Jobs) -> None:
    run = jobs.train("--stages", "3", "--steps", "1")
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    assert list(run.weights) == list(nn.Sequential(*layers).state_dict())
