"""Features of a training loop besides forward and backward, for any number of stages."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import asdict
from typing import Any

import pytest
import torch

from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.record.checkpoint.checkpoint import Checkpoint
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Reference
from support.real_jobs.sources import JOB
from support.slow import slow

RICH = """
    import math
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.drop = nn.Dropout(0.2)

        def forward(self, x):
            assert torch.is_grad_enabled() is self.training
            return self.drop(self.norm(torch.tanh(self.linear(x))))

    def model():
        return [Block] * 5 + [lambda: nn.Linear(8, 3)]

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(named_parameters):
        kinds = {True: [], False: []}
        for name, parameter in named_parameters:
            kinds[name.endswith("weight")].append(parameter)
        print("names", *(name for name, _ in named_parameters))
        return torch.optim.AdamW(
            [{"params": kinds[True]}, {"params": kinds[False], "weight_decay": 0.0}], lr=0.05
        )

    def batches(seed, count, size):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            x = torch.randn(size, 8, generator=generator)
            yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()

    def data():
        yield from batches(7, 4, 12)

    def evaluation():
        yield from batches(8, 3, 7)
        yield from batches(9, 1, 2)

    def metrics(output, target):
        return {"accuracy": (output.argmax(1) == target).float().mean(), "one": 1}
"""

SCHEDULES = {
    "plateau": """
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0,
                                                          threshold=10.0, threshold_mode="abs")
    """,
    "epoch": """
    scheduler_interval = "epoch"

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    """,
}


@slow
def test_evaluation_changes_no_number_and_is_the_same_at_any_number_of_stages(jobs: Jobs) -> None:
    words = ("--microbatches", "4", "--steps", "6")
    plain = jobs.train("--stages", "2", *words, source=RICH)
    runs = [
        jobs.train("--stages", str(k), *words, "--evaluate-every", "2", source=RICH) for k in (1, 4)
    ]
    for run in runs:
        assert_same(run, plain)
        assert run.evaluations == runs[0].evaluations
    rows = runs[0].evaluations
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert all(row["one"] == 1 and 0 <= row["accuracy"] <= 1 for row in rows)
    # The last pass again, in one process, with the weights of the end.
    namespace: dict[str, Any] = {}
    exec("import torch\n" + textwrap.dedent(RICH), namespace)
    net = torch.nn.Sequential(*(entry() for entry in namespace["model"]()))
    net.load_state_dict(runs[1].weights)
    net.eval()
    losses, right, samples = [], 0, 0
    with torch.no_grad():
        for x, y in namespace["evaluation"]():
            output = net(x)
            losses.append(namespace["loss"](output, y).item() * len(x))
            right += int((output.argmax(1) == y).sum())
            samples += len(x)
    assert rows[-1]["loss"] == pytest.approx(math.fsum(losses) / samples)
    assert rows[-1]["accuracy"] == pytest.approx(right / samples)
    assert "names 0.linear.weight" in runs[1].log("worker-0")
    assert "5.bias" in runs[1].log("worker-3")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=slow) for kind in sorted(SCHEDULES)],
)
def test_schedulers_by_epoch_and_by_metric(jobs: Jobs, kind: str) -> None:
    words = ("--microbatches", "2", "--steps", "9", "--evaluate-every", "3")
    one, three = (
        jobs.train("--stages", str(k), *words, source=RICH + SCHEDULES[kind]) for k in (1, 3)
    )
    assert_same(one, three)
    rates = [row["lr"] for row in one.metrics]
    expected = {
        "plateau": [0.05] * 6 + [0.025] * 3,  # the second evaluation does not improve by 10
        "epoch": [0.05] * 4 + [0.025] * 4 + [0.0125],
    }
    assert rates == expected[kind]


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=slow)])
def test_mixed_precision(jobs: Jobs, reference: Reference, precision: str) -> None:
    words = ("--microbatches", "4", "--precision", precision, "--clip-grad-norm", "0.5")
    mode = "always" if precision == "bf16" else "offload"
    runs = [
        jobs.train("--stages", stages, *words, "--recompute", how, source=RICH)
        for stages, how in (("1", "never"), ("2", mode))
    ]
    assert_same(*runs)
    full = reference("--stages", "1", "--microbatches", "4", "--steps", "1", source=RICH)
    low, exact = runs[0].metrics[0], full.metrics[0]
    assert low["loss"] != exact["loss"]
    assert low["loss"] == pytest.approx(exact["loss"], rel=0.02)
    if math.isfinite(low["grad_norm"]):
        assert low["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)
    scales = [row.get("loss_scale") for row in runs[0].metrics]
    (manifest,) = (runs[1].path / "checkpoints").glob("step-*/manifest.json")
    saved = json.loads(manifest.read_text())
    if precision == "fp16":
        scaler = LossScaler()
        for row in runs[0].metrics:
            assert row["loss_scale"] == scaler.scale
            scaler = scaler.after(overflow=not math.isfinite(row["grad_norm"]))
        assert saved["scaler"] == asdict(scaler)
    else:
        assert scales == [None] * 4
        assert "scaler" not in saved


OVERFLOW = """
    class Burst(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            Burst.calls += 1
            return gradient * (float("inf") if Burst.calls == 3 else 1.0)

    class Bursting(nn.Module):
        def forward(self, x):
            return Burst.apply(x)

    def model():
        return nn.Sequential(nn.Linear(8, 8), Bursting(), nn.Linear(8, 8), nn.Linear(8, 3))

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 1)
"""


def test_an_overflow_on_one_stage_skips_the_update_on_all(jobs: Jobs) -> None:
    """Only stage 0's gradients overflow in the second step."""
    words = ("--microbatches", "2", "--steps", "4", "--precision", "fp16", "--recompute", "never")
    one, two = (jobs.train("--stages", k, *words, source=JOB + OVERFLOW) for k in "12")
    assert [row["loss_scale"] for row in two.metrics] == [65536.0] * 2 + [32768.0] * 2
    assert [math.isfinite(row["grad_norm"]) for row in two.metrics] == [True, False, True, True]
    for key in ("loss", "loss_scale"):
        assert [r[key] for r in one.metrics] == [r[key] for r in two.metrics]
    assert all(torch.equal(value, two.weights[key]) for key, value in one.weights.items())
    assert all(value.isfinite().all() for value in two.weights.values())


HOOKED = """
    def before_update(params):
        for p in params:
            p.grad += 0.01 * torch.randn_like(p.grad)
        print("largest", max(p.grad.abs().max().item() for p in params))
"""


@slow
def test_gradient_accumulation_clipping_and_noise(jobs: Jobs) -> None:
    """Accumulation, both kinds of clipping, and noise, together."""
    words = (
        "--microbatches",
        "4",
        "--accumulate",
        "3",
        "--steps",
        "4",
        "--clip-grad-value",
        "0.02",
    )
    runs = [
        jobs.train("--stages", k, *words, "--clip-grad-norm", "1", source=RICH + HOOKED)
        for k in ("1", "3")
    ]
    assert_same(*runs)
    assert [row["samples"] for row in runs[0].metrics] == [36] * 4
    assert [row["epoch"] for row in runs[0].metrics] == [0, 1, 2, 2]
    noisy = [
        float(line.split()[1]) for line in runs[0].log("worker-0").splitlines() if line[:3] == "lar"
    ]
    assert len(noisy) == 4 * 6
    assert all(0 < value < 0.02 + 0.01 * 6 for value in noisy)


def test_accumulation_is_one_large_mini_batch(jobs: Jobs) -> None:
    """Two mini-batches of 10 a step, against the plain loop that halves each loss."""
    run = jobs.train("--stages", "2", "--microbatches", "5", "--accumulate", "2", source=JOB)
    namespace: dict[str, Any] = {}
    exec(textwrap.dedent(JOB), namespace)
    torch.manual_seed(0)
    net = namespace["model"]()
    optimizer = namespace["optimizer"](net.parameters())
    losses, data = [], list(namespace["data"]())
    for step in range(3):
        optimizer.zero_grad()
        total = 0.0
        for x, y in data[2 * step : 2 * step + 2]:
            for xm, ym in zip(x.tensor_split(5), y.tensor_split(5), strict=True):
                loss = namespace["loss"](net(xm), ym) * 0.2
                loss.backward()
                total += loss.item()
        for parameter in net.parameters():
            parameter.grad /= 2
        optimizer.step()
        losses.append(total / 2)
    assert [row["loss"] for row in run.metrics] == pytest.approx(losses, rel=1e-12)
    assert all(torch.equal(value, run.weights[key]) for key, value in net.state_dict().items())


FROZEN = """
    def model():
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 3))
        for index in (0, 1, 3):
            net[index].requires_grad_(False)
        return net
"""


@slow
def test_frozen_layers(jobs: Jobs) -> None:
    """A first stage without trainable parameters, and one in the middle."""
    runs = [
        jobs.train("--stages", str(k), "--microbatches", "4", source=JOB + FROZEN) for k in (1, 5)
    ]
    assert_same(*runs)
    assert len({row["loss"] for row in runs[0].metrics}) == 6


@pytest.mark.parametrize(
    ("words", "change", "message"),
    [
        (("--evaluate-every", "0"), "", "--evaluate-every 0: must be 1 or more"),
        (("--clip-grad-value", "-1"), "", "--clip-grad-value -1.0: must be greater than 0"),
        (("--accumulate", "0"), "", "--accumulate 0: must be 1 or more"),
        (("--precision", "fp8"), "", "'fp8' is not one of 'fp32', 'bf16', 'fp16'"),
        (("--evaluate-every", "2"), "", "has no evaluation()"),
        (("--evaluate-every", "2"), "evaluation = []", "evaluation(): is empty"),
        (
            ("--evaluate-every", "2"),
            "evaluation = data\ndef metrics(o, t): return 3",
            "metrics(output, target) returned an int",
        ),
    ],
)
def test_mistakes(jobs: Jobs, words: tuple[str, ...], change: str, message: str) -> None:
    source = textwrap.dedent(JOB) + "\n" + change
    run = jobs.run("--stages", "1", "--microbatches", "2", *words, source=source)
    assert run.status == (1 if "evaluation = [" in change else 2)
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_a_failure_in_evaluation_names_its_position(jobs: Jobs) -> None:
    failing = """
    class Fails(nn.Module):
        def forward(self, x):
            if not self.training and len(x) == 1:
                raise RuntimeError("no evaluation today")
            return x

    def model():
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Fails(), nn.Linear(8, 3))

    def evaluation():
        yield torch.ones(5, 8), torch.zeros(5).long()
    """
    words = ("--stages", "2", "--microbatches", "3", "--evaluate-every", "2")
    run = jobs.run(*words, source=JOB + failing)
    assert run.status == 1
    assert "layer 2 (Fails) raised RuntimeError: no evaluation today" in run.stderr
    assert "in evaluation: stage 1, layer 2 (Fails), micro-batch 2, step 2" in run.stderr


@slow
def test_deferred_batch_norm(jobs: Jobs) -> None:
    """With uneven micro-batches, recompute and evaluation, statistics change once a mini-batch."""
    words = ("--microbatches", "5", "--steps", "3", "--deferred-batch-norm")
    runs = [
        jobs.train(
            *("--stages", stages, *words, "--recompute", mode, "--evaluate-every", "2"),
            source=RICH,
        )
        for stages, mode in (("1", "never"), ("4", "except_first"))
    ]
    assert_same(*runs)
    assert runs[1].evaluations == runs[0].evaluations
    assert runs[0].weights["2.norm.num_batches_tracked"] == 3


COMPILED = JOB.replace(
    "import torch\n",
    """import torch
    compile_layer = torch.compile

    def compile_quickly(layer, **how):
        print("compiled", type(layer).__name__, how)
        return compile_layer(layer, **{**how, "backend": "eager"})

    torch.compile = compile_quickly
""",
    1,
)


@slow
def test_compiled_layers(jobs: Jobs) -> None:
    """Each stage compiles its own layers; another test covers kernels."""
    words = ("--stages", "2", "--steps", "2")
    run = jobs.train(*words, "--compile", source=COMPILED)
    assert_same(run, jobs.train(*words, source=JOB))
    how = {"backend": "inductor", "dynamic": False}
    assert run.log("worker-1").count("compiled") == 2
    assert f"compiled Linear {how}" in run.log("worker-1")


@slow
def test_checkpoints_during_training(jobs: Jobs) -> None:
    """The last checkpoints are kept, each with the weights of its step."""
    words = ("--stages", "2", "--microbatches", "4")
    run = jobs.train(*words, "--steps", "5", "--checkpoint-every", "2", "--checkpoint-busy", "wait")
    folder = run.path / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000004", "step-00000005"]
    there = Checkpoint(folder / "step-00000004").weights()
    four = jobs.train(*words, "--steps", "4").weights
    assert there.keys() == four.keys()
    assert all(torch.equal(there[name], value) for name, value in four.items())
