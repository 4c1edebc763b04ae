"""The promise: the same bits for any number of stages, and those of the plain loop."""

from __future__ import annotations

import re
import textwrap

import pytest
import torch

from support.draws import some
from support.real_jobs.compare import assert_same, plain_loop
from support.real_jobs.jobs import Jobs, Record
from support.real_jobs.sources import DROPOUT_JOB, JOB, NESTED_JOB
from support.slow import slow


@pytest.mark.parametrize(
    ("source", "steps", "ways"),
    [
        (
            *(JOB.replace("SGD(params, lr=0.1)", "AdamW(params)"), 6),
            (("3", "--recompute", "never"), ("1",)),
        ),
        (NESTED_JOB, 4, (("3", "--recompute", "offload"),)),
    ],
    ids=["plain, AdamW", "nested, SGD with momentum"],
)
def test_equals_the_plain_loop(
    jobs: Jobs, source: str, steps: int, ways: tuple[tuple[str, ...], ...]
) -> None:
    losses, weights, state = plain_loop(jobs.write(source), microbatches=4, steps=steps)
    for way in some(ways, 2):
        run = jobs.train("--stages", *way, "--microbatches", "4", source=source)
        assert [row["loss"] for row in run.metrics] == losses
        assert list(run.weights) == list(weights)
        assert all(torch.equal(value, weights[key]) for key, value in run.weights.items())
        for actual, expected in zip(run.optimizer_state.values(), state, strict=True):
            for name, value in expected.items():
                assert torch.equal(torch.as_tensor(actual[name]), torch.as_tensor(value)), name


KINDS = JOB.replace(
    "def optimizer(params):\n        return torch.optim.SGD(params, lr=0.1)",
    """def optimizer(params):
        matrices = [p for p in params if p.dim() == 2]
        others = [p for p in params if p.dim() != 2]
        found = []
        if matrices:
            found.append(torch.optim.Muon(matrices, lr=0.02))
        if others:
            found.append(torch.optim.AdamW(others, lr=0.01))
        return found

    def scheduler(optimizers):
        return [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in optimizers]

    class Dies(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 10 and Path("armed").exists():
                Path("armed").unlink()
                os._exit(1)
            return x""",
).replace("nn.ReLU(),", "nn.LayerNorm(16), Dies(),")
KINDS = f"import os\nfrom pathlib import Path\n{textwrap.dedent(KINDS)}"
"""Muon for matrices and AdamW for all else: a stage with the layer norm alone has no Muon."""
BOTH = re.sub(r"\n    if \w+:\n    ", "\n", KINDS)
"""The same, and each stage makes both optimizers, whatever parameters it has."""


@pytest.mark.parametrize("with_a_loss", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize(
    "source", [pytest.param(KINDS, marks=slow), BOTH], ids=["those needed", "both"]
)
def test_several_optimizers_equal_the_plain_loop(
    jobs: Jobs, source: str, *, with_a_loss: bool
) -> None:
    """Resumed with other stages, of which some lack an optimizer, and after a lost worker."""
    losses, weights, state = plain_loop(jobs.write(source), microbatches=4, steps=6)
    assert len(state) == 8
    words = ("--microbatches", "4", "--recompute", "never")
    apart = ("--stages", "3", "--balance", "1,1,4")
    cut = jobs.train(*apart, *words, "--steps", "3", source=source)
    resume = ("launch", "--resume", "--run-dir", str(cut.path), "--stages", "2", "--steps", "6")
    done = jobs.pipeworker(*resume, str(jobs.folder / "job.py"))
    assert done.returncode == 0, done.stderr
    run = Record(cut.path)
    assert [row["loss"] for row in run.metrics] == losses
    assert all(torch.equal(value, weights[key]) for key, value in run.weights.items())
    assert run.optimizer_state.keys() == weights.keys()
    for key, expected in zip(weights, state, strict=True):
        actual = run.optimizer_state[key]
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected), key
    if with_a_loss:
        (jobs.folder / "armed").touch()
        lost = jobs.train(*apart, *words, "--snapshot-every", "1", source=source)
        assert lost.summary["restarts"] == 1
        assert_same(lost, run)


def test_random_numbers_are_the_same_for_any_number_of_stages(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "6", "--clip-grad-norm", "0.5", "--seed", "3")
    base = jobs.train("--stages", "1", *words, source=DROPOUT_JOB)
    ways = (
        ("--stages", "3", "--recompute", "offload", "--balance", "1,6,1"),
        ("--stages", "2", "--recompute", "except_first"),
    )
    for more in some(ways, 2):
        assert_same(base, jobs.train(*more, *words, source=DROPOUT_JOB))
    assert base.metrics[-1]["epoch"] == 1  # six steps of five mini-batches
    assert any(row["grad_norm"] > 0.5 for row in base.metrics)  # clipping took part
    assert base.weights["3.num_batches_tracked"].item() == 6 * 4  # once a micro-batch
    asked = ("--seed", "4", "--steps", "1", "--threads", "2")
    shows = "print('threads', torch.get_num_threads())\n\n    def loss"
    source = DROPOUT_JOB.replace("def loss", shows)
    other = jobs.train("--stages", "1", *words, *asked, source=source)
    assert abs(other.metrics[0]["loss"] - base.metrics[0]["loss"]) > 1e-3
    assert "threads 2" in other.log("worker-0")
