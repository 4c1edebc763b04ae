"""Parameters that exist before the layers of callables are built, and their origins."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.facts.connections import Cached, Existing
from pipeworker.worker.model.existing import Origins

Entry = nn.Module | Callable[[], nn.Module]


class Head(nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.table = weight


@dataclass
class Parts:
    emb: nn.Embedding

    def head(self) -> nn.Module:
        return Head(self.emb.weight)


class Slotted:
    __slots__ = ("emb",)

    def __init__(self, emb: nn.Embedding) -> None:
        self.emb = emb

    def __call__(self) -> nn.Module:
        return Head(self.emb.weight)


def in_a_closure() -> list[Entry]:
    emb = nn.Embedding(3, 2)
    return [lambda: emb, nn.ReLU(), lambda: Head(emb.weight)]


def in_a_default() -> list[Entry]:
    emb = nn.Embedding(3, 2)

    def head(*, one: nn.Embedding = emb) -> nn.Module:
        return Head(one.weight)

    return [lambda emb=emb: emb, nn.ReLU(), head]  # type: ignore[misc]


def in_a_partial() -> list[Entry]:
    weight = nn.Parameter(torch.zeros(3, 2))
    return [functools.partial(Head, weight), nn.ReLU(), functools.partial(Head, weight=weight)]


def in_an_object() -> list[Entry]:
    parts = Parts(nn.Embedding(3, 2))
    return [lambda: parts.emb, nn.ReLU(), parts.head]


def in_a_slot() -> list[Entry]:
    made = Slotted(nn.Embedding(3, 2))
    return [lambda: made.emb, nn.ReLU(), made]


def in_a_container() -> list[Entry]:
    kept = {"parts": [nn.ReLU(), nn.Embedding(3, 2)]}
    return [lambda: kept["parts"][1], nn.ReLU(), lambda: Head(kept["parts"][1].weight)]


def in_an_entry() -> list[Entry]:
    emb = nn.Embedding(3, 2)
    return [emb, nn.ReLU(), lambda: Head(emb.weight)]


def in_a_global() -> list[Entry]:
    return in_a_namespace("emb = nn.Embedding(3, 2)", "emb", "emb.weight")


def in_a_class() -> list[Entry]:
    text = """
class Shared:
    emb = nn.Embedding(3, 2)

class Tail(Head):
    def __init__(self):
        super().__init__(Shared.emb.weight)
"""
    return in_a_namespace(text, "Shared.emb", "", "Tail")


def in_a_module() -> list[Entry]:
    module = types.ModuleType("neighbour")
    exec("from torch import nn\nemb = nn.Embedding(3, 2)", vars(module))
    return in_a_namespace("", "neighbour.emb", "neighbour.emb.weight", neighbour=module)


def in_a_function() -> list[Entry]:
    text = """
emb = nn.Embedding(3, 2)

def build(name):
    return emb if name == "emb" else Head(emb.weight)
"""
    return in_a_namespace(text, "build('emb')", "", "lambda: build('head')")


def in_a_cache() -> list[Entry]:
    text = "@functools.cache\ndef emb():\n    return nn.Embedding(3, 2)\n"
    return in_a_namespace(text, "emb()", "emb().weight")


def in_a_function_inside() -> list[Entry]:
    emb, weight = "(lambda: emb)()", "(lambda: emb.weight)()"
    return in_a_namespace("emb = nn.Embedding(3, 2)", emb, weight)


def beside_an_empty_cell() -> list[Entry]:
    text = """
def closed():
    emb = nn.Embedding(3, 2)
    def first():
        return emb or absent
    def last():
        return Head(emb.weight) or absent
    return first, last
    absent = None

first, last = closed()
"""
    return in_a_namespace(text, "first()", "", "last")


def beside_other_caches() -> list[Entry]:
    text = """
emb, largest = nn.Embedding(3, 2), functools.cache(max)

@functools.cache
def sized(count):
    return count

sized(largest(1, 2))
"""
    return in_a_namespace(text, "(sized, largest, emb)[2]", "(sized, largest, emb)[2].weight")


def in_modules_with_each_other() -> list[Entry]:
    one, two = types.ModuleType("one"), types.ModuleType("two")
    vars(one).update(other=two, emb=nn.Embedding(3, 2))
    vars(two).update(one=one)
    return in_a_namespace("", "one.other.one.emb", "one.other.one.emb.weight", one=one)


def in_a_namespace(text: str, emb: str, weight: str, head: str = "", **more: Any) -> list[Entry]:
    """Return the layers of a job file with `text`."""
    names = {"__name__": "job", "nn": nn, "Head": Head, "functools": functools}
    namespace: dict[str, Any] = {**names, **more}
    last = head or f"lambda: Head({weight})"
    exec(f"{text}\nlayers = [lambda: {emb}, nn.ReLU(), {last}]", namespace)
    layers: list[Entry] = namespace["layers"]
    return layers


EXISTING = [
    in_a_closure,
    in_a_default,
    in_a_partial,
    in_an_object,
    in_a_slot,
    in_a_container,
    in_an_entry,
    in_a_global,
    in_a_class,
    in_a_module,
    in_a_function,
    in_a_cache,
    *(in_a_function_inside, beside_an_empty_cell, beside_other_caches, in_modules_with_each_other),
]


def found(entries: list[Entry], *indices: int) -> list[Existing]:
    """Return the existing parameters of layers, as a process that builds only these finds them."""
    origins = Origins(entries)
    existing = []
    for index in indices:
        entry = entries[index]
        existing += origins.of([entry if isinstance(entry, nn.Module) else entry()], index)
    return existing


@pytest.mark.parametrize("make", EXISTING, ids=lambda make: make.__name__)
def test_a_parameter_of_two_layers_has_one_origin_in_two_processes(
    make: Callable[[], list[Entry]],
) -> None:
    (first,), (last,) = found(make(), 0), found(make(), 2)
    assert first.name in ("0.weight", "0.table")
    assert last.name == "2.table"
    assert first.origin == last.origin
    assert [one.origin for one in found(make(), 0, 1, 2)] == [first.origin] * 2


def test_other_parameters_have_other_origins_or_none() -> None:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    built: list[nn.Module] = []

    def fresh() -> nn.Module:
        built.append(nn.Linear(net[0].in_features, 2))  # type: ignore[arg-type]
        return built[-1]

    def entries() -> list[Entry]:
        return [lambda: net[0], lambda: net[1], fresh, fresh, lambda: net[2:]]

    existing = found(entries(), 0, 1, 2, 3, 4)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    names += [f"4.{number}.{key}" for number in (2, 3) for key in ("weight", "bias")]
    assert [one.name for one in existing] == names
    assert len({one.origin for one in existing}) == len(names)


def test_frozen_parameters_may_be_shared() -> None:
    emb = nn.Embedding(3, 2).requires_grad_(False)
    assert found([lambda: emb, nn.ReLU(), lambda: Head(emb.weight)], 0, 2) == []


def test_a_cache_has_the_numbers_that_it_was_built_with() -> None:
    kept: list[Cached] = []
    for seed in (0, 0, 1):
        (first, *_), loads = in_a_cache(), nn.init.zeros_
        origins = Origins([first])
        assert not isinstance(first, nn.Module)
        assert origins.of([], 0) == []
        assert origins.kept == {}
        torch.manual_seed(seed)
        layer = first()
        origins.of([layer], 0)
        loads(next(layer.parameters()))  # as from a checkpoint
        origins.of([layer], 0)
        kept += origins.kept.values()
    assert [function.name for function in kept] == ["emb"] * 3
    assert kept[0] == kept[1]
    assert kept[0].origin == kept[2].origin
    assert kept[0].numbers != kept[2].numbers


def test_what_a_cache_keeps_may_reach_another_cache() -> None:
    inner = functools.cache(lambda: nn.Embedding(3, 2))
    text = """
@functools.cache
def outer():
    made = Head(inner[0]().weight)
    made.more = inner
    return made
"""
    entries = in_a_namespace(text, "inner[0]()", "outer().table", inner=[inner])
    first, last = entries[0], entries[2]
    assert not isinstance(first, nn.Module)
    assert not isinstance(last, nn.Module)
    origins, built = Origins([last, first]), [last(), first()]
    assert len({one.origin for one in origins.of(built, 0)}) == 1


def test_a_cache_is_not_kept_alive() -> None:
    cached = functools.cache(lambda: nn.Embedding(3, 2))
    origins, alive = Origins([cached]), weakref.ref(cached())
    assert origins.of([cached()], 0)
    origins.release()
    del cached
    assert alive() is None


def test_objects_of_the_user_may_raise() -> None:
    class Raises:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no")

    class Unbound:
        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            raise RuntimeError("no")

    class Sizeless(list[int]):
        def __len__(self) -> int:
            raise RuntimeError("no")

    class Dies:
        pass

    odd, emb = (Raises(), Unbound(), Sizeless(), weakref.proxy(Dies())), nn.Embedding(3, 2)
    (one,) = found([lambda: (odd, emb)[1]], 0)
    assert one.name == "0.weight"


def test_a_parameter_is_not_kept_alive() -> None:
    layers: list[nn.Module] = [nn.Embedding(3, 2)]
    alive = weakref.ref(layers[0].weight)
    origins = Origins([lambda: layers[0]])
    assert origins.of(layers, 0)
    layers.clear()
    assert alive() is None
