"""Stages of a model that are saved, restored into other stages, and trained on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.checkpoint.checkpoint import Checkpoint
from pipeworker.record.checkpoint.manifest import Manifest, WorkerFiles, file_names
from pipeworker.record.checkpoint.restore import restore
from pipeworker.record.checkpoint.stage_state import OptimizerState, StageState
from support.in_process.checkpoints import save_worker_files

optim, schedules = torch.optim, torch.optim.lr_scheduler
Named = list[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[Named], "torch.optim.Optimizer | list[torch.optim.Optimizer]"]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
TIE = {"6.weight": "3.weight"}


class Odd(nn.Module):
    """A module with state of all kinds; its output depends on all of it."""

    table: torch.Tensor
    twisted: torch.Tensor
    new: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex128))
        self.calls = 0
        self.log: list[float] = []
        self.register_buffer("table", torch.ones(1), persistent=False)
        self.register_buffer("late", None, persistent=False)
        self.register_buffer("twisted", torch.ones(8, 8).T.clone().T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(0.5 * self.calls)
        self.table = torch.cat([self.table, self.table[-1:] + 0.1])
        self.late = self.table.sum()
        self.twisted += 0.01
        if not hasattr(self, "new"):
            self.register_buffer("new", torch.zeros(()), persistent=False)
        self.new += 0.1
        factor = self.table.sum() * self.calls + sum(self.log) + self.late + self.new
        turned = (x.double() @ self.twisted.double()) * self.turn
        return x + 0.01 * (turned.abs() / factor).float()

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "at": torch.tensor([self.calls])}

    def set_extra_state(self, state: Any) -> None:
        assert state["at"].tolist() == [state["calls"]]
        self.calls = state["calls"]


def add_log(module: Odd, state: Any, prefix: str, _: Any) -> None:
    if module.log:  # not before the first forward
        state[f"{prefix}log"] = list(module.log)


def take_log(module: Odd, state: Any, prefix: str, *_: Any) -> None:
    module.log = state.pop(f"{prefix}log", [])


def model(seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    odd = Odd()
    hooked: Any = odd
    hooked.register_state_dict_post_hook(add_log)
    hooked.register_load_state_dict_pre_hook(take_log)
    frozen = nn.Linear(8, 8)
    frozen.requires_grad_(False)
    layers = [
        *(nn.Linear(4, 8), nn.BatchNorm1d(8), odd, nn.Linear(8, 8), frozen, nn.Tanh()),
        *(nn.Linear(8, 8, bias=False), nn.Linear(8, 3)),
    ]
    return list(layers)


@dataclass
class Stages:
    """The stages of a model with their own optimizers; tied weights are as workers have them."""

    layers: list[nn.Module]
    cuts: Sequence[int]
    optimizer: MakeOptimizer
    scheduler: MakeScheduler | None = None
    names: LayerNames = field(default_factory=lambda: LayerNames.numbered(8))
    step: int = 0
    rates: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranges = list(pairwise([0, *self.cuts, len(self.layers)]))
        self.first, self.later = (self.layers[i].get_parameter("weight") for i in (3, 6))
        with torch.no_grad():
            self.later.copy_(self.first)
        self.together = any(start <= 3 and stop > 6 for start, stop in self.ranges)
        if self.together:
            self.later.data = self.first.data
        self.elsewhere = set() if self.together else {id(self.later)}
        self.updates: list[list[tuple[torch.optim.Optimizer, Any]]] = []
        for start, stop in self.ranges:
            named = [
                (f"{index}.{name}", parameter)
                for index in range(start, stop)
                for name, parameter in self.layers[index].named_parameters()
                if not (parameter is self.later and self.together)
            ]
            trains = any(p.requires_grad for _, p in named)
            made = self.optimizer(named) if trains else []
            optimizers = made if isinstance(made, list) else [made]
            pairs = [(one, self.scheduler(one) if self.scheduler else None) for one in optimizers]
            self.updates.append(pairs)

    @property
    def ties(self) -> dict[str, str]:
        return {self.names.of_numbered(name): self.names.of_numbered(TIE[name]) for name in TIE}

    def parts(self) -> list[StageState]:
        return [
            StageState(
                self.names,
                self.layers[start:stop],
                [layer.state_dict() for layer in self.layers[start:stop]],
                [
                    OptimizerState(optimizer, scheduler and scheduler.state_dict(), scheduler)
                    for optimizer, scheduler in pairs
                ],
                first=start,
            )
            for (start, stop), pairs in zip(self.ranges, self.updates, strict=True)
        ]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.step))
            net = nn.Sequential(*self.layers)
            torch.autograd.backward(nn.functional.cross_entropy(net(x), x[:, :3].argmax(1)))
            assert self.first.grad is not None
            assert self.later.grad is not None
            self.first.grad += self.later.grad
            self.later.grad.copy_(self.first.grad)
            for optimizer, scheduler in itertools.chain.from_iterable(self.updates):
                optimizer.step()
                if isinstance(scheduler, schedules.ReduceLROnPlateau):
                    scheduler.step(1.0 if self.step < 2 else 2.0)
                elif scheduler is not None:
                    scheduler.step()
            net.zero_grad()
            self.step += 1

    def save(self, folder: Path) -> Checkpoint:
        """Save a checkpoint with a worker for each stage."""
        files: list[CheckpointFile] = []
        for rank, part in enumerate(self.parts()):
            ranks = len(self.ranges)
            files += save_worker_files(folder, rank, ranks, [part], self.elsewhere)
        ties = tuple((first, later) for later, first in self.ties.items())
        manifest = Manifest(self.step, len(self.ranges), self.names, tuple(files), ties)
        (folder / "manifest.json").write_text(json.dumps(manifest.to_json()))
        return Checkpoint(folder)

    def restore(self, shards: Sequence[WorkerFiles], step: int) -> None:
        for part in self.parts():
            restore(shards, [part], self.ties)
        self.step = step

    def state(self) -> dict[str, Any]:
        """Return all state by name; that of a tied weight under its first name only."""
        found: dict[str, Any] = {}
        for part in self.parts():
            found |= part.entries() | part.unlisted_buffers()
            by_id = {id(p): name for name, p in part.parameters().items()}
            optimizers = [update.optimizer for update in part.updates]
            for optimizer, group in ((o, group) for o in optimizers for group in o.param_groups):
                for parameter in (p for p in group["params"] if p.requires_grad):
                    name = by_id[id(parameter)]
                    name = self.ties.get(name, name)
                    kept = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                    found[f"{name} state"] = dict(optimizer.state[parameter])
                    found[f"{name} group"] = kept
        return found


def assert_same(one: Any, other: Any, where: str = "") -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_same(value, other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for key, value in enumerate(one):
            assert_same(value, other[key], f"{where}/{key}")
    else:
        assert one == other, where


def only(named: Named) -> list[nn.Parameter]:
    return [parameter for _, parameter in named]


def decayed(named: Named) -> list[dict[str, Any]]:
    """Return two groups on every stage; one of them is empty on some stages."""
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def by_name(named: Named) -> list[dict[str, Any]]:
    """Return groups that not every stage has, in an order that differs by stage."""
    rates = {"weight": 0.03, "bias": 0.01, "turn": 0.02}
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        groups.setdefault(name.partition(".")[2], []).append((name, parameter))
    return [{"params": given, "lr": rates[kind]} for kind, given in groups.items()]


def kinds(named: Named) -> list[torch.optim.Optimizer]:
    """Return an optimizer for matrices and one for all else; some stages lack one of them."""
    large = [p for _, p in named if p.dim() > 1]
    small = [p for _, p in named if p.dim() < 2]
    found: list[torch.optim.Optimizer] = []
    if large:
        found.append(optim.SGD(large, lr=0.05, momentum=0.9))
    if small:
        found.append(optim.AdamW(small, lr=0.02))
    return found


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": lambda named: optim.SGD(only(named), lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda named: optim.AdamW(only(named), lr=0.02),
    "amsgrad": lambda named: optim.Adam(only(named), lr=0.02, amsgrad=True),
    "Adagrad": lambda named: optim.Adagrad(only(named), lr=0.02),
    "tensor": lambda named: optim.Adam(only(named), lr=torch.tensor(0.02), foreach=False),
    "decay": lambda named: optim.AdamW(decayed(named), lr=0.01),
    "by name": lambda named: optim.AdamW(by_name(named), lr=0.01),
    "kinds": kinds,
}


class Halved:
    """A callable with state."""

    def __init__(self) -> None:
        self.calls = 0.0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / self.calls


def sequence(optimizer: torch.optim.Optimizer) -> Any:
    first = schedules.LinearLR(optimizer, 0.1, total_iters=2)
    later = schedules.LambdaLR(optimizer, lambda step: 0.9**step)
    return schedules.SequentialLR(optimizer, [first, later], [2])


def chain(optimizer: torch.optim.Optimizer) -> Any:
    one = schedules.ConstantLR(optimizer, 0.5, total_iters=4)
    return schedules.ChainedScheduler([one, schedules.ExponentialLR(optimizer, 0.9)])


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    momentum = {"momentum", "betas"} & optimizer.param_groups[0].keys()
    rates = [group["lr"] for group in optimizer.param_groups]
    return schedules.OneCycleLR(optimizer, rates, total_steps=20, cycle_momentum=bool(momentum))


SCHEDULERS: dict[str, MakeScheduler | None] = {
    "none": None,
    "StepLR": lambda o: schedules.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 5),
    "SequentialLR": sequence,
    "ChainedScheduler": chain,
    "OneCycleLR": one_cycle,
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1, min_lr=0.001),
    "LambdaLR": lambda o: schedules.LambdaLR(o, [Halved() for _ in o.param_groups]),
}


def one_stage(seed: int = 0) -> Stages:
    return Stages(model(seed), (), OPTIMIZERS["AdamW"])


def shard_of(folder: Path, rank: int = 0, ranks: int = 1) -> WorkerFiles:
    return WorkerFiles(*(folder / name for name in file_names(rank, ranks)))
