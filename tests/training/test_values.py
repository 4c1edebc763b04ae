"""All kinds of values between layers, in real processes."""

from __future__ import annotations

import torch

from support.real_jobs.compare import assert_same, plain_loop
from support.real_jobs.jobs import Jobs
from support.real_jobs.sources import JOB
from support.slow import slow

SOURCE = """
    from dataclasses import dataclass
    from enum import Enum
    from typing import Any, NamedTuple
    import torch
    from torch import nn
    import pipeworker

    class Pair(NamedTuple):
        x: torch.Tensor
        more: Any

    class Mode(str, Enum):
        KEPT = "kept"

    @dataclass
    class State:
        x: torch.Tensor
        mask: torch.Tensor
        note: dict

    class Start(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_forward_hook(lambda module, args, output: output * 1.5)
            self.linear.weight.register_hook(lambda gradient: gradient * 0.5)

        def forward(self, x):
            return self.linear(x)

    class Spread(nn.Module):
        def forward(self, x):
            wave = torch.complex(x, x.flip(1))
            return Pair(x, {
                "twice": [x, x], "view": x[:, ::2], "t": x.t().contiguous().t(), "wave": wave,
                "none": None, "plain": (3, 2.5, True, "word", 2**100), "empty": x[:, :0],
                "many": [x[index % len(x), index % 8] for index in range(300)],
                "bool": x > 0, "int": torch.arange(len(x)), "half": x.half(),
            })

    class Gather(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, pair):
            more = pair.more
            assert more["twice"][0] is more["twice"][1] is pair.x
            assert more["empty"].shape == (len(pair.x), 0)
            assert more["plain"] == (3, 2.5, True, "word", 2**100)
            assert len(pair.x) == 1 or more["t"].stride() == (1, len(pair.x))
            x = pair.x + more["twice"][1] + more["t"] + more["half"].float()
            x = x + more["wave"].abs() + more["view"].repeat_interleave(2, 1)
            x = x * more["bool"] + more["int"].unsqueeze(1)
            if len(x) % 2:  # a gradient in some micro-batches only
                x = x.detach()
            return State(self.linear(x), more["bool"], {Mode.KEPT: x.shape})

    class Shrink(nn.Module):
        calls = []

        def forward(self, state):
            assert type(*state.note) is Mode
            Shrink.calls.append(pipeworker.is_recomputing())
            return State(state.x[:, : 4 + len(state.x) % 3], state.mask, state.note)

    class End(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, state):
            x = torch.zeros(len(state.x), 8)
            x[:, : state.x.shape[1]] = state.x
            print("recomputing", *Shrink.calls)
            return self.linear(x * state.mask)

    def model():
        return nn.Sequential(Start(), Spread(), Gather(), Shrink(), End())

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def data():
        generator = torch.Generator().manual_seed(7)
        for size in (10, 1, 3, 10, 7, 10):
            x = torch.randn(size, 8, generator=generator)
            yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
"""


@slow
def test_any_value_is_sent_and_the_bits_are_the_same(jobs: Jobs) -> None:
    runs = [
        jobs.train(
            *("--stages", str(k), "--microbatches", "4", "--recompute", mode, *more), source=SOURCE
        )
        for k, mode, *more in (
            (1, "never"),
            (2, "always"),
            (5, "except_first", "--backend", "gloo"),
        )
    ]
    for run in runs[1:]:
        assert_same(run, runs[0])
    assert [row["samples"] for row in runs[0].metrics] == [10, 1, 3, 10, 7, 10]
    log = runs[1].log("worker-1")
    assert "True" in log.splitlines()[-1]  # is_recomputing, on the second stage
    assert "True" not in runs[0].log("worker-0")


IN_PLACE = """
    import torch
    from torch import nn

    class Halve(nn.Module):
        def forward(self, x):
            return x.mul_(0.5)

    def model():
        return nn.Sequential(Halve(), nn.Linear(8, 8))

    def loss(output, target):
        return nn.functional.mse_loss(output, target)

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    STORED = [torch.ones(4, 8), torch.full((4, 8), 2.0)]

    def data():
        for x in STORED:
            yield x, x
"""
"""Its first layer changes the input, which is the target and stays in memory."""


def test_a_change_of_the_input_in_place_reaches_no_target_and_no_data_set(jobs: Jobs) -> None:
    copied = IN_PLACE.replace("yield x, x", "yield x.clone(), x").replace("STORED:", "STORED * 2:")
    losses, weights, _ = plain_loop(jobs.write(copied), microbatches=2, steps=4)
    assert len(losses) == 4
    for stages in "12":
        words = ("--stages", stages, "--microbatches", "2", "--epochs", "2")
        run = jobs.train(*words, source=IN_PLACE)
        assert [row["loss"] for row in run.metrics] == losses
        assert all(torch.equal(value, weights[key]) for key, value in run.weights.items())


LATE = JOB.replace(
    "def model",
    """
    from dataclasses import dataclass

    class Wrap(nn.Module):
        def forward(self, x):
            @dataclass
            class Late:
                x: torch.Tensor
            torch.export.register_dataclass(Late)
            return Late(x)

    class Unwrap(nn.Module):
        def forward(self, late):
            return late.x

    def model""",
).replace("nn.ReLU()", "Wrap(), Unwrap()")


def test_a_class_that_is_registered_too_late_is_named(jobs: Jobs) -> None:
    run = jobs.run("--stages", "2", "--balance", "2,4", source=LATE)
    assert run.status == 1
    assert "Wrap.forward.<locals>.Late cannot pass from one stage to the next" in run.stderr
    assert "Define it at the top of the job file" in run.stderr


META = """
    import torch
    from torch import nn

    def model():
        with torch.device("cpu"):
            return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def loss(output, target):
        return nn.functional.cross_entropy(output, target, reduction="sum"), len(target)

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    BATCHES = [(torch.ones(8, 8), torch.arange(8) % 3)] * 2

    def data():
        yield from BATCHES
"""


def test_a_default_device_is_for_the_jobs_own_tensors(jobs: Jobs) -> None:
    words = ("--stages", "1", "--replicas", "2", "--microbatches", "4")
    reference = jobs.train(*words, source=META)
    chosen = META.replace("def data", 'torch.set_default_device("meta")\n\n    def data')
    assert_same(jobs.train(*words, source=chosen), reference)
