"""Any module as the model of a job: its own forward, cut into layers on real processes."""

from __future__ import annotations

import os
import signal
import textwrap
from statistics import median

import pytest
import torch

from support.real_jobs.compare import assert_same, plain_loop
from support.real_jobs.jobs import Jobs, Record, Reference, ended, steps_of, until
from support.real_jobs.ranks import LOOP, Scripts, script
from support.slow import slow

MODULE = """
    import math
    import sys
    import time

    import torch
    from torch import nn

    WIDTH = 16

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.mix = nn.Linear(WIDTH, WIDTH)
            self.drop = nn.Dropout(0.1)

        def forward(self, x, mask=None):
            return x + self.drop(torch.tanh(self.mix(mask @ self.norm(x))))

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(23, WIDTH)
            self.places = nn.Parameter(torch.randn(12, WIDTH))
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.norm = nn.BatchNorm1d(WIDTH)
            self.head = nn.Linear(WIDTH, 23, bias=False)
            self.head.weight = self.words.weight
            self.drop = nn.Dropout(0.1)

        def forward(self, ids, keep=None):
            length = ids.shape[1]
            mask = torch.ones(length, length, device=ids.device).tril()
            if keep is not None and not bool(keep.all()):
                mask = mask * keep[:, None]
            x = self.drop(self.words(ids) * math.sqrt(WIDTH) + self.places[:length])
            first = x
            for block in self.blocks:
                x = block(x, mask=mask)
            x = self.norm((x + first).flatten(0, 1)).view_as(x)
            return {"logits": self.head(x)}

    def model():
        return Language()

    def loss(output, target):
        return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())

    def optimizer(named_parameters):
        pairs = list(named_parameters)
        assert all(name in NAMES for name, _ in pairs), pairs
        return torch.optim.AdamW([parameter for _, parameter in pairs], lr=0.01)

    NAMES = dict(Language().named_parameters())

    def data():
        generator = torch.Generator().manual_seed(7)
        for step in range(6):
            ids = torch.randint(23, (8, 6 + step % 3), generator=generator)
            keep = torch.ones(ids.shape)
            keep[0, 4:] = step % 2
            if sys.argv[1:]:
                time.sleep(0.2)
            yield {"ids": ids, "keep": keep}, ids

    def evaluation():
        return list(data())[:3]
"""
"""A language model with a mask, positions, a tied head, and a batch norm behind a long skip."""
WORDS = ("--microbatches", "4", "--evaluate-every", "3")


FOUR = ("--steps", "4", *WORDS)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("--stages", "3", "--recompute", "always", "--backend", "gloo"), marks=slow, id="gpipe"
        ),
        pytest.param(
            ("--stages", "2", "--schedule", "zbv", "--recompute", "never", "--balance", "2,1,3,1"),
            id="zbv",
        ),
    ],
)
def test_the_bits_are_the_same_for_any_number_of_stages(
    jobs: Jobs, reference: Reference, words: tuple[str, ...]
) -> None:
    """Another test has the default schedule on the ranks of a script."""
    one = reference("--stages", "1", *FOUR, source=MODULE)
    run = jobs.train(*words, *FOUR, source=MODULE)
    assert_same(one, run)
    assert (
        run.path.joinpath("evaluation.jsonl").read_text()
        == one.path.joinpath("evaluation.jsonl").read_text()
    )
    assert one.weights.keys() >= {
        "places",
        "words.weight",
        "blocks.3.mix.bias",
        "norm.num_batches_tracked",
    }
    assert not any("^" in name for name in one.weights)


SHARING = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.first, self.cell = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("middle", torch.full((), 0.5))
            self.factor, self.begin, self.body = self.scale, self.first, nn.ModuleList([self.cell])
            self.register_buffer("center", self.middle)

        def forward(self, x):
            x = self.first(x * self.scale)
            for _ in range(3):
                x = torch.tanh(self.cell(x) * self.scale)
            return x * self.middle

    def model():
        return Net()

    loss = nn.functional.mse_loss

    def optimizer(params):
        return torch.optim.Adam(params, lr=0.01)

    def data():
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            x = torch.randn(8, 4, generator=generator)
            yield x, x
"""


TWO = ("--microbatches", "2")


@pytest.mark.parametrize(
    ("stages", "schedule", "others"),
    [("2", "zbv", "1"), pytest.param("1", "gpipe", "3", marks=slow)],
)
def test_what_several_layers_share_has_the_modules_own_name_in_files(
    jobs: Jobs, reference: Reference, stages: str, schedule: str, others: str
) -> None:
    """Layers share a parameter of the root, and the weights of a unit that is called again.

    Some have two names.
    """
    one = reference("--stages", "1", *TWO, source=SHARING)
    several = ("--stages", stages, "--schedule", schedule, "--steps", "2", *TWO)
    path = jobs.train(*several, source=SHARING).path
    more = ("--resume", str(path), "--stages", others, "--schedule", "gpipe", "--steps", "4")
    resumed = jobs.pipeworker("launch", *more)
    assert resumed.returncode == 0, resumed.stderr
    assert_same(one, Record(path))
    scope: dict[str, object] = {}
    exec(textwrap.dedent(SHARING), scope)
    made = scope["Net"]()  # type: ignore[operator]
    made.load_state_dict(one.weights)
    torch.save(made.state_dict(), file := jobs.folder / "own.pt")
    begin = ("--steps", "1", "--init-from", str(file))
    jobs.train("--stages", "2", *begin, *TWO, source=SHARING)


def test_a_module_itself_is_a_model(jobs: Jobs, reference: Reference) -> None:
    given = SHARING.replace(
        "def model():\n        return Net()", "torch.manual_seed(0)\n    model = Net()"
    )
    assert "model = Net()" in given
    one = reference("--stages", "1", *TWO, source=SHARING)
    assert_same(one, jobs.train("--stages", "2", *TWO, source=given))


HOOKED = """
    import torch
    from torch import nn

    def model():
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        net.register_buffer("k", torch.ones(1))
        net.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        net.register_forward_hook(lambda module, args, out: out + 1)
        return net

    loss = nn.functional.mse_loss

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    def data():
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            yield torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)
"""


def test_a_sequential_keeps_its_own_hooks_and_buffers(jobs: Jobs) -> None:
    run = jobs.train("--stages", "2", "--microbatches", "2", source=HOOKED)
    losses, weights, _ = plain_loop(jobs.write(HOOKED), microbatches=2, steps=3)
    assert [row["loss"] for row in run.metrics] == losses
    assert run.weights.keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in run.weights.items())


@slow
def test_a_run_is_resumed_after_a_lost_worker_and_exported(jobs: Jobs) -> None:
    one = jobs.train("--stages", "1", *WORDS, source=MODULE)
    process, path = jobs.start("--stages", "3", *WORDS, "--steps", "4", "--", "slow", source=MODULE)
    until(lambda: steps_of(path) >= 2)
    os.kill(Record(path).plan["stages"][1]["pid"], signal.SIGKILL)
    ended(process, path)
    more = jobs.pipeworker("launch", "--resume", str(path), "--stages", "2", "--steps", "6")
    assert more.returncode == 0, more.stderr
    run = Record(path)
    assert_same(one, run)
    exported = jobs.pipeworker("export", str(path), str(jobs.folder / "weights.pt"))
    assert exported.returncode == 0, exported.stderr
    weights = torch.load(jobs.folder / "weights.pt")
    scope: dict[str, object] = {}
    exec(textwrap.dedent(MODULE), scope)
    made = scope["Language"]()  # type: ignore[operator]
    made.load_state_dict(weights)
    tuned = jobs.train(
        *("--stages", "2", "--steps", "1", "--init-from", str(jobs.folder / "weights.pt")),
        *WORDS[:2],
        source=MODULE,
    )
    assert tuned.status == 0


def test_a_script_passes_a_module_and_a_sample(reference: Reference, scripts: Scripts) -> None:
    one = reference("--stages", "1", *FOUR, source=MODULE)
    loop = LOOP.replace("model, loss=loss", "model, sample=next(data())[0], loss=loss")
    loop = loop.replace("in data()", "in list(data())[:4]")
    assert_same(scripts.start(script(MODULE, loop), 2).succeed()[0], one)


MIXED = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            half = self.layers[0](x)
            whole = half.float()  # which is `half` itself in fp32
            out = self.layers[1](whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True)))
            return self.layers[2](out + half * half) + whole

    def model():
        return Net()

    def loss(output, target):
        return ((output - target) ** 2).mean()

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    def data():
        for _ in range(3):
            yield torch.randn(8, 4), torch.randn(8, 4)
"""


def test_a_cast_of_an_activation_is_a_value_of_its_own_under_autocast(jobs: Jobs) -> None:
    words = ("--microbatches", "2", "--precision", "bf16")
    one, two = (jobs.train("--stages", stages, *words, source=MIXED) for stages in "12")
    assert_same(one, two)


LARGE = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(16))
            nn.init.normal_(self.layers[3].bias)

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    def model():
        return Net()

    def loss(output, target):
        return ((output - target) ** 2).mean()

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    def data():
        yield torch.ones(4, 2048), torch.ones(4, 2048)
"""
"""A network of 256 MiB."""


@slow
def test_no_process_holds_more_than_its_part_of_a_large_module(jobs: Jobs) -> None:
    """Its initial weights are those of the whole module, built under the job's seed."""
    words = ("--steps", "1", "--microbatches", "2", "--balance", "even")
    run = jobs.train("--stages", "8", *words, source=LARGE)
    listed = LARGE.replace("return Net()", "return [*Net().layers]")
    whole = jobs.train("--stages", "8", *words, source=listed)
    peaks = (median(one.summary["peak_memory_bytes"]) for one in (run, whole))
    assert next(peaks) + (64 << 20) < next(peaks)
    losses, weights, _ = plain_loop(jobs.write(LARGE), microbatches=2, steps=1)
    assert [row["loss"] for row in run.metrics] == losses
    assert all(torch.equal(value, weights[key]) for key, value in run.weights.items())


def test_a_forward_that_takes_another_way_is_an_error_with_its_line(jobs: Jobs) -> None:
    source = MODULE.replace(
        "            first = x\n",
        "            first = x\n            if self.training and x.sum() > 1e9 or length > 6:\n"
        "                x = x + 1\n",
    ).replace("self.training and x.sum() > 1e9 or ", "")
    run = jobs.run("--stages", "2", *WORDS[:2], source=source)
    assert run.status == 1
    assert "the model's forward takes another way than when it was cut" in run.stderr


def test_another_way_in_eval_mode_is_an_error_before_the_first_step_of_a_job_that_evaluates(
    jobs: Jobs,
) -> None:
    source = MODULE.replace(
        "            first = x\n",
        "            first = x\n            if self.training:\n                x = x + 1\n",
    )
    run = jobs.run("--stages", "2", *WORDS, source=source)
    assert run.status == 2
    assert "takes another way than when it was cut, in eval mode, at job.py" in run.stderr
    assert not list(jobs.folder.glob("runs/*"))


PACKED = """
    import torch
    from torch import nn
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    class Pack(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(20, 8)

        def forward(self, x):
            lengths = x["lengths"]
            return pack_padded_sequence(self.words(x["ids"]), lengths, True, enforce_sorted=False)

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.LSTM(8, 8, batch_first=True)

        def forward(self, packed):
            return self.cells(packed)[0]

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, packed):
            return {("of", "all"): self.linear(pad_packed_sequence(packed, True)[0].mean(1))}

    def model():
        return [Pack(), Recurrent(), Recurrent(), Head(), lambda x: x["of", "all"], torch.tanh]

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    def data():
        for _ in range(4):
            lengths = torch.randint(1, 7, (8,))
            yield {"ids": torch.randint(20, (8, 6)), "lengths": lengths}, lengths % 3
"""
"""A packed sequence between layers, a dict whose key is a tuple, and functions as layers."""

NORMED = """
    import pipeworker
    import torch
    from torch import nn
    from torch.nn.utils import spectral_norm, weight_norm

    def model():
        first, second = weight_norm(nn.Linear(4, 8)), spectral_norm(nn.Linear(8, 8))
        return nn.Sequential(first, nn.ReLU(), second, nn.Linear(8, 2))

    def loss(output, target):
        return ((output - target) ** 2).mean()

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    def data():
        for _ in range(4):
            yield torch.randn(8, 4), torch.randn(8, 2)
"""
"""Layers that torch cannot copy, in a job that is surveyed for skip connections."""


@slow
@pytest.mark.parametrize("source", [PACKED, NORMED], ids=["packed", "normed"])
def test_values_and_layers_of_other_kinds(jobs: Jobs, source: str) -> None:
    one, two = (jobs.train("--stages", k, "--microbatches", "2", source=source) for k in "13")
    assert_same(one, two)


MEASURED = """
    import os
    from pathlib import Path

    import torch
    from torch import nn

    def resident(name):
        status = Path("/proc/self/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0]) * 1024

    BEFORE = resident("VmRSS")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(32))

        def forward(self, x):
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    def model():
        return Net()

    def loss(output, target):
        return ((output - target) ** 2).mean()

    class Measured(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            added = resident("VmHWM") - BEFORE
            Path(__file__).with_name(f"added-{os.getpid()}").write_text(str(added))

    def optimizer(params):
        return Measured(params, lr=0.1)

    def data():
        for _ in range(2):
            yield torch.randn(8, 2048), torch.randn(8, 2048)
"""
"""512 MiB of weights and as much of gradients; each worker writes what its peak has added."""


@slow
def test_a_model_larger_than_the_memory_of_any_process_trains(jobs: Jobs) -> None:
    options = ("--microbatches", "2", "--balance", "even", "--keep", "1")
    for stages, least, most in ((1, 1024 << 20, 2048 << 20), (8, 128 << 20, 448 << 20)):
        jobs.train("--stages", str(stages), *options, source=MEASURED)
        written = [*jobs.folder.glob("**/added-*")]
        added = [int(path.read_text()) for path in written]
        assert len(added) == stages, added
        assert least <= min(added)
        assert max(added) < most
        for path in written:
            path.unlink()
