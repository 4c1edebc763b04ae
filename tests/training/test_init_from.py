"""``--init-from``: training that begins with weights from a file."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs
from support.real_jobs.ranks import LOOP, Scripts, script

# The optimizer copies the weights when it is built, and pulls the parameters towards the copy.
SOURCE = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Tied(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.weight = first.weight

        def forward(self, x):
            return F.linear(x, self.weight)

    def model():
        first = nn.Linear(8, 8)
        return nn.Sequential(first, nn.BatchNorm1d(8), nn.Tanh(), Tied(first), nn.Linear(8, 3))

    def loss(output, target):
        return F.cross_entropy(output, target)

    class Back(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.start = [p.detach().clone() for g in self.param_groups for p in g["params"]]

        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            held = [p for g in self.param_groups for p in g["params"]]
            for parameter, start in zip(held, self.start):
                parameter.lerp_(start, 0.1)

    def optimizer(params):
        return Back(params, lr=0.1)

    def data():
        generator = torch.Generator().manual_seed(7)
        for _ in range(3):
            x = torch.randn(8, 8, generator=generator)
            yield x, (x[:, 0] > 0).long()
"""


JOB: dict[str, Any] = {}
exec(textwrap.dedent(SOURCE), JOB)


@pytest.fixture
def weights(jobs: Jobs) -> Path:
    """Save other weights than the job builds, and the tied weight under one of its names only."""
    torch.manual_seed(5)
    state = JOB["model"]().state_dict()
    state["1.running_mean"] += 0.5
    del state["0.weight"]
    path = jobs.folder / "weights.safetensors"
    save_file(dict(state), path)
    return path


def test_results_do_not_depend_on_the_number_of_stages(
    jobs: Jobs, scripts: Scripts, weights: Path
) -> None:
    line = ("--microbatches", "4", "--init-from", weights.name)
    run = jobs.train("--stages", "3", *line, source=SOURCE)
    ranks = scripts.start(script(SOURCE, LOOP), 1, OPTIONS=f'{{"init_from": "{weights}"}}')
    assert_same(ranks.succeed()[0], run)

    net = JOB["model"]()
    state = load_file(weights)
    net.load_state_dict({**state, "0.weight": state["3.weight"]})
    optimizer = JOB["optimizer"](net.parameters())
    for x, y in JOB["data"]():
        optimizer.zero_grad()
        for xm, ym in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            (JOB["loss"](net(xm), ym) * (len(xm) / len(x))).backward()
        optimizer.step()
    for name, value in net.state_dict().items():
        assert torch.allclose(run.weights[name], value, atol=1e-6), name


def test_mismatches_are_refused_or_left_out(jobs: Jobs, weights: Path) -> None:
    state = load_file(weights)
    del state["4.bias"], state["1.running_var"]
    state["9.weight"] = torch.ones(1)
    save_file(state, weights)
    line = ("--stages", "2", "--microbatches", "2", "--init-from", str(weights))
    refused = jobs.run(*line, source=SOURCE)
    assert refused.status == 2
    (error,) = refused.stderr.splitlines()
    assert error.startswith(f"error: --init-from {weights}: does not fit the model: it lacks ")
    assert error.endswith(
        "the model does not have 9.weight; use weights of this model, or --no-init-strict, "
        "which loads what does fit"
    )

    run = jobs.train(*line, "--no-init-strict", source=SOURCE)
    warning = "warning: --no-init-strict: 3 names of the model or of --init-from are left out"
    assert sum(line.startswith(warning) for line in run.stderr.splitlines()) == 1, run.stderr
    logs = [run.log(f"worker-{number}") for number in (0, 1)]
    assert "it lacks 1.running_var; the model does not have 9.weight\n" in logs[0]
    assert "it lacks 4.bias\n" in logs[1]


def test_a_missing_file_starts_no_process(jobs: Jobs) -> None:
    run = jobs.run("--stages", "2", "--init-from", "nowhere.pt", source=SOURCE)
    assert run.status == 2
    there = jobs.folder / "nowhere.pt"
    assert run.stderr == f"error: --init-from {there}: cannot be read: No such file or directory\n"
    assert not run.path.exists()
    run = jobs.run("--stages", "2", "--no-init-strict", source=SOURCE)
    assert run.stderr == "error: --no-init-strict: no file is given; add --init-from\n"
