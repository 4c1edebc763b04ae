"""Where reading stood in the data, and a new reader that goes on there with the same bits."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from pipeworker.errors import UsageError
from pipeworker.record.plain import pack, unpack
from pipeworker.worker.blame import Raised
from pipeworker.worker.stage.rng import seed_all
from pipeworker.worker.step.data import Reader

LENGTH = 2
EPOCHS = 3
SAMPLES, BATCH = 7, 4
"""Of a loader; it sees that a sampler is exhausted when it reads the second mini-batch."""

Made = Callable[[], Any]
"""Gives the data as a new process would, that has run the job file."""


def pair(*numbers: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A mini-batch of one sample, with a number of each generator of the stream."""
    drawn = torch.rand(()).item(), random.random(), np.random.rand()
    x = torch.tensor([[*drawn, *numbers]], dtype=torch.float64)
    return x, x[:, 0]


def batches() -> Iterator[Any]:
    for number in range(LENGTH):
        yield pair(number)


ours = np.random.default_rng(3)


class Held(list[Any]):
    pass


def of_the_module() -> Held:
    """Draws from a generator beside it in the job file."""
    return Held([pair(number, ours.random()) for number in range(LENGTH)])


def with_the_module() -> Made:
    ours.bit_generator.state = np.random.default_rng(3).bit_generator.state
    return of_the_module


class Owner:
    def __init__(self) -> None:
        self.random = random.Random(5)

    def data(self) -> list[Any]:
        return [pair(self.random.random()) for _ in range(LENGTH)]


class Mapped(Dataset[Any]):
    """With generators of its own."""

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


class Keeping:
    """Keeps its state, in a dict and a tensor that go on changing. Loaded at its end, it ends."""

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


class Round(Keeping):
    """Loaded at its end, it gives the next epoch."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[Any]:
        for _ in range(LENGTH - self.state["at"]):
            self.state["at"] = (self.state["at"] + 1) % LENGTH
            self.state["drawn"] += torch.randint(10, ())
            yield pair(self.state["at"], self.state["drawn"].item())


class Late(Keeping):
    """Until an epoch's first mini-batch is read, its state is the end of the last epoch."""

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
    """A sampler that draws as it begins, and says from what."""

    begun: Any = None

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        self.begun = self.generator.get_state()
        return iter(torch.randperm(SAMPLES, generator=self.generator).tolist())


class Loader(DataLoader[Any]):
    """As torchdata's: loaded, it draws again what it drew, or some of it."""

    given = 0
    loaded: Any = None

    def __iter__(self) -> Any:
        indices = iter(self.sampler)
        torch.empty(()).random_(generator=self.generator)
        state, self.loaded = self.loaded or {"given": 0, "begun": None}, None
        if state["begun"] is not None:
            self.generator.set_state(state["begun"])
            indices = iter(self.sampler)
        self.given = state["given"]
        for _ in range(self.given):
            next(indices)
        return self._all(indices)

    def _all(self, indices: Iterator[int]) -> Iterator[Any]:
        while chunk := list(itertools.islice(indices, BATCH)):
            self.given += len(chunk)
            yield together([self.dataset[index] for index in chunk])

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "begun": getattr(self.sampler, "begun", None)}

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


def again(make: Made) -> Made:
    """A function that gives the same object for each epoch."""
    made = make()
    return lambda: made


def anew(make: Made) -> Made:
    """A function that gives another one."""
    return make


KINDS: dict[str, Made] = {
    "function": lambda: batches,
    "function of numbers beside it": with_the_module,
    "method": lambda: Owner().data,
    "partial": lambda: functools.partial(batches),
    "list": lambda: [pair(number) for number in range(LENGTH)],
    "map-style": Mapped,
    "iterable dataset": lambda: DataLoader(Streamed(), batch_size=None),
    "loader": shuffled,
    "loader with a generator": lambda: shuffled(generator=seeded()),
    "batch sampler": lambda: DataLoader(
        Mapped(SAMPLES),
        batch_sampler=BatchSampler(RandomSampler(range(SAMPLES), generator=seeded()), BATCH, False),
        collate_fn=together,
    ),
    "one-shot": OneShot,
    "state": Keeping,
    "state, round": Round,
    "state, late": Late,
    "state, loader": loader,
    "state, loader that draws again": replaying,
}
for name in ("loader with a generator", "state", "state, late", "state, loader"):
    for how in (again, anew):
        KINDS[f"{name}, {how.__name__}"] = functools.partial(how, KINDS[name])

Seen = list[tuple[int, torch.Tensor]]


def reader(make: Made, *, repeat: bool = True) -> Reader:
    """In a new process, that has run the job file under a seed."""
    seed_all(8)
    return Reader(make(), microbatches=1, seed=3, epochs=None if repeat else 1)


def read(read: Reader, count: int) -> Seen:
    """So many mini-batches; after each a layer draws."""
    seen = []
    for _ in range(count):
        cut = read.read()
        assert cut is not None
        seed_all(9)
        seen.append((cut.batch.epoch, cut.inputs[0]))
    return seen


def same(seen: Seen, expected: Seen) -> bool:
    return len(seen) == len(expected) and all(
        epoch == other and torch.equal(x, y)
        for (epoch, x), (other, y) in zip(seen, expected, strict=True)
    )


def kept(position: Any) -> Any:
    """As a checkpoint keeps it."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(pack(position, tensors, "data"))
    return unpack(json.loads(text), {name: value.clone() for name, value in tensors.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_any_cut_is_the_same(kind: str) -> None:
    make = KINDS[kind]
    uncut = reader(make)
    positions, seen = [(0, kept(uncut.position(held=False)))], []
    for number in range(LENGTH * EPOCHS):
        seen += read(uncut, 1)
        positions.append((number, kept(uncut.position(held=True))))
        positions.append((number + 1, kept(uncut.position(held=False))))
    assert seen[0][0] == 0
    assert seen[-1][0] == (0 if kind == "one-shot" else EPOCHS - 1)
    for (number, position), surveyed in itertools.product(positions, (False, True)):
        resumed = reader(make)
        if surveyed:
            resumed.first()
        resumed.restore(position)
        after = seen[number:][: LENGTH + 1]  # from one epoch into the next
        assert same(read(resumed, len(after)), after), (number, position)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "one-shot"])
def test_the_end_is_an_end_and_more_steps_go_on_behind_it(kind: str) -> None:
    make = KINDS[kind]
    expected = read(reader(make), 2 * LENGTH)[LENGTH:]
    once = reader(make, repeat=False)
    read(once, LENGTH)
    assert once.read() is None
    position = kept(once.position(held=False))
    for _ in range(2):
        ended = reader(make, repeat=False)
        ended.restore(position)
        assert ended.read() is None
        more = reader(make)
        more.restore(position)
        assert same(read(more, LENGTH), expected)
        position = kept(ended.position(held=False))  # of the one that was resumed


def test_a_one_shot_iterator_ends() -> None:
    once = reader(OneShot, repeat=False)
    read(once, LENGTH * EPOCHS)
    assert once.read() is None
    again = reader(OneShot, repeat=False)
    again.restore(kept(once.position(held=False)))
    assert again.read() is None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_that_nothing_seeded_and_a_loaders_processes(workers: int) -> None:
    seeds = itertools.count()

    def make() -> Any:
        generator = torch.Generator().manual_seed(next(seeds))
        return shuffled(generator=generator, num_workers=workers)

    uncut = reader(make)
    seen = read(uncut, 2)
    position = kept(uncut.position(held=True))
    resumed = reader(make)
    if workers == 0:
        resumed.first()
    resumed.restore(position)
    assert same(read(resumed, 1), seen[-1:])


def test_where_nothing_was_read() -> None:
    assert reader(lambda: batches).position(held=False) == {"epoch": 0, "read": 0}
    surveyed = reader(lambda: batches)
    surveyed.first()
    assert surveyed.position(held=False)["read"] == 0


def test_a_source_with_a_state_is_not_read_again() -> None:
    uncut = reader(Keeping)
    read(uncut, 2)
    source = Keeping()
    resumed = reader(lambda: source)
    resumed.restore(kept(uncut.position(held=True)))
    assert source.read == []
    read(resumed, 2)
    assert source.read == [2, 1]


def test_a_position_stays_as_it_was() -> None:
    """A source may go on with the very dict it gave, or was given."""
    uncut = reader(Keeping)
    read(uncut, 1)
    position = uncut.position(held=False)
    before = repr(position)
    read(uncut, 1)
    resumed = reader(Keeping)
    resumed.restore(position)
    read(resumed, 2)
    assert repr(position) == before


def position_of(kind: str) -> dict[str, Any]:
    uncut = reader(KINDS[kind])
    read(uncut, 2)
    found: dict[str, Any] = kept(uncut.position(held=False))
    return found


def test_data_that_gives_fewer_mini_batches_than_were_read() -> None:
    resumed = reader(lambda: batches)
    with pytest.raises(UsageError, match=r"data\(\) gave 2 mini-batches in epoch 7, fewer than"):
        resumed.restore({"epoch": 7, "read": 4})


def test_a_state_for_data_that_keeps_none() -> None:
    with pytest.raises(
        UsageError, match=r"data\(\) gave a generator, which has no load_state_dict"
    ):
        reader(lambda: batches).restore(position_of("state"))


def test_what_is_wrong_with_a_state_is_the_users() -> None:
    position = position_of("state")
    position["source"] = {"other": 1}
    with pytest.raises(Raised, match=r"^data\(\) raised KeyError: 'at'$"):
        reader(Late).restore(position)


LEGACY = {"bit_generator": "MT19937", "has_gauss": 0, "gauss": 0.0}
KEY = np.zeros(624, dtype=np.uint32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epoch": -1}, "epoch is -1"),
        ({"epoch": True}, "epoch is True"),
        ({"epoch": 2**63}, "epoch is 9223372036854775808"),
        ({"read": 1.0}, "read is 1.0"),
        ({"read": None}, "read is None"),
        ({"began": [1]}, r"'began' is \[1\]"),
        ({"more": 1}, "'more' is 1"),
        ({"source": {}}, "it has not all of drawn, over, random, source"),
        ({"source": {}, "over": 1, "drawn": {}, "random": ()}, "'over' is 1"),
        ({"source": {}, "over": False, "drawn": {}, "random": ()}, "the stream cannot draw on"),
    ],
)
def test_what_is_no_position(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        reader(Keeping).restore({"epoch": 0, "read": 1} | changed)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("data.legacy", None),
        ("data.legacy", LEGACY | {"state": {"key": KEY, "pos": 625}}),
        ("data.legacy", LEGACY | {"state": {"key": KEY, "pos": -1}}),
        ("data.legacy", LEGACY | {"state": {"key": KEY[1:], "pos": 1}}),
        ("data.other", {"bit_generator": "MT19937", "state": {"key": KEY, "pos": 10**9}}),
        ("data.other", {"bit_generator": "MT19937", "state": 3}),
    ],
)
def test_what_is_no_state_of_a_generator(name: str, state: Any) -> None:
    """NumPy itself would read beyond a state's words."""
    position = position_of("map-style")
    position["began"][name] = state
    with pytest.raises(UsageError, match=f"{name} cannot draw on"):
        reader(Mapped).restore(position)


OTHERS: list[Any] = [
    *(None, True, 3, -1.5, "word", b"", [], [1], (), (1, 2, 3), {}, {"a": 1}, {"state": {}}, KEY),
    *(torch.zeros(3), {"bit_generator": "MT19937", "state": {"key": KEY, "pos": None}}),
    (torch.default_generator.get_state(), (3, (1,), None), None),
    (torch.default_generator.get_state()[1:], random.getstate(), None),
]


@pytest.mark.parametrize("value", OTHERS)
def test_any_value_in_a_positions_place(value: Any) -> None:
    good = {"epoch": 0, "read": 1}
    state = {"source": {"at": 1}, "over": False, "drawn": {}, "random": value}
    began = {"began": {"data.other": value}}
    for make, position in ((Mapped, value), (Late, good | state), (Mapped, good | began)):
        with pytest.raises(UsageError, match="the position in the data"):
            reader(make).restore(position)
