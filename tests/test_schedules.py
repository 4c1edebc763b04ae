"""Schedules of the tests, in real processes: the bits are those of one stage."""

from __future__ import annotations

import json

import pytest

from support.compare import assert_same
from support.forked import Server
from support.interpreter import PRELOAD
from support.jobs import Jobs
from support.ranks import Scripts, script
from support.registered import LOOPED, LOOPED_SPLIT_BACKWARD, SPLIT_BACKWARD

SOURCE = """
    import torch
    from torch import nn
    import pipeworker

    class Down(nn.Linear):
        def forward(self, x):
            pipeworker.stash("x", x)
            return torch.tanh(super().forward(x))

    class Up(nn.Linear):
        def forward(self, x):
            return super().forward(x) + pipeworker.pop("x")

    class Centre(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            if self.training:
                self.mean.lerp_(x.detach().mean(0), 0.1)
            return x - self.mean

    def model():
        twice = nn.Linear(8, 8)
        return nn.Sequential(
            nn.Linear(8, 8), Down(8, 8), nn.Dropout(0.3), twice, nn.ReLU(inplace=True),
            Centre(), twice, Up(8, 8), nn.LayerNorm(8), nn.Linear(8, 3),
        )

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.AdamW(params, lr=0.01)

    def data():
        generator = torch.Generator().manual_seed(7)
        for size in (20, 20, 14, 20, 4):
            x = torch.randn(size, 8, generator=generator)
            yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()

    evaluation = data
"""
"""Dropout, a buffer that changes, work in place, a skip, a tie, and a mini-batch of fewer parts."""

TRAIN = """
    pipeworker.train(
        model, loss=loss, optimizer=optimizer, data=data, evaluation=evaluation, microbatches=6,
        evaluate_every=2, clip_grad_norm=0.5, run_dir="run", **json.loads(os.environ["OPTIONS"])
    )
"""


@pytest.mark.parametrize(
    ("schedule", "stages", "words"),
    [
        ("1f1b", 4, ("--recompute", "except_first")),
        ("interleaved-1f1b", 2, ("--virtual-stages", "3", "--recompute", "never")),
    ],
)
def test_every_schedule_gives_the_same_bits(
    jobs: Jobs, schedule: str, stages: int, words: tuple[str, ...]
) -> None:
    common = ("--microbatches", "6", "--evaluate-every", "2", "--clip-grad-norm", "0.5")
    one = jobs.train("--stages", "1", *common, source=SOURCE)
    run = jobs.train(
        *("--stages", str(stages), "--schedule", schedule, *words), *common, source=SOURCE
    )
    assert_same(one, run)
    assert (one.path / "evaluation.jsonl").read_text() == (
        run.path / "evaluation.jsonl"
    ).read_text()
    assert run.plan["schedule"] == schedule


@pytest.mark.parametrize(
    ("schedule", "ranks", "recompute"),
    [
        (SPLIT_BACKWARD, 3, "never"),
        (SPLIT_BACKWARD, 2, "except_first"),
        (LOOPED, 2, "always"),
        (LOOPED_SPLIT_BACKWARD, 3, "never"),
    ],
)
def test_any_legal_schedule_gives_the_same_bits(
    jobs: Jobs, scripts: Scripts, server: Server | None, schedule: str, ranks: int, recompute: str
) -> None:
    if server is None:
        pytest.skip("orders of the tests are registered in processes that are forked")
    words = ("--microbatches", "6", "--evaluate-every", "2", "--clip-grad-norm", "0.5")
    one = jobs.train("--stages", "1", *words, source=SOURCE)
    options = json.dumps({"schedule": schedule, "recompute": recompute})
    preload = {PRELOAD: "support.registered"}
    ran = scripts.start(script(SOURCE, TRAIN), ranks, OPTIONS=options, also=preload)
    run = ran.succeed()[0]
    assert_same(one, run)
    assert (one.path / "evaluation.jsonl").read_text() == (
        run.path / "evaluation.jsonl"
    ).read_text()
    assert run.plan["schedule"] == schedule
    actions = " ".join(run.plan["actions"])
    assert ("I0 " in actions) == (schedule != LOOPED)
    assert len(run.plan["stages"]) == ranks * (1 if schedule == SPLIT_BACKWARD else 2)
