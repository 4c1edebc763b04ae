"""Skip connections in real processes: the numbers of the plain loop, and named mistakes."""

from __future__ import annotations

import pytest
import torch

from support.real_jobs.compare import assert_same, plain_loop
from support.real_jobs.jobs import Jobs
from support.slow import slow

UNET = """
    import sys
    import torch
    from torch import nn
    import pipeworker

    class Down(nn.Module):
        def __init__(self, level):
            super().__init__()
            self.level, self.linear = level, nn.Linear(8, 8)

        def forward(self, x):
            x = torch.tanh(x)
            with pipeworker.namespace(f"level{self.level}"):
                pipeworker.stash("x", x)
                pipeworker.stash("mask", x > 0)
            return self.linear(x)

    class Up(nn.Module):
        def __init__(self, level):
            super().__init__()
            self.level, self.linear = level, nn.Linear(16, 8)

        def forward(self, x):
            with pipeworker.namespace(f"level{self.level}"):
                y = pipeworker.pop("x") * pipeworker.pop("mask")
            return self.linear(torch.cat([x, y.t().contiguous().t()], 1)).tanh()

    def model():
        return nn.Sequential(
            nn.Linear(8, 8), Down(0), Down(1), nn.Tanh(), Down(2), nn.ReLU(inplace=True), Up(2),
            Up(1), nn.Linear(8, 8), Up(0), nn.Linear(8, 3),
        )

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.AdamW(params, lr=0.01)

    def data():
        generator = torch.Generator().manual_seed(7)
        for step in range(5):
            x = torch.randn(10 + step % 2, 8, generator=generator)
            yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
"""


@slow
def test_a_unet_equals_the_plain_loop_at_any_number_of_stages(jobs: Jobs) -> None:
    losses, weights, _ = plain_loop(jobs.write(UNET), microbatches=4, steps=5)
    for words in (
        ("--stages", "2", "--recompute", "always"),
        ("--stages", "4", "--recompute", "never", "--balance", "2,4,1,4", "--backend", "gloo"),
    ):
        run = jobs.train(*words, "--microbatches", "4", source=UNET)
        assert [row["loss"] for row in run.metrics] == losses, words
        assert all(torch.equal(value, weights[key]) for key, value in run.weights.items()), words
    assert "skip 'level0/x' from stage 0 to 3" in run.log("coordinator")


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        (("Up(1)", "nn.Tanh()"), 2, "layer 2 (Down) stashes 'level1/x', which no layer after it"),
        (
            ('stash("mask", x > 0)', 'stash("mask" if len(x) < 4 else "other", x > 0)'),
            1,
            "stash('level0/other', ...): stashed or received here, and not popped",
        ),
        pytest.param(
            ('f"level{self.level}"', "f\"{self.level}-{__import__('os').getpid()}\""),
            1,
            "and not popped; pop it, by a name that is the same in every process",
            marks=slow,
        ),
        (
            (
                "import pipeworker",
                "pipeworker = __import__('types').SimpleNamespace(\n"
                "        **{n: (lambda *a, n=n: getattr(__import__('pipeworker'), n)(*a))\n"
                "           for n in ('stash', 'pop', 'namespace')})",
            ),
            1,
            "No skip connection was planned: import pipeworker at the top of",
        ),
    ],
    ids=["not popped", "other at run time", "other by process", "imported late"],
)
def test_a_mistake_is_named(jobs: Jobs, change: tuple[str, str], status: int, message: str) -> None:
    source = UNET.replace(*change)
    if "other" in message:  # the first mini-batch is cut small, the second is not
        source = source.replace("10 + step % 2", "6 if step == 0 else 20")
    run = jobs.run("--stages", "2", "--microbatches", "3", source=source)
    assert run.status == status, run.stderr
    assert message in run.stderr
    if "other" in message:
        assert "in forward: stage 0" in run.stderr
        assert "step 2" in run.stderr


CACHED = """
    import functools

    @functools.lru_cache
    def mask(size):
        return torch.tril(torch.ones(size, size))

    class Masks(nn.Module):
        def forward(self, x):
            return x @ mask(8)

    class Drops(nn.Module):
        def forward(self, x):
            if self.training:
                pipeworker.stash("training", x)
            return x

    class Adds(nn.Module):
        def forward(self, x):
            return x + pipeworker.pop("training") if self.training else x

    def model():
        return nn.Sequential(
            Drops(), nn.Linear(8, 8), Down(0), Masks(), Up(0), Adds(), nn.Linear(8, 3)
        )

    evaluation = data
"""


@slow
def test_layers_cached_in_the_survey_do_not_affect_training(jobs: Jobs) -> None:
    """A skip may also exist only in training."""
    words = ("--microbatches", "2", "--steps", "3", "--evaluate-every", "2")
    one, three = (jobs.train("--stages", str(k), *words, source=UNET + CACHED) for k in (1, 3))
    assert_same(one, three)
    rows = [(run.path / "evaluation.jsonl").read_text() for run in (one, three)]
    assert rows[0] == rows[1]
