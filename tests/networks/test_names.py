"""``names`` in a job file: a list of layers reads and writes the names of a network's own files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Record

LAYERS = """
    import torch
    from torch import nn

    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(7, 8)
            self.places = nn.Parameter(torch.zeros(5, 8))

        def forward(self, ids):
            return self.words(ids) + self.places

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x):
            return x + torch.tanh(self.mix(self.norm(x)))

    def model():
        return [Embed(), *(Block() for _ in range(3)), lambda: nn.Linear(8, 7, bias=False)]

    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(named_parameters):
        named = list(named_parameters)
        return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)

    def data():
        for step in range(6):
            ids = torch.arange(40).view(8, 5) * (step + 1) % 7
            yield ids, ids
"""
NAMES = """
    names = {
        "0.words": "model.embed", "0.places": "model.places",
        **{f"{i + 1}": f"model.blocks.{i}" for i in range(3)},
        **{f"{i + 1}.norm": f"model.blocks.{i}.ln_1" for i in range(3)},
        "4": "head",
    }
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.ln_1 = nn.Linear(8, 8), nn.LayerNorm(8)


class Net(nn.Module):
    """The network whose files they are."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Embedding(7, 8)
        self.model.places = nn.Parameter(torch.zeros(5, 8))
        self.model.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 7, bias=False)


def test_files_have_the_networks_own_names(jobs: Jobs, tmp_path: Path) -> None:
    torch.manual_seed(5)
    net = Net()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    options = ("--init-from", str(tmp_path / "net.pt"), "--microbatches", "2", "--balance", "even")
    whole = jobs.train("--stages", "1", *options, source=LAYERS + NAMES)
    assert whole.weights.keys() == net.state_dict().keys()
    assert not torch.equal(whole.weights["model.places"], net.state_dict()["model.places"])
    net.load_state_dict(whole.weights)
    again = jobs.train("--stages", "2", *options, "--steps", "3", source=LAYERS + NAMES)
    done = jobs.pipeworker("launch", "--resume", str(again.path), "--stages", "1", "--steps", "6")
    assert done.returncode == 0, done.stderr
    assert_same(Record(again.path), whole)
    jobs.pipeworker("export", str(again.path), str(tmp_path / "resumed.pt"))
    resumed = torch.load(tmp_path / "resumed.pt")
    assert all(torch.equal(resumed[name], value) for name, value in whole.weights.items())


def test_a_run_is_resumed_with_its_names(jobs: Jobs) -> None:
    run = jobs.train("--stages", "1", "--steps", "1", source=LAYERS + NAMES)
    job = jobs.write(LAYERS + NAMES.replace("model.places", "places"))
    done = jobs.pipeworker(
        "launch", "--resume", "--run-dir", str(run.path), "--steps", "2", str(job)
    )
    assert done.returncode == 2
    assert "model() has other names of weights in the layer '0' than the checkpoint" in done.stderr


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("{'5': 'head'}", "names: '5' is in no layer of model(); begin it with the name of a l"),
        ("{'0': 'a', '1': 'a'}", "names: several layers with one name; give each layer"),
    ],
)
def test_wrong_names_are_refused(names: str, message: str, jobs: Jobs) -> None:
    run = jobs.run("--stages", "1", source=f"{LAYERS}\n    names = {names}\n")
    assert run.status == 2
    assert message in run.stderr


def test_a_module_has_names_of_its_own(jobs: Jobs) -> None:
    source = (
        LAYERS.replace("def model():", "def layers():")
        + """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Embed(), Block(), nn.Linear(8, 7)])

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    model = Net
    names = {"0": "embed"}
"""
    )
    run = jobs.run("--stages", "1", source=source)
    assert run.status == 2
    assert "names: are of a list of layers; model() returned a module" in run.stderr
