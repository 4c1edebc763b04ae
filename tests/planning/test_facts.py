"""Facts of layers in whole jobs: training is the same with them, and they are found once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Run
from support.slow import slow

pytestmark = pytest.mark.usefixtures("users_defaults")

JOB = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        SOMETHING
        return x + self.dropout(torch.relu(self.norm(self.linear(x)))) * torch.rand(())

def model():
    return nn.Sequential(nn.Linear(8, 16), *[Block() for _ in range(6)], nn.Linear(16, 4))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(params):
    return torch.optim.Adam(params, lr=0.01)

def data():
    for _ in range(10):
        yield torch.randn(24, 8), torch.randint(0, 4, (24,))
"""


UNPLANNED = ("--balance", "even", "--recompute", "always")


def train(jobs: Jobs, *words: str, source: str = JOB) -> Run:
    """Run the job file on two workers."""
    options = ("--stages", "2", "--microbatches", "4", "--steps", "2", *words)
    return jobs.train(*options, source=source.replace("SOMETHING", "pass"))


def numbers(run: Run) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in run.metrics]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pipeworker" / "layers.json"


@slow
def test_training_is_the_same_with_facts_without_and_with_known_ones(
    jobs: Jobs, cache: Path
) -> None:
    without = train(jobs, *UNPLANNED)
    assert "facts" not in without.plan
    assert not cache.exists()
    measured, known, counted = (train(jobs, *words) for words in ((), (), ("--no-profile",)))
    assert "measured 3 unlike layers of 8" in measured.log("coordinator")
    assert "the facts of all 8 layers are known from an earlier job" in known.log("coordinator")
    assert "counted the operations of 3 unlike layers of 8" in counted.log("coordinator")
    assert measured.plan["facts"]["layers"] == known.plan["facts"]["layers"]
    for run in (measured, known, counted):
        assert numbers(run) == numbers(without)
        assert_same(run, without)
        facts = run.plan["facts"]
        assert [layer["kind"] for layer in facts["layers"]] == [
            *("Linear", *["Block"] * 6, "Linear")
        ]
        assert facts["measured"] == (run is not counted)
        assert facts["loss"] > 0 or run is counted
    kinds = json.loads(cache.read_text())["facts"]
    assert len(kinds) == 4  # three kinds of layers, and the loss

    changed = train(jobs, source=JOB + "\n# another file\n")
    assert "measured 3 unlike layers of 8" in changed.log("coordinator")


def test_a_network_that_needs_numbers_is_measured_in_order(jobs: Jobs) -> None:
    run = train(jobs, source=JOB.replace("SOMETHING", "assert not x.isnan().any()"))
    assert "measured 3 unlike layers of 8" in run.log("coordinator")
    assert run.plan["facts"]["layers"][1]["saved_bytes"] > 0


EXISTING = """
_net = model()

def model():
    return [lambda layer=layer: layer for layer in _net]
"""


def test_layers_that_existed_before_are_measured_without_a_change(jobs: Jobs) -> None:
    measured, without = (train(jobs, *w, source=JOB + EXISTING) for w in ((), UNPLANNED))
    assert "measured 3 unlike layers of 8" in measured.log("coordinator")
    assert numbers(measured) == numbers(without)
    assert_same(measured, without)


@slow
def test_a_home_that_cannot_be_written_is_no_error(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    run = train(jobs)
    assert "measured 3 unlike layers of 8" in run.log("coordinator")
    assert "are not kept for later jobs" in run.log("coordinator")
