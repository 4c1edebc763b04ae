"""Optimizers that combine parameters: those of a stage, so that numbers depend on the stages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.worker.update.independence import (
    combines_parameters,
    note_of,
    note_on_draws,
    note_on_implementation,
)
from support.real_jobs.jobs import Jobs
from support.slow import slow

PACKAGE = """
import torch


class Descent(torch.optim.Optimizer):
    # Descends by the gradients, divided by what `norm` makes of all of them.

    def __init__(self, params, lr=0.1, limit=1.0):
        super().__init__(params, {"lr": lr, "limit": limit})

    def norm(self, gradients):
        return 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = max(self.norm([p.grad for p in group["params"]]), group["limit"])
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / norm)


class Bounded(Descent):
    # Bounds the common norm of all gradients, as LAMB does.

    def norm(self, gradients):
        return float(torch.stack([g.norm() for g in gradients]).norm())


class Noisy(Descent):
    # Draws random numbers for each parameter.

    def norm(self, gradients):
        return float(torch.rand(len(gradients))[0])


class Talking(Descent):
    # Takes what is no setting, which is unknown here.

    def __init__(self, params, name):
        print(name)
        super().__init__(params)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("lib") / "site-packages"
    folder.mkdir()
    (folder / "descending.py").write_text(PACKAGE)
    sys.path.insert(0, str(folder))
    yield import_module("descending")
    sys.path.remove(str(folder))
    del sys.modules["descending"]


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("Descent", {}, False),
        ("Bounded", {}, True),
        ("Bounded", {"limit": 1e9}, False),
        ("Noisy", {}, False),
        ("Talking", {"name": "a"}, False),
    ],
)
def test_whether_a_parameter_beside_another_is_updated_otherwise(
    package: Any, name: str, words: dict[str, Any], expected: bool
) -> None:
    layer = nn.Linear(3, 3)
    optimizer = getattr(package, name)(layer.parameters(), **words)
    before = [p.detach().clone() for p in layer.parameters()]
    state = torch.get_rng_state()
    assert combines_parameters(optimizer) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, layer.parameters()))
    assert note_of(optimizer).startswith("Bounded: combines the parameters") == expected


def test_the_users_own_class_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may count its steps in a variable of the job file."""
    (tmp_path / "own_descent.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    own = import_module("own_descent")
    assert not combines_parameters(own.Bounded(nn.Linear(3, 3).parameters()))
    assert not combines_parameters(torch.optim.AdamW(nn.Linear(3, 3).parameters()))


@pytest.mark.parametrize("eps", [(None, 1e-3), (1e-30, 1e-3)])
def test_adafactor_combines_types_unless_it_has_an_eps(eps: tuple[float | None, float]) -> None:
    """It takes that of the first parameter for all."""

    def updated(*others: torch.Tensor) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(2, 2))
        weights = [*map(nn.Parameter, others), weight]
        optimizer = torch.optim.Adafactor(weights, eps=eps)
        for one in weights:
            one.grad = torch.full_like(one, 1e-4)
        optimizer.step()  # type: ignore[no-untyped-call]
        assert note_of(optimizer).startswith("Adafactor: takes") == bool(others and eps[0] is None)
        return weight.detach()

    combines = not torch.equal(updated(), updated(torch.zeros(2, 2, dtype=torch.bfloat16)))
    assert combines == (eps[0] is None)


NOISY = """
import torch
from torch import nn


class Langevin(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data += 0.01 * torch.randn_like(p)


def model():
    return [nn.Linear(4, 4), nn.Linear(4, 1)]


def loss(output, target):
    return nn.functional.mse_loss(output, target)


def optimizer(params):
    return Langevin(params, lr=0.1)


def data():
    for _ in range(4):
        yield torch.ones(4, 4), torch.ones(4, 1)
"""


def test_an_optimizer_that_draws_random_numbers_is_noted_once(jobs: Jobs) -> None:
    """Its numbers depend on the number of stages, and no trial runs a class of the user's own."""
    note = "Langevin: draws random numbers in its step"
    alone = jobs.run("--stages", "1", "--steps", "2", source=NOISY)
    assert (alone.status, alone.stderr.count(note)) == (0, 0)
    both = jobs.run("--stages", "2", "--steps", "2", source=NOISY)
    assert (both.status, both.stderr.count(note)) == (0, 1), both.stderr
    assert alone.metrics[-1]["loss"] != both.metrics[-1]["loss"]


def test_of_several_optimizers_one_is_said_to_draw() -> None:
    """The others of the list draw none."""
    params = [nn.Parameter(torch.zeros(2))]
    every = [torch.optim.SGD(params), torch.optim.Adam(params), torch.optim.SGD(params)]
    assert note_on_draws(every).startswith("SGD or Adam: draws random numbers in its step, in the ")


class Int8(torch.Tensor):
    pass


_PLAIN, _OTHER = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).as_subclass(Int8))
_FROZEN = nn.Parameter(_OTHER.detach(), requires_grad=False)


@pytest.mark.parametrize(
    ("weights", "settings", "device", "reason"),
    [
        ([_PLAIN, _FROZEN], {}, "meta", "is not on meta"),
        ([_PLAIN, _FROZEN], {}, "cpu", ""),
        ([_OTHER], {}, "meta", "is an Int8"),
        ([_PLAIN, _OTHER], {}, "cpu", ""),
        ([_PLAIN, _OTHER], {}, "mps", ""),
        ([_PLAIN, _OTHER], {"foreach": False}, "meta", ""),
        ([_PLAIN, _OTHER], {"foreach": True}, "meta", ""),
        ([_PLAIN, _OTHER], {"fused": True}, "meta", ""),
    ],
)
def test_a_parameter_that_decides_for_the_others_is_noted(
    weights: list[nn.Parameter], settings: dict[str, Any], device: str, reason: str
) -> None:
    """Torch's two implementations round differently; `meta` stands for an accelerator."""
    note = note_on_implementation(torch.optim.AdamW(weights, **settings), torch.device(device))
    assert (f"of which one {reason}, so the numbers" in note) if reason else not note


def test_adafactor_updates_each_parameter_by_itself_by_default() -> None:
    assert not note_on_implementation(torch.optim.Adafactor([_PLAIN, _OTHER]), torch.device("meta"))


@pytest.mark.parametrize("foreach", [None, True, False])
def test_a_sparse_gradient_decides_for_the_others_of_adagrad(foreach: bool | None) -> None:
    """Its two implementations give other numbers in bf16 on the CPU."""

    def updated(*others: torch.Tensor) -> torch.Tensor:
        weight = nn.Parameter(torch.linspace(-1, 1, 99, dtype=torch.bfloat16))
        weights = [weight, *map(nn.Parameter, others)]
        optimizer = torch.optim.Adagrad(weights, foreach=foreach)
        weight.grad = torch.linspace(1, 2, 99, dtype=torch.bfloat16)
        for other in weights[1:]:
            other.grad = torch.ones_like(other).to_sparse(1)
        note = note_on_implementation(optimizer, torch.device("cpu"))
        assert ("of which one has a sparse gradient" in note) == bool(others and foreach)
        optimizer.step()
        return weight.detach()

    beside = updated(torch.ones(5, 3, dtype=torch.bfloat16))
    assert torch.equal(updated(), beside) == (not foreach)


SPARSE = """
import torch
from torch import nn


def model():
    return [nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1)]


def loss(output, target):
    return nn.functional.mse_loss(output, target)


def optimizer(params):
    return torch.optim.Adagrad(params, foreach=True)


def data():
    for _ in range(3):
        yield torch.ones(4, dtype=torch.int64), torch.ones(4, 1)
"""


@pytest.mark.parametrize("stages", [pytest.param(1, marks=slow), 2])
def test_a_job_whose_stages_choose_implementations_is_noted_once(jobs: Jobs, stages: int) -> None:
    """One stage alone has all parameters, and is not noted."""
    run = jobs.run("--stages", str(stages), "--steps", "2", source=SPARSE)
    found = run.stderr.count("Adagrad: torch chooses its implementation by the parameters")
    assert (run.status, found) == (0, stages - 1), run.stderr
