"""Jobs that are planned from their measured layers: the plan changes no bit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Record, Reference
from support.real_jobs.torchrun import Torchrun
from support.slow import slow

pytestmark = pytest.mark.usefixtures("users_defaults")

SOURCE = """
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

DIED = Path(__file__).with_name("died")

class Slow(nn.Module):
    def __init__(self, milliseconds):
        super().__init__()
        self.seconds = milliseconds / 1000
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x):
        time.sleep(self.seconds)
        return self.dropout(torch.tanh(self.linear(x)))

def model():
    return nn.Sequential(*(Slow(ms) for ms in (8, 8, 0, 0, 0, 0, 0, 0)))

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(params):
    return torch.optim.Adam(params, lr=0.01)

def data():
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        if ARGUMENT and step == 3 and not DIED.exists():
            DIED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield torch.randn(12, 8, generator=generator), torch.randn(12, 8, generator=generator)
"""
STILL, DIES = SOURCE.replace("ARGUMENT", "False"), SOURCE.replace("ARGUMENT", "True")
WORDS = ("--microbatches", "4")
UNPLANNED = ("--balance", "even", "--recompute", "never")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for facts: alike jobs measure once."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def cache(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", known)


@pytest.fixture
def plain(reference: Reference) -> Record:
    """A run of one stage that is not planned."""
    return reference("--stages", "1", *WORDS, *UNPLANNED, source=STILL)


def test_a_plan_follows_the_times_of_the_layers(jobs: Jobs, plain: Record) -> None:
    run = jobs.train("--stages", "2", *WORDS, source=STILL)
    assert_same(run, plain)
    assert run.plan["balance"][0] < 4
    assert "; balance: a step takes " in run.stdout
    assert [stage["recompute"] for stage in run.plan["stages"]] == ["never"] * 2
    for stage in run.plan["stages"]:
        assert stage["worker"] == stage["stage"]
        assert stage["seconds"]["forward"] > 0
        assert stage["seconds"]["recompute"] == 0
        assert 0 < stage["memory_bytes"] < stage["limit_bytes"]
    assert run.plan["step_seconds"] > 0.008 * 4
    shown = jobs.pipeworker(
        "plan", "--stages", "2", *WORDS, "--json", str(jobs.write(STILL))
    ).stdout
    assert json.loads(shown)["bubble"] == run.plan["bubble"]


def test_the_fastest_schedule_gives_the_bits_of_one_stage_also_after_a_loss(
    jobs: Jobs, plain: Record
) -> None:
    run = jobs.train("--stages", "2", "--schedule", "auto", *WORDS, source=DIES)
    assert (jobs.folder / "died").exists()
    assert run.summary["restarts"] == 1
    assert_same(run, plain)
    assert "plan: " in run.stdout
    assert "schedule " in run.stdout
    assert len(run.plan["stages"]) > 2  # two slow layers, of which each worker gets one
    assert {stage["worker"] for stage in run.plan["stages"]} == {0, 1}
    found = json.loads(jobs.pipeworker("report", str(run.path), "--json").stdout)
    assert found["planned"]["seconds"] == pytest.approx(run.plan["step_seconds"])
    trace = jobs.pipeworker("trace", str(run.path), "-o", "trace.json")
    assert trace.returncode == 0, trace.stderr
    assert "planned" in (jobs.folder / "trace.json").read_text()
    again = jobs.pipeworker("launch", "--resume", str(run.path), "--steps", "5")
    assert again.returncode == 0, again.stderr


@slow
def test_ranks_of_torchrun_take_the_stages_of_the_plan(
    jobs: Jobs, torchrun: Torchrun, plain: Record
) -> None:
    words = (*WORDS, "--schedule", "auto")
    run = torchrun(*words, source=STILL).end()
    assert run.status == 0, run.stderr
    assert_same(run, plain)
    assert len(run.plan["stages"]) > 2


@pytest.mark.parametrize(
    ("memory", "status", "said"),
    [
        ("1MB", 2, "error: --stages 2: does not fit into the memory; with balance"),
        pytest.param("100GB", 0, "no other balance makes a step shorter", marks=slow),
    ],
)
def test_a_given_memory_is_a_limit(jobs: Jobs, memory: str, status: int, said: str) -> None:
    words: dict[str, Any] = {"source": STILL.replace("(8, 8, 0", "(0, 0, 0")}
    run = jobs.run("--stages", "2", "--no-profile", "--memory", memory, *WORDS, **words)
    assert run.status == status, run.stderr
    assert said in (run.stderr if status else run.stdout)
