"""``pipeworker export`` over real jobs: the weights of a run as plain files."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import cli
from support.real_jobs.jobs import Jobs, Record, Reference
from support.slow import slow

# Buffers, two entries of a module that share memory, and entries of other types than floating.
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


@pytest.fixture(scope="module")
def run(reference: Reference) -> Record:
    return reference("--stages", "3", "--microbatches", "4", source=SOURCE)


def model_of(folder: Path) -> nn.Sequential:
    names: dict[str, Any] = {}
    exec((folder / "job.py").read_text(), names)
    model = names["model"]()
    return model if isinstance(model, nn.Sequential) else nn.Sequential(*model)


def test_weights_load_into_a_sequential(jobs: Jobs, run: Record) -> None:
    jobs.write(SOURCE)
    for out, load in (
        (jobs.folder / "out.pt", lambda path: torch.load(path, weights_only=True)),
        (jobs.folder / "out.safetensors", load_file),
    ):
        done = jobs.pipeworker("export", str(run.path), str(out))
        assert (done.returncode, done.stderr) == (0, "")
        net = model_of(jobs.folder)
        before = {key: value.clone() for key, value in net.state_dict().items()}
        loaded = load(out)
        assert done.stdout == f"{out}: {len(before)} tensors, after step 3\n"
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


NAMED = """
    from collections import OrderedDict

    import torch
    from torch import nn

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Sequential(OrderedDict(up=nn.Linear(8, 8), act=nn.ReLU()))

        def forward(self, x):
            return self.proj(x)

    def model():
        net = nn.Sequential(
            OrderedDict(
                embed=nn.Linear(8, 8),
                body=nn.Sequential(OrderedDict(one=nn.Linear(8, 8), two=Head())),
                out=nn.Linear(8, 8),
            )
        )
        net.out.weight = net.embed.weight
        return net

    def loss(output, target):
        return nn.functional.mse_loss(output, target)

    def optimizer(params):
        return torch.optim.Adam(params, lr=0.01)

    def data():
        for _ in range(2):
            x = torch.randn(4, 8)
            yield x, x
"""
LISTED = NAMED.replace("        return net\n", "        return list(net)\n")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(
            NAMED, ["embed", "body.one", "body.two.proj.up", "out"], id="a named Sequential"
        ),
        pytest.param(LISTED, ["0", "1.one", "1.two.proj.up", "2"], id="a list", marks=slow),
    ],
)
def test_exported_names_are_those_of_the_users_module(
    jobs: Jobs, source: str, expected: list[str]
) -> None:
    """Layers are named, nested or in a list, and weights are tied across stages."""
    run = jobs.train("--stages", "3", "--microbatches", "2", source=source)
    net = model_of(jobs.folder)
    for out in ("w.pt", "w.safetensors", "folder"):
        done = CliRunner().invoke(cli.main, ["export", str(run.path), str(jobs.folder / out)])
        assert done.output.startswith(str(jobs.folder / out))
        assert done.output.endswith(" 8 tensors, after step 2\n") is (out != "folder")
    loaded = torch.load(jobs.folder / "w.pt")
    assert list(loaded) == [f"{name}.{what}" for name in expected for what in ("weight", "bias")]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for weights in (
        *(loaded, load_file(jobs.folder / "w.safetensors")),
        load_file(jobs.folder / "folder" / "model.safetensors"),
    ):
        assert net.load_state_dict(weights)
        assert all(torch.equal(value, loaded[name]) for name, value in net.state_dict().items())
    first, last = f"{expected[0]}.weight", f"{expected[-1]}.weight"
    assert loaded[first].data_ptr() == loaded[last].data_ptr()
    assert not torch.equal(loaded[first], before[first])  # it trained
    assert {name.rpartition(".")[0] for name in run.optimizer_state} == {*expected}


def test_the_options_of_export(jobs: Jobs) -> None:
    run = jobs.train("--stages", "2", "--microbatches", "4")
    out = f"{jobs.folder}/out/"
    line = ["export", str(run.path), out, "--dtype", "bf16", "--shard-size", "600B"]
    done = CliRunner().invoke(cli.main, line)
    text = "a folder of 6 tensors in 3 files, Hugging Face's layout, after step 6\n"
    assert done.output == f"{out}: {text}"
    named = CliRunner().invoke(cli.main, ["export", str(run.path), f"{jobs.folder}/named"])
    assert named.output.endswith(
        "/named/: a folder of 6 tensors in 1 file, Hugging Face's layout, after step 6\n"
    )
    index = json.loads((jobs.folder / "out" / "model.safetensors.index.json").read_text())
    found: dict[str, Any] = {}
    for file in sorted({*index["weight_map"].values()}):
        found |= load_file(jobs.folder / "out" / file)
    assert {str(value.dtype) for value in found.values()} == {"torch.bfloat16"}
    assert found.keys() == run.weights.keys()
    again = jobs.run("--stages", "1", "--microbatches", "4", "--init-from", out)
    assert again.status == 0, again.stderr  # the written weights can be loaded


def test_other_tools_open_the_weights_by_the_index(run: Record) -> None:
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


def test_mistakes_are_refused(jobs: Jobs, run: Record) -> None:
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
        (jobs.folder / "nothing", out, "nothing: no complete checkpoint is there; give"),
        (jobs.folder / "empty", out, "empty: no complete checkpoint is there; give the"),
        (run.path, jobs.folder / "out.bin", "its name must end in .safetensors, .pt or .pth"),
        (run.path, jobs.folder / "no" / "out.pt", "cannot be written"),
        (run.path, jobs.folder / "no" / "out.safetensors", "cannot be written"),
        (moved, out, "safetensors: is missing; if a worker on another host wrote it, copy it here"),
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
