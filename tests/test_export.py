"""``pipeworker export``: one plain file with the weights of a run."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from support.jobs import Jobs, Run

# Buffers, an entry that shares memory with another of its module, and entries of no floating type.
SOURCE = """
    import torch
    from torch import nn

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 8)
            self.same = self.one

        def forward(self, x):
            return self.one(x)

    def model():
        return nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), Shared(), nn.ReLU(), nn.Linear(8, 3)
        )

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.Adam(params, lr=0.01)

    def data():
        for _ in range(3):
            x = torch.randn(12, 8)
            yield x, (x[:, 0] > 0).long()
"""


@pytest.fixture
def run(jobs: Jobs) -> Run:
    return jobs.train("--stages", "3", "--microbatches", "4", source=SOURCE)


def model_of(folder: Path) -> nn.Sequential:
    names: dict[str, object] = {}
    exec((folder / "job.py").read_text(), names)
    model = names["model"]()  # type: ignore[operator]
    assert isinstance(model, nn.Sequential)
    return model


def test_weights_load_into_a_sequential(jobs: Jobs, run: Run) -> None:
    for out, load in (
        (jobs.folder / "out.pt", lambda path: torch.load(path, weights_only=True)),
        (jobs.folder / "out.safetensors", load_file),
    ):
        done = jobs.pipeworker("export", str(run.path), str(out))
        assert (done.returncode, done.stderr) == (0, "")
        net = model_of(jobs.folder)
        before = {key: value.clone() for key, value in net.state_dict().items()}
        loaded = load(out)
        assert done.stdout == f"{out}: {len(before)} tensors\n"
        assert net.load_state_dict(loaded, strict=True)
        assert loaded.keys() == run.weights.keys() == before.keys()
        for key, value in net.state_dict().items():
            assert torch.equal(value, run.weights[key]), key
        assert not torch.equal(net.state_dict()["4.weight"], before["4.weight"])  # it trained
        assert net.state_dict()["1.num_batches_tracked"] == 3 * 4
        assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~umask()
    assert not list(jobs.folder.glob(".*"))


def umask() -> int:
    os.umask(found := os.umask(0))
    return found


@pytest.mark.parametrize("stages", ["1", "3"])
def test_names_are_those_of_the_users_own_module(jobs: Jobs, stages: str) -> None:
    named = SOURCE.replace("nn.Sequential(", "nn.Sequential(OrderedDict(zip(NAMES, [").replace(
        "nn.Linear(8, 3)\n        )", "nn.Linear(8, 3)\n        ])))"
    )
    names = ("embed", "norm", "both", "act", "head")
    named = f"    from collections import OrderedDict\n    NAMES = {names}\n" + named
    run = jobs.train("--stages", stages, "--microbatches", "4", source=named)
    out = jobs.folder / "out.safetensors"
    assert jobs.pipeworker("export", str(run.path), str(out)).returncode == 0
    net = model_of(jobs.folder)
    assert "embed.weight" in net.state_dict()
    assert net.load_state_dict(load_file(out), strict=True)
    assert {name.partition(".")[0] for name in run.optimizer_state} == {*names} - {"act"}


def test_the_weights_open_in_other_tools(run: Run) -> None:
    """By the index, as Hugging Face's tools read it."""
    folder = run.checkpoint.path
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            found[name] = opened.get_tensor(name)
    assert found.keys() == run.weights.keys()
    assert all(torch.equal(found[name], value) for name, value in run.weights.items())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())


def test_mistakes(jobs: Jobs, run: Run) -> None:
    import cli

    (checkpoint,) = (run.path / "checkpoints").iterdir()
    out = jobs.folder / "out.pt"
    assert (
        jobs.pipeworker("export", str(checkpoint), str(out)).returncode == 0
    )  # a checkpoint will do as well as a run
    out.unlink()
    moved = jobs.folder / "moved"
    shutil.copytree(checkpoint, moved)
    (moved / "model-00002-of-00003.safetensors").unlink()
    (jobs.folder / "empty").mkdir()
    for source, to, expected in (
        (jobs.folder / "nothing", out, "nothing has no complete checkpoint: give the directory"),
        (jobs.folder / "empty", out, "empty has no complete checkpoint: give the directory of"),
        (run.path, jobs.folder / "out.bin", "its name must end in .safetensors or .pt"),
        (run.path, jobs.folder / "no" / "out.pt", "cannot write"),
        (run.path, jobs.folder / "no" / "out.safetensors", "cannot write"),
        (moved, out, "safetensors is missing: the stage wrote it on another host; copy it here"),
    ):
        result = CliRunner().invoke(cli.main, ["export", str(source), str(to)])
        assert result.exit_code == 2
        assert result.output.startswith("error: ")
        assert expected in result.output
        assert len(result.output.splitlines()) == 1
        assert not to.exists()
    done = jobs.pipeworker("export", str(jobs.folder / "nothing"), str(out))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
