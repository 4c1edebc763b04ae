"""The promise: the same bits for any number of stages, and those of the plain loop."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import JOB, Jobs, Run
from torch import nn

DROPOUT_JOB = """
    import random
    import torch
    from torch import nn

    class Noise(nn.Module):
        def forward(self, x):
            return x * (1 + 0.1 * random.random())

    def model():
        return [
            lambda: nn.Linear(8, 16), nn.ReLU, lambda: nn.Dropout(0.3),
            lambda: nn.BatchNorm1d(16), Noise, lambda: nn.Linear(16, 16),
            lambda: nn.Dropout(0.2), lambda: nn.Linear(16, 3),
        ]

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.AdamW(params, lr=0.01)

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def data():
        for _ in range(5):
            x = torch.randn(11, 8)
            yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
"""
"""Lazy layers, everything random, batch norm, a scheduler, data from the global stream."""

NESTED_JOB = """
    import torch
    from torch import nn

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, batch):
            x, mask = batch["x"], batch["mask"]
            a = self.a(x)
            return {"a": a, "both": (a.t(), self.b(x)), "mask": mask, "scale": 2, "again": a}

    class Mix(nn.Module):
        def forward(self, value):
            left, b = value["both"]
            summed = value["a"] + left.t() * value["scale"] + value["again"]
            return summed, b, value["mask"], None

    class Join(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(8, 1)

        def forward(self, value):
            a, b, mask, nothing = value
            assert nothing is None and mask.dtype is torch.bool
            return self.out(torch.where(mask, a, b).relu_())

    def model():
        return nn.Sequential(Split(), nn.Identity(), Mix(), Join())

    def loss(output, target):
        return nn.functional.mse_loss(output, target["y"])

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def data():
        g = torch.Generator().manual_seed(3)
        for step in range(4):
            n = 9 if step % 2 else 5
            x = torch.randn(n, 6, generator=g)
            yield {"x": x, "mask": x[:, :1] > 0}, {"y": x.sum(1, keepdim=True)}
"""
"""Nested values, masks, one tensor twice, transposed tensors, in-place, changing batch sizes."""


def plain_loop(
    job_file: Path, *, microbatches: int, steps: int
) -> tuple[list[float], dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The loop of the contract: losses, weights, optimizer state in parameter order."""
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("plain_job", job_file)
    assert spec is not None
    assert spec.loader is not None
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    torch.manual_seed(0)
    net = job.model()
    opt = job.optimizer(net.parameters())
    losses = []
    for _, (x, y) in zip(range(steps), job.data(), strict=False):
        opt.zero_grad()
        total = 0.0
        count = min(microbatches, _size(x))
        for xm, ym in zip(_split(x, count), _split(y, count), strict=True):
            scaled = job.loss(net(xm), ym) * (_size(xm) / _size(x))
            scaled.backward()
            total += scaled.item()
        opt.step()
        losses.append(total)
    state = [opt.state[p] for p in net.parameters()]
    return losses, net.state_dict(), state


def _size(value: Any) -> int:
    while isinstance(value, dict):
        value = next(iter(value.values()))
    return len(value)


def _split(value: Any, count: int) -> list[Any]:
    if isinstance(value, dict):
        pieces = {key: _split(item, count) for key, item in value.items()}
        return [{key: pieces[key][m] for key in value} for m in range(count)]
    return list(value.tensor_split(count))


def assert_same(left: Run, right: Run) -> None:
    """Losses, norms, weights and optimizer state, without tolerance."""
    for name in ("loss", "grad_norm", "lr", "epoch"):
        assert [r[name] for r in left.metrics] == [r[name] for r in right.metrics], name
    assert left.weights.keys() == right.weights.keys()
    for key, value in left.weights.items():
        assert torch.equal(value, right.weights[key]), key
    assert left.optimizer_state.keys() == right.optimizer_state.keys()
    for key, state in left.optimizer_state.items():
        for name, value in state.items():
            other = right.optimizer_state[key][name]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), (key, name)


@pytest.mark.parametrize("source", [JOB, NESTED_JOB], ids=["plain", "nested"])
@pytest.mark.parametrize("optimizer", ["SGD(params, lr=0.1, momentum=0.9)", "AdamW(params)"])
def test_equals_the_plain_loop(jobs: Jobs, source: str, optimizer: str) -> None:
    source = source.replace("SGD(params, lr=0.1)", optimizer)
    source = source.replace("SGD(params, lr=0.05, momentum=0.9)", optimizer)
    steps = 6 if source.startswith(JOB[:40]) and "Split" not in source else 4
    losses, weights, state = plain_loop(jobs.write(source), microbatches=4, steps=steps)
    runs = [
        jobs.train("--stages", str(k), "--microbatches", "4", *more, source=source)
        for k, more in ((1, ()), (2, ()), (3, ("--recompute", "never")), (4, ()))
    ]
    for run in runs:
        assert [row["loss"] for row in run.metrics] == losses
        assert run.weights.keys() == weights.keys()
        assert all(torch.equal(value, weights[key]) for key, value in run.weights.items())
        for ours, theirs in zip(run.optimizer_state.values(), state, strict=True):
            for name, value in theirs.items():
                assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value)), name


def test_everything_random_is_the_same_for_any_grouping(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "8", "--clip-grad-norm", "0.5", "--seed", "3")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB)
    for more in (
        ("--stages", "2", "--recompute", "never"),
        ("--stages", "3", "--balance", "1,6,1"),
        ("--stages", "4", "--recompute", "except_first"),
        ("--stages", "2", "--recompute", "always", "--balance", "3,5"),
    ):
        assert_same(base, jobs.train(*more, *words, source=DROPOUT_JOB))
    assert base.metrics[-1]["epoch"] == 1  # eight steps of five mini-batches
    assert any(row["grad_norm"] > 0.5 for row in base.metrics)  # clipping took part
    other = jobs.train("--stages", "1", *words[:-1], "4", source=DROPOUT_JOB)
    assert other.metrics[0]["loss"] != base.metrics[0]["loss"]


def test_batch_norm_statistics_change_once(jobs: Jobs) -> None:
    run = jobs.train("--stages", "2", "--microbatches", "4", "--steps", "3", source=DROPOUT_JOB)
    assert run.weights["3.num_batches_tracked"].item() == 3 * 4


def test_threads_come_from_the_environment(jobs: Jobs) -> None:
    source = JOB.replace("def loss", "print('threads', torch.get_num_threads())\n\n    def loss")
    run = jobs.train("--stages", "1", "--steps", "1", "--threads", "2", source=source)
    assert "threads 2" in run.log("stage-0")


def test_keys_are_those_of_a_sequential(jobs: Jobs) -> None:
    run = jobs.train("--stages", "3", "--steps", "1")
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    assert list(run.weights) == list(nn.Sequential(*layers).state_dict())
