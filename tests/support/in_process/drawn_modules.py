"""Drawn modules: units, and a forward that is a list of statements between their calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

WIDTH = 8


class Unit(nn.Module):
    """A layer that does one thing more than a linear one, by its kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.kind, self.factor, self.calls = kind, 1.0, 0
        self.kept: torch.Tensor | None = None
        if kind == "norm":
            self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        self.calls += 1
        h = self.linear(x)
        if self.kind == "norm":
            h = self.norm(h)
        elif self.kind == "factor":
            h = h * self.factor
        elif self.kind == "keep":
            self.kept = h
        elif self.kind == "drop":
            h = F.dropout(h, 0.3, self.training)
        elif self.kind == "view":
            h = h.view(-1, 2, WIDTH // 2).flatten(1)
        elif self.kind == "in place":
            return x.clone().add_(h) + self.bias
        if other is not None:
            h = h + other
        out = torch.tanh(h) + self.bias
        return (out, h.mean(0, keepdim=True)) if self.kind == "pair" else out


KINDS = ("plain", "norm", "factor", "keep", "drop", "view", "in place", "pair")


@dataclass(frozen=True)
class Statement:
    """An operation on the values so far; each number is taken modulo what there is."""

    operation: str
    unit: int
    left: int
    right: int
    factor: float


@dataclass
class State:
    """What a forward has: the values it made, its input among them, and a stack."""

    module: Drawn
    x: torch.Tensor
    statement: Statement
    values: list[torch.Tensor]
    stack: list[torch.Tensor] = field(default_factory=list)

    @property
    def left(self) -> torch.Tensor:
        return self.values[self.statement.left % len(self.values)]

    @left.setter
    def left(self, value: torch.Tensor) -> None:
        self.values[self.statement.left % len(self.values)] = value

    @property
    def right(self) -> torch.Tensor:
        return self.values[self.statement.right % len(self.values)]

    @property
    def unit(self) -> Any:
        return self.module.units[self.statement.unit % len(self.module.units)]

    @property
    def factor(self) -> float:
        return self.statement.factor

    def call(self, unit: nn.Module, *args: torch.Tensor) -> Any:
        out = unit(*args)
        return out[0] + out[1] if isinstance(out, tuple) else out


def counted(s: State) -> torch.Tensor:
    s.module.count += 1
    return s.left * s.module.count


def without_grad(s: State) -> torch.Tensor:
    with torch.no_grad():
        doubled = s.left * 2
    return doubled + s.values[-1]


def filled(s: State) -> torch.Tensor:
    out = torch.zeros(s.left.shape)
    out[:] = s.left
    return out


def kept(s: State, value: torch.Tensor | None) -> torch.Tensor:
    return s.left if value is None or value.shape != s.left.shape else s.left + value


def added_in_place(s: State) -> None:
    s.left += s.right.detach() if s.statement.right % 2 else s.right


USUAL: dict[str, Callable[[State], torch.Tensor | None]] = {
    "add": lambda s: s.left + s.right,
    "scale": lambda s: s.left * s.factor,
    "tanh": lambda s: torch.tanh(s.left),
    "cat": lambda s: torch.cat([s.left, s.right], -1)[:, 3 : 3 + WIDTH],
    "mean": lambda s: s.left.mean(0, keepdim=True) + s.right,
    "chunk": lambda s: torch.cat(s.left.chunk(2, -1)[::-1], -1),
    "detach": lambda s: s.left.detach() + s.values[-1],
    "parameter": lambda s: s.left * s.module.scale,
    "weight of a unit": lambda s: F.linear(s.left, s.unit.linear.weight),
    "branch on a shape": lambda s: s.left * 2 if len(s.x) > 1 else s.left,
    "dropout": lambda s: F.dropout(s.left, 0.3, s.module.training),
    "torch.rand": lambda s: s.left * torch.rand(WIDTH),
    "random.random": lambda s: s.left * random.random(),
    "mask": lambda s: s.left.masked_fill(s.x > 1, 0),
    "where": lambda s: torch.where(s.x > 0, s.left, s.right),
    "push": lambda s: s.stack.append(s.left),
    "pop": lambda s: s.left + s.stack.pop() if s.stack else None,
    "input": lambda s: s.left + s.x,
    "alias": lambda s: s.left,
    "index": lambda s: s.left[torch.arange(len(s.x)).flip(0)],
    "dtype": lambda s: s.left.double().float(),
    "expand": lambda s: s.left[:1].expand(len(s.x), -1) + s.values[-1],
    "fill": filled,
}
"""Operations that any stage computes as one process does."""

UNUSUAL: dict[str, Callable[[State], torch.Tensor | None]] = {
    "add in place": added_in_place,
    "multiply in place": lambda s: s.left.mul_(s.factor),
    "set a part": lambda s: s.left[:, :3].copy_(s.right[:, 2:5]),
    "relu in place": lambda s: F.relu(s.left, inplace=True),
    "view": lambda s: s.left[:, :],
    "change the input": lambda s: s.x.mul_(1.5),
    "buffer": lambda s: s.left * s.module.table,
    "without grad": without_grad,
    "count": counted,
    "keep": lambda s: setattr(s.module, "kept", s.left),
    "read what is kept": lambda s: kept(s, s.module.kept),
    "read what a unit keeps": lambda s: kept(s, s.unit.kept),
    "read an attribute of a unit": lambda s: s.left * s.unit.factor * s.unit.calls,
    "write an attribute of a unit": lambda s: setattr(s.unit, "factor", s.factor),
}
"""Operations that may depend on state or change tensors; some modules with these are refused."""

RANDOM = {"dropout", "torch.rand", "random.random"}
OPERATIONS = {**USUAL, **UNUSUAL}


class Drawn(nn.Module):
    """Calls its units in order, each followed by its statements; returns the last value."""

    def __init__(self, kinds: list[str], body: list[list[Statement]], both: list[bool]) -> None:
        super().__init__()
        self.units = nn.ModuleList(map(Unit, kinds))
        self.scale: nn.Parameter = nn.Parameter(torch.ones(WIDTH))
        self.table: torch.Tensor
        self.register_buffer("table", torch.full((WIDTH,), 0.5))
        self.body, self.both, self.count = body, both, 0
        self.kept: torch.Tensor | None = None

    @property
    def is_random(self) -> bool:
        names = {one.operation for part in self.body for one in part}
        return bool(names & RANDOM) or any(unit.kind == "drop" for unit in self.units)

    @property
    def has_shared_parameters(self) -> bool:
        """Whether a parameter may be used in more than one layer."""
        names = [one.operation for part in self.body for one in part]
        return "weight of a unit" in names or names.count("parameter") > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = State(self, x, Statement("", 0, 0, 0, 1.0), [x])
        for unit, part, both in zip(self.units, self.body, self.both, strict=True):
            inputs = (state.values[-1], state.values[0]) if both else (state.values[-1],)
            state.values.append(state.call(unit, *inputs))
            for state.statement in part:
                out = OPERATIONS[state.statement.operation](state)
                if out is not None:
                    state.values.append(out)
        return state.values[-1]


_SMALL = st.integers(-1, 9)
_NAMES = st.sampled_from([*sorted(USUAL) * 2, *sorted(UNUSUAL)])
STATEMENTS = st.builds(
    Statement, _NAMES, st.integers(0, 4), _SMALL, _SMALL, st.sampled_from([0.5, 2.0, -1.5])
)
PARTS = st.tuples(
    st.sampled_from(["plain", *KINDS]), st.lists(STATEMENTS, max_size=4), st.booleans()
)


@st.composite
def modules(draw: st.DrawFn) -> Drawn:
    """Draw a module of two to five units."""
    kinds, body, both = zip(*draw(st.lists(PARTS, min_size=2, max_size=5)), strict=True)
    return Drawn([*kinds], [*body], [*both])
