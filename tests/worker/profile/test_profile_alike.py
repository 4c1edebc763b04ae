"""Alike layers have equal keys, and layers that may cost otherwise have not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.job.options import Options
from pipeworker.worker.profile import alike

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2, layer_idx: int = 0, rate: float = 0.1):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.heads, self.layer_idx, self._rate = heads, layer_idx, rate
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.relu
        self.register_buffer("mask", torch.ones(width))


def changed(change: Callable[[Block], object]) -> Block:
    block = Block()
    change(block)
    return block


def test_layers_that_differ_in_place_and_weights_are_alike() -> None:
    torch.manual_seed(0)
    assert alike.key_of(Block()) == alike.key_of(Block(layer_idx=7))
    assert alike.key_of(nn.Linear(3, 4)) == alike.key_of(nn.Linear(3, 4))


@pytest.mark.parametrize(
    "other",
    [
        Block(width=9),
        Block(heads=4),
        Block(rate=0.2),
        changed(lambda b: b.eval()),
        changed(lambda b: b.requires_grad_(False)),
        changed(lambda b: b.to(torch.bfloat16)),
        changed(lambda b: setattr(b, "activation", torch.tanh)),
        changed(lambda b: b.register_buffer("mask", torch.ones(9))),
        changed(lambda b: b.register_buffer("mask", torch.ones(8).to_sparse())),
        changed(lambda b: b.add_module("more", nn.Dropout(0.5))),
        nn.Sequential(Block()),
    ],
)
def test_layers_that_may_cost_otherwise_are_unlike(other: nn.Module) -> None:
    assert alike.key_of(other) != alike.key_of(Block())


def test_sparse_buffers_count_by_their_parts() -> None:
    def key(*numbers: float) -> str:
        mask = torch.tensor([numbers]).to_sparse_csr()
        return alike.key_of(changed(lambda b: b.register_buffer("mask", mask)))

    assert key(1, 0, 2) == key(0, 3, 4) != key(1, 2, 3)


def test_settings_of_torchs_own_modules_count() -> None:
    assert alike.key_of(nn.Dropout(0.1)) != alike.key_of(nn.Dropout(0.2))
    one, other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3, stride=2)
    assert alike.key_of(one) != alike.key_of(other)


class Mode(Enum):
    FAST = 1
    EXACT = 2


class Parts(Flag):
    FIRST = 1
    SECOND = 2
    THIRD = 4


@dataclass
class Config:
    factor: int
    layer_idx: int = 0


def test_a_configuration_counts_without_the_place_of_its_layer() -> None:
    one, other = (changed(lambda b, n=n: setattr(b, "config", Config(2, n))) for n in (0, 7))  # type: ignore[misc]
    assert alike.key_of(one) == alike.key_of(other)


def scaled(factor: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: nn.functional.interpolate(x, scale_factor=factor)


@pytest.mark.parametrize(
    "functions",
    [
        [partial(nn.functional.interpolate, scale_factor=factor) for factor in (2, 4)],
        [scaled(2), scaled(4)],
        [lambda x: x[:1], lambda x: x[:2]],
        [lambda x: x.sin(), lambda x: x.exp()],
        [lambda x, n=n: x[:n] for n in (1, 2)],
        [{"scale_factor": 2}, {"scale_factor": 4}],
        [nn.ReLU, nn.GELU],
        [Mode.FAST, Mode.EXACT],
        [Parts.FIRST | Parts.SECOND, Parts.FIRST | Parts.THIRD],
        [Config(2), Config(4)],
    ],
)
def test_layers_that_call_other_functions_are_unlike(functions: list[Any]) -> None:
    one, again, other = (
        changed(lambda b, f=f: setattr(b, "function", f))  # type: ignore[misc]
        for f in (functions[0], functions[0], functions[1])
    )
    assert alike.key_of(one) == alike.key_of(again) != alike.key_of(other)


def test_a_layer_whose_library_has_changed_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for number, text in enumerate(["one", "one", "two"]):
        path = tmp_path / str(number) / "library_of_layers.py"
        path.parent.mkdir()
        path.write_text(f"from torch import nn\nclass Layer(nn.ReLU):\n    '{text}'\n")
        monkeypatch.syspath_prepend(path.parent)
        keys.append(alike.key_of(importlib.import_module(path.stem).Layer()))
        del sys.modules[path.stem]
    assert keys[0] == keys[1] != keys[2]


def test_functions_that_every_process_compiles_by_itself_are_alike() -> None:
    """A function inside of one has another address in each process."""
    one, other = (
        changed(lambda b: setattr(b, "function", eval("lambda x: (lambda y: y + 1)(x)")))
        for _ in range(2)
    )
    assert alike.key_of(one) == alike.key_of(other)


def test_a_function_may_use_a_variable_that_has_no_value_yet() -> None:
    block = changed(lambda b: setattr(b, "function", lambda x: x + later))
    assert alike.key_of(block) != alike.key_of(Block())
    later = 1


def test_a_list_may_contain_itself() -> None:
    items: list[Any] = [1]
    items.append(items)
    assert alike.key_of(changed(lambda b: setattr(b, "items", items)))


def test_the_surroundings_have_code_device_options_and_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["job.py"])
    options = Options("job.py", 2, 8)
    sources = [("job.py", "abc")]
    found = alike.surroundings(options, CPU, sources)
    assert found == alike.surroundings(Options("job.py", 4, 16, seed=1), CPU, sources)
    others = [
        alike.surroundings(options, CPU, [("job.py", "abd")]),
        alike.surroundings(Options("job.py", 2, 8, threads=2), CPU, sources),
        alike.surroundings(Options("job.py", 2, 8, precision="bf16"), CPU, sources),
        alike.surroundings(Options("job.py", 2, 8, compile=True), CPU, sources),
        alike.surroundings(Options("job.py", 2, 8, deterministic=True), CPU, sources),
        alike.surroundings(Options("job.py", 2, 8, deferred_batch_norm=True), CPU, sources),
    ]
    for name, value in {
        "sys.argv": ["job.py", "--adam"],
        "torch.__version__": "0",
        "platform.python_version": lambda: "0",
        "os.cpu_count": lambda: 0,
        "pipeworker.worker.profile.alike.name_of": lambda _: "another processor",
    }.items():
        with monkeypatch.context() as changed:
            changed.setattr(name, value)
            others.append(alike.surroundings(options, CPU, sources))
    assert len({found, *others}) == 12
