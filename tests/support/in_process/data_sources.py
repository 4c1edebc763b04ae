"""Data of every kind that a job file may give, each with its own random generators."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from pipeworker.record.checkpoint.json_state import pack, unpack

LENGTH = 2
EPOCHS = 3
SAMPLES, BATCH = 7, 4
"""Samples, and samples per mini-batch: the loader's sampler is exhausted at the second one."""

Factory = Callable[[], Any]
"""Makes the data as a new process does that runs the job file."""


def pair(*numbers: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mini-batch of one sample, with a draw from each generator of the stream."""
    drawn = torch.rand(()).item(), random.random(), np.random.rand()
    x = torch.tensor([[*drawn, *numbers]], dtype=torch.float64)
    return x, x[:, 0]


def round_trip(position: Any) -> Any:
    """Return a position as a checkpoint restores it."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(pack(position, tensors, "data"))
    return unpack(json.loads(text), {name: value.clone() for name, value in tensors.items()})


def batches() -> Iterator[Any]:
    for number in range(LENGTH):
        yield pair(number)


module_generator = np.random.default_rng(3)


class PlainList(list[Any]):
    pass


def from_module() -> PlainList:
    """Return data drawn from a generator of this module."""
    return PlainList([pair(number, module_generator.random()) for number in range(LENGTH)])


def drawn_from_module() -> float:
    return module_generator.random()


def factory_with_module() -> Factory:
    module_generator.bit_generator.state = np.random.default_rng(3).bit_generator.state
    return from_module


class Owner:
    def __init__(self) -> None:
        self.random = random.Random(5)

    def data(self) -> list[Any]:
        return [pair(self.random.random()) for _ in range(LENGTH)]


class Mapped(Dataset[Any]):
    """A dataset with generators of its own."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.legacy = np.random.RandomState(4)
        self.other = np.random.Generator(np.random.MT19937(6))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return pair(index, self.legacy.random(), self.other.random())


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return batches()


class OneShot:
    """An iterator that draws from a generator of its own."""

    def __init__(self) -> None:
        self.left = LENGTH * EPOCHS
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self) -> OneShot:
        return self

    def __next__(self) -> Any:
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return pair(torch.rand((), generator=self.generator).item())


class Stateful:
    """A source with a state, in a dict and a tensor that keep changing.

    If its final state is loaded, it is exhausted.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"at": 0, "drawn": torch.zeros(1, dtype=torch.int64)}
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        while self.state["at"] < LENGTH:
            self.state["at"] += 1
            self.state["drawn"] += torch.randint(10, ())
            self.read.append(int(self.state["at"]))
            yield pair(self.state["at"], self.state["drawn"].item())
        self.state["at"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Cyclic(Stateful):
    """A source that yields the next epoch if its final state is loaded."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[Any]:
        for _ in range(LENGTH - self.state["at"]):
            self.state["at"] = (self.state["at"] + 1) % LENGTH
            self.state["drawn"] += torch.randint(10, ())
            yield pair(self.state["at"], self.state["drawn"].item())


class LateState(Stateful):
    """A source whose state is the previous epoch's end until the first mini-batch is read."""

    loaded = 0

    def __iter__(self) -> Iterator[Any]:
        self.state["at"], self.loaded = self.loaded, 0
        while self.state["at"] < LENGTH:
            self.state["at"] += 1
            yield pair(self.state["at"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = state["at"]


class Order:
    """A sampler that draws when it begins, and has the generator's state before that."""

    begun: Any = None

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        self.begun = self.generator.get_state()
        return iter(torch.randperm(SAMPLES, generator=self.generator).tolist())


class Loader(DataLoader[Any]):
    """A stateful loader like torchdata's: after a load it draws again, in whole or in part."""

    yielded = 0
    loaded: Any = None

    def __iter__(self) -> Any:
        indices = iter(self.sampler)
        torch.empty(()).random_(generator=self.generator)
        state, self.loaded = self.loaded or {"yielded": 0, "begun": None}, None
        if state["begun"] is not None:
            self.generator.set_state(state["begun"])
            indices = iter(self.sampler)
        self.yielded = state["yielded"]
        for _ in range(self.yielded):
            next(indices)
        return self._all(indices)

    def _all(self, indices: Iterator[int]) -> Iterator[Any]:
        while chunk := list(itertools.islice(indices, BATCH)):
            self.yielded += len(chunk)
            yield together([self.dataset[index] for index in chunk])

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded, "begun": getattr(self.sampler, "begun", None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def together(items: list[Any]) -> Any:
    return tuple(map(torch.cat, zip(*items, strict=True)))


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(
        Mapped(SAMPLES), batch_size=BATCH, shuffle=True, collate_fn=together, **options
    )


def loader() -> Any:
    generator = seeded()
    return Loader(Mapped(SAMPLES), sampler=Order(generator), generator=generator)


def replaying() -> Any:
    sampler = RandomSampler(range(SAMPLES), generator=seeded())
    return Loader(Mapped(SAMPLES), sampler=sampler)


def reused(make: Factory) -> Factory:
    """Return a function that returns the equal object for each epoch."""
    data = make()
    return lambda: data


def new_each_time(make: Factory) -> Factory:
    """Return a function that makes a new object for each epoch."""
    return make


KINDS: dict[str, Factory] = {
    "function": lambda: batches,
    "function of numbers beside it": factory_with_module,
    "method": lambda: Owner().data,
    "partial": lambda: functools.partial(batches),
    "list": lambda: [pair(number) for number in range(LENGTH)],
    "map-style": Mapped,
    "iterable dataset": lambda: DataLoader(Streamed(), batch_size=None),
    "loader": shuffled,
    "batch sampler": lambda: DataLoader(
        Mapped(SAMPLES),
        batch_sampler=BatchSampler(RandomSampler(range(SAMPLES), generator=seeded()), BATCH, False),
        collate_fn=together,
    ),
    "loader with a generator": lambda: shuffled(generator=seeded()),
    "one-shot": OneShot,
    "state": Stateful,
    "state, round": Cyclic,
    "state, late": LateState,
    "state, loader": loader,
    "state, loader that draws again": replaying,
}
for name in ("loader with a generator", "state", "state, late", "state, loader"):
    for how in (reused, new_each_time):
        KINDS[f"{name}, {how.__name__}"] = functools.partial(how, KINDS[name])
