"""Facts of layers in whole jobs: training is the same with them, and they are found once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeworker.job.options import Options
from support.manual_job import ManualJob

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


WAYS: dict[str, dict[str, Any]] = {
    "none": {"balance": "even", "recompute": "always"},
    "measured": {},
    "counted": {"no_profile": True},
}
"""Options by the facts that a job is planned from."""


class Found:
    """A job that has ended."""

    def __init__(self, folder: Path, name: str, facts: str, text: str = JOB) -> None:
        path = folder / "job.py"
        path.write_text(text.replace("SOMETHING", "pass"))
        options = Options(str(path), 2, 4, steps=3, max_restarts=0, **WAYS[facts])
        self.run = folder / name
        job = ManualJob(options, self.run)
        for thread in job.threads[:1]:  # it ends with the coordinator
            thread.join(120)
        job.close()
        assert job.verdict is not None
        assert job.verdict.status == "done", job.verdict.error
        self.log = job.log

    @property
    def facts(self) -> Any:
        return json.loads((self.run / "plan.json").read_text()).get("facts")

    @property
    def numbers(self) -> list[tuple[float, float]]:
        rows = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [(row["loss"], row["grad_norm"]) for row in rows]

    @property
    def state(self) -> dict[str, bytes]:
        (folder,) = (self.run / "checkpoints").iterdir()
        return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pipeworker" / "layers.json"


def test_training_is_the_same_with_facts_without_and_with_known_ones(
    tmp_path: Path, cache: Path
) -> None:
    without = Found(tmp_path, "without", "none")
    assert without.facts is None
    assert not cache.exists()
    jobs = [Found(tmp_path, name, "measured") for name in ("measured", "known")]
    jobs.append(Found(tmp_path, "counted", "counted"))
    assert "measured 3 unlike layers of 8" in jobs[0].log
    assert "the facts of all 8 layers are known from an earlier job" in jobs[1].log
    assert "counted the operations of 3 unlike layers of 8" in jobs[2].log
    assert jobs[0].facts["layers"] == jobs[1].facts["layers"]
    for job in jobs:
        assert job.numbers == without.numbers
        assert job.state == without.state
        assert [layer["kind"] for layer in job.facts["layers"]] == [
            *("Linear", *["Block"] * 6, "Linear")
        ]
        assert job.facts["measured"] == (job is not jobs[2])
        assert job.facts["loss"] > 0 or job is jobs[2]
    known = json.loads(cache.read_text())["facts"]
    assert len(known) == 4  # three kinds of layers, and the loss

    changed = Found(tmp_path, "changed", "measured", JOB + "\n# another file\n")
    assert "measured 3 unlike layers of 8" in changed.log


def test_a_network_that_needs_numbers_is_measured_in_order(tmp_path: Path) -> None:
    text = JOB.replace("SOMETHING", "assert not x.isnan().any()")
    found = Found(tmp_path, "run", "measured", text)
    assert "measured 3 unlike layers of 8" in found.log
    assert found.facts["layers"][1]["saved_bytes"] > 0


def test_a_home_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = Found(tmp_path, "run", "measured")
    assert "measured 3 unlike layers of 8" in found.log
    assert "are not kept for later jobs" in found.log
