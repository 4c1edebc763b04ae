"""``pipeworker export``: one plain file with the weights of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
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
    assert not list(jobs.folder.glob(".*"))


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
    (moved / "stage-1.pt").unlink()
    (jobs.folder / "empty").mkdir()
    for source, to, expected in (
        (jobs.folder / "nothing", out, "nothing has no complete checkpoint: give the directory"),
        (jobs.folder / "empty", out, "empty has no complete checkpoint: give the directory of"),
        (run.path, jobs.folder / "out.bin", "its name must end in .safetensors or .pt"),
        (run.path, jobs.folder / "no" / "out.pt", "cannot write"),
        (run.path, jobs.folder / "no" / "out.safetensors", "cannot write"),
        (moved, out, "stage-1.pt is missing: the stage wrote it on another host; copy it here"),
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
