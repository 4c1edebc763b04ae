"""The classes of a job that may pass between stages."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils import _pytree as pytree

from pipeworker.facts.limits import LONGEST_NAME
from pipeworker.worker.model.classes import classes_of

SOURCE = """
    from collections import namedtuple
    from dataclasses import dataclass
    from enum import Enum
    from pathlib import Path
    from typing import NamedTuple
    from torch.utils import _pytree as pytree
    Pair = namedtuple("Pair", "left right")
    class Point(NamedTuple):
        x: int
    @dataclass
    class State:
        x: int
    @dataclass
    class Unknown:
        x: int
    class Mode(Enum):
        A = 1
    class Other:
        class Deep(Enum):
            A = 1
    class Lazy:
        @property
        def __class__(self):
            raise AssertionError("looked into")
    lazy = Lazy()
    alias = State
    Long = namedtuple("Long", "x")
    Long.__qualname__ = "x" * LENGTH
    pytree.register_dataclass(State)
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("job_of_classes")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(textwrap.dedent(SOURCE).replace("LENGTH", str(LONGEST_NAME)), vars(made))
    return made


def test_named_tuples_enums_and_what_is_registered(module: ModuleType) -> None:
    found = classes_of([module])
    job_types = {name: kind for name, kind in found.items() if name.startswith("job_of_classes.")}
    kinds = [module.Mode, module.Pair, module.Point, module.State]
    assert job_types == {f"job_of_classes.{kind.__name__}": kind for kind in kinds}
    assert list(found) == sorted(found)
    assert Path not in found.values()


DATACLASSES = """
    from __future__ import annotations
    from dataclasses import InitVar, dataclass, field
    import torch
    from torch import nn
    @dataclass
    class Plain:
        x: torch.Tensor
        mask: torch.Tensor | None = None
        words: list = field(default_factory=list)
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Frozen:
        word: str = ""
        x: torch.Tensor
    @dataclass
    class Derived(Plain):
        depth: int = 0
    @dataclass
    class Config:
        width: int
    @dataclass
    class Checked:
        x: torch.Tensor
        def __post_init__(self):
            self.x = self.x + 1
    @dataclass
    class Part:
        x: torch.Tensor
        y: int = field(init=False, default=0)
    @dataclass
    class Given:
        x: torch.Tensor
        y: InitVar[int]
    @dataclass(init=False)
    class Own:
        x: torch.Tensor
        def __init__(self, x, factor):
            self.x = x * factor
    @dataclass(eq=False)
    class Layer(nn.Module):
        x: torch.Tensor
    class Undecorated(Plain):
        pass
"""


def test_dataclasses_of_tensors_are_registered_if_their_fields_are_all_that_they_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ModuleType("job_of_dataclasses")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(textwrap.dedent(DATACLASSES), vars(made))
    for _ in range(2):  # a class is registered once
        found = {name for name in classes_of([made]) if name.startswith(made.__name__)}
        assert found == {f"{made.__name__}.{name}" for name in ("Plain", "Frozen", "Derived")}
    x = torch.ones(2)
    value = made.Plain(x, None, [made.Frozen(x=x), made.Derived(x, x, [], 3)])
    again = pytree.tree_map(lambda leaf: leaf, value)
    assert [type(again), *map(type, again.words)] == [made.Plain, made.Frozen, made.Derived]
    for one in (value, again):
        assert [id(leaf) for leaf in pytree.tree_leaves(one)] == [*map(id, [x, "", x, x, x, 3])]


def test_the_class_of_a_script_has_the_same_name_where_it_was_spawned(module: ModuleType) -> None:
    names = []
    for name in ("__main__", "__mp_main__"):
        module.__name__ = module.Pair.__module__ = name
        names.append([name for name, kind in classes_of([module]).items() if kind is module.Pair])
    assert names == [["__main__.Pair"]] * 2


def test_what_is_registered_under_a_name_passes_wherever_it_is_defined() -> None:
    class Output:
        def __init__(self, x: int) -> None:
            self.x = x

    assert Output not in classes_of([]).values()
    pytree.register_pytree_node(
        Output,
        lambda output: ([output.x], None),
        lambda children, _: Output(*children),
        serialized_type_name="structures.Output",
    )
    assert f"{__name__}.{Output.__qualname__}" in classes_of([])
    assert "torch.Size" in classes_of([])
    assert not {tuple, list, dict} & {*classes_of([]).values()}
