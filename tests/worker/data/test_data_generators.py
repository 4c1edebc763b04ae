"""The user's own random generators are found, wherever data refers to them."""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from pipeworker.worker.data.generators import (
    generators_of_loading,
    generators_of_source,
    own_generators,
)


class Holder:
    """An object of the user's that draws."""

    def __init__(self, generator: Any) -> None:
        self.inner = [{"generator": generator}]

    def batches(self) -> Iterator[torch.Tensor]:
        yield torch.rand(2, generator=self.inner[0]["generator"])


def draws(generator: Any, count: int = 2) -> Iterator[torch.Tensor]:
    yield torch.rand(count, generator=generator)


def within(generator: Any) -> Callable[[], Iterator[torch.Tensor]]:
    def one() -> Iterator[torch.Tensor]:
        return draws(generator)

    return lambda: one()


def by_default(generator: Any) -> Callable[..., Iterator[torch.Tensor]]:
    def data(start: int = 0, own: Any = generator) -> Iterator[torch.Tensor]:
        return itertools.islice(draws(own), start, None)

    return data


def by_keyword(generator: Any) -> Callable[..., Iterator[torch.Tensor]]:
    def data(start: int, *, own: Any = generator) -> Iterator[torch.Tensor]:
        return itertools.islice(draws(own), start, None)

    return data


def as_attribute(generator: Any) -> Callable[..., Iterator[torch.Tensor]]:
    def data() -> Iterator[torch.Tensor]:
        return draws(data.generator)  # type: ignore[attr-defined]

    data.generator = generator  # type: ignore[attr-defined]
    return data


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "a partial's argument": lambda g: functools.partial(draws, g),
    "a partial's keyword": lambda g: functools.partial(draws, generator=g),
    "the closure of a function in the closure": within,
    "an argument's default": by_default,
    "a keyword's default": by_keyword,
    "an attribute of the function": as_attribute,
    "inside of a method's object": lambda g: Holder(g).batches,
}


@pytest.mark.parametrize("kind", [torch.Generator, random.Random, np.random.default_rng])
@pytest.mark.parametrize("place", FUNCTIONS)
def test_the_generators_of_a_function_are_found(place: str, kind: Callable[[], Any]) -> None:
    generator = kind()
    assert list(own_generators(FUNCTIONS[place](generator)).values()) == [generator]


def test_what_has_no_state_or_no_value_yet_is_left_out() -> None:
    """The system's generator cannot be given a state."""
    assert not own_generators(functools.partial(draws, random.SystemRandom()))

    def data() -> Iterator[torch.Tensor]:
        return draws(later)

    assert not own_generators(data)
    later = torch.Generator()
    assert list(own_generators(data).values()) == [later]


class Items(Dataset[torch.Tensor]):
    """A dataset whose class has a generator."""

    generator = torch.Generator()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2, generator=self.generator)


class Slotted:
    """A dataset without a dict of its own."""

    __slots__ = ("generator", "never_set")

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2, generator=self.generator)


class Shuffled(Sampler[int]):
    """A sampler that has its generator in another object."""

    def __init__(self, generator: Any) -> None:
        self.holder = Holder(generator)

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(4, generator=self.holder.inner[0]["generator"]).tolist()


def test_the_generators_of_a_dataset_are_found() -> None:
    own = torch.Generator()
    for dataset, expected in ((Items(), Items.generator), (Slotted(own), own)):
        assert list(generators_of_loading(dataset, None).values()) == [expected]
        loader: Any = DataLoader(dataset)  # type: ignore[arg-type]
        assert list(generators_of_source(loader).values()) == [expected]
        assert list(generators_of_source(dataset).values()) == [expected]


def test_the_generators_inside_of_a_sampler_are_found() -> None:
    own = torch.Generator()
    items = torch.arange(4)
    by_index: Any = DataLoader(items, sampler=Shuffled(own))  # type: ignore[arg-type]
    by_batch: Any = DataLoader(items, batch_sampler=Shuffled(own))  # type: ignore[arg-type]
    for loader in (by_index, by_batch):
        assert list(generators_of_source(loader).values()) == [own]


def test_a_generator_that_two_places_share_is_found_once() -> None:
    own = torch.Generator()
    holder = Holder(own)
    holder.inner.append({"generator": own})
    assert len(own_generators(holder.batches)) == 1


def test_the_generators_of_imported_modules_and_global_objects_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {
        "drawn_noise": "import numpy as np\nRNG = np.random.default_rng(1)\ndef noise(): ...",
        "drawn_steps": "import random\nRNG = random.Random(2)\nfrom drawn_noise import noise",
        "drawn_data": (
            "import torch, drawn_steps\nclass Crop: ...\ncrop = Crop()\n"
            "crop.generator = torch.Generator()\ndef data(): ..."
        ),
    }
    for name, text in lines.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    data: Any = importlib.import_module("drawn_data")
    noise, steps, _ = [sys.modules.pop(name) for name in lines]
    monkeypatch.setitem(sys.modules, "drawn_noise", noise)
    monkeypatch.setitem(sys.modules, "drawn_data", data)
    found = own_generators(data.data).values()
    expected = [steps.RNG, noise.RNG, data.crop.generator]
    assert [id(one) for one in found] == [id(one) for one in expected]
