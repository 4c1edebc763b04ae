"""Reading positions, and a new reader that resumes at one with the equal bits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from pipeworker.errors import UsageError
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.data.reader import Reader
from pipeworker.worker.stage.rng import seed_all
from support.in_process.data_sources import (
    EPOCHS,
    KINDS,
    LENGTH,
    Factory,
    LateState,
    Mapped,
    OneShot,
    Stateful,
    batches,
    round_trip,
    shuffled,
)
from support.slow import mostly_slow, slow

Seen = list[tuple[int, torch.Tensor]]


def reader(make: Factory, *, repeat: bool = True) -> Reader:
    """Return a reader as in a new process, which has run the job file under a seed."""
    seed_all(8)
    return Reader(make(), microbatches=1, seed=3, epochs=None if repeat else 1)


def read(read: Reader, count: int) -> Seen:
    """Read `count` mini-batches; seed the generators after each, as layers do."""
    seen = []
    for _ in range(count):
        cut = read.read()
        assert cut is not None
        seed_all(9)
        seen.append((cut.batch.epoch, cut.inputs[0]))
    return seen


def equal(seen: Seen, expected: Seen) -> bool:
    return len(seen) == len(expected) and all(
        epoch == other and torch.equal(x, y)
        for (epoch, x), (other, y) in zip(seen, expected, strict=True)
    )


@pytest.mark.parametrize("kind", mostly_slow(KINDS, 6))
def test_a_reader_resumed_anywhere_reads_the_same(kind: str) -> None:
    make = KINDS[kind]
    uncut = reader(make)
    positions, seen = [(0, round_trip(uncut.position(prefetched=False)))], []
    for number in range(LENGTH * EPOCHS):
        seen += read(uncut, 1)
        positions.append((number, round_trip(uncut.position(prefetched=True))))
        positions.append((number + 1, round_trip(uncut.position(prefetched=False))))
    assert seen[0][0] == 0
    assert seen[-1][0] == (0 if kind == "one-shot" else EPOCHS - 1)
    for (number, position), surveyed in itertools.product(positions, (False, True)):
        resumed = reader(make)
        if surveyed:
            resumed.peek()
        resumed.restore(position)
        after = seen[number:][: LENGTH + 1]  # from one epoch into the next
        assert equal(read(resumed, len(after)), after), (number, position)


@pytest.mark.parametrize("kind", mostly_slow([kind for kind in KINDS if kind != "one-shot"], 3))
def test_the_end_stays_the_end_and_more_epochs_resume_after_it(kind: str) -> None:
    make = KINDS[kind]
    expected = read(reader(make), 2 * LENGTH)[LENGTH:]
    once = reader(make, repeat=False)
    read(once, LENGTH)
    assert once.read() is None
    position = round_trip(once.position(prefetched=False))
    for _ in range(2):
        ended = reader(make, repeat=False)
        ended.restore(position)
        assert ended.read() is None
        more = reader(make)
        more.restore(position)
        assert equal(read(more, LENGTH), expected)
        position = round_trip(ended.position(prefetched=False))  # of the resumed reader


class Late(Dataset[Any]):
    """Items that draw from a generator, which the first of them makes."""

    def __init__(self) -> None:
        self.generator: random.Random | None = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.generator = self.generator or random.Random(4)
        x = torch.tensor([self.generator.random()])
        return x, x


@pytest.mark.parametrize(
    ("number", "once"),
    [
        pytest.param(number, once, marks=slow if (turn + once) % 2 else ())
        for turn, number in enumerate([1, LENGTH - 1, LENGTH, LENGTH + 1, 2 * LENGTH])
        for once in (False, True)
    ],
)
def test_items_resume_with_a_generator_that_the_first_of_them_makes(
    number: int, once: bool
) -> None:
    def make() -> Any:
        dataset = Late()
        return lambda: DataLoader(dataset if once else Late())

    uncut, resumed = reader(make), reader(make)
    read(uncut, number)
    resumed.restore(round_trip(uncut.position(prefetched=False)))
    assert equal(read(resumed, LENGTH), read(uncut, LENGTH))


class Remade(Sampler[int]):
    """A sampler that makes a generator in each iteration."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(5)
        yield from torch.randperm(LENGTH, generator=self.generator).tolist()


@pytest.mark.parametrize("number", [1, LENGTH + 1])
def test_items_behind_a_sampler_that_makes_its_generator_are_skipped(number: int) -> None:
    def make() -> Any:
        return DataLoader(Mapped(), sampler=Remade())

    uncut, resumed = reader(make), reader(make)
    read(uncut, number)
    position = round_trip(uncut.position(prefetched=False))
    assert "random" in position  # else they are read again
    resumed.restore(position)
    assert equal(read(resumed, LENGTH), read(uncut, LENGTH))


def test_a_one_shot_iterator_stays_exhausted() -> None:
    once = reader(OneShot, repeat=False)
    read(once, LENGTH * EPOCHS)
    assert once.read() is None
    resumed = reader(OneShot, repeat=False)
    resumed.restore(round_trip(once.position(prefetched=False)))
    assert resumed.read() is None


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unseeded_generator_and_loader_processes_resume(workers: int) -> None:
    seeds = itertools.count()

    def make() -> Any:
        generator = torch.Generator().manual_seed(next(seeds))
        return shuffled(generator=generator, num_workers=workers)

    uncut = reader(make)
    seen = read(uncut, 2)
    position = round_trip(uncut.position(prefetched=True))
    resumed = reader(make)
    if workers == 0:
        resumed.peek()
    resumed.restore(position)
    assert equal(read(resumed, 1), seen[-1:])


def test_the_position_before_the_first_read() -> None:
    assert reader(lambda: batches).position(prefetched=False) == {"epoch": 0, "read": 0}
    surveyed = reader(lambda: batches)
    surveyed.peek()
    assert surveyed.position(prefetched=False)["read"] == 0


def test_a_stateful_source_is_not_read_again() -> None:
    uncut = reader(Stateful)
    read(uncut, 2)
    source = Stateful()
    resumed = reader(lambda: source)
    resumed.restore(round_trip(uncut.position(prefetched=True)))
    assert source.read == []
    read(resumed, 2)
    assert source.read == [2, 1]


def test_a_position_does_not_change_later() -> None:
    """A source may change the very dict that it returned or loaded."""
    uncut = reader(Stateful)
    read(uncut, 1)
    position = uncut.position(prefetched=False)
    before = repr(position)
    read(uncut, 1)
    resumed = reader(Stateful)
    resumed.restore(position)
    read(resumed, 2)
    assert repr(position) == before


def position_of(kind: str) -> dict[str, Any]:
    uncut = reader(KINDS[kind])
    read(uncut, 2)
    found: dict[str, Any] = round_trip(uncut.position(prefetched=False))
    return found


def test_data_with_fewer_mini_batches_than_were_read_is_rejected() -> None:
    resumed = reader(lambda: batches)
    with pytest.raises(UsageError, match=r"data\(\): gave 2 mini-batches in epoch 7, fewer than"):
        resumed.restore({"epoch": 7, "read": 4})


def test_a_state_for_stateless_data_is_rejected() -> None:
    with pytest.raises(
        UsageError, match=r"data\(\): gave a generator, which has no load_state_dict"
    ):
        reader(lambda: batches).restore(position_of("state"))


def test_a_state_that_the_source_rejects_is_a_user_code_error() -> None:
    position = position_of("state")
    position["source"] = {"other": 1}
    with pytest.raises(UserCodeError, match=r"^data\(\) raised KeyError: 'at'$"):
        reader(LateState).restore(position)


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
        ({"source": {}, "over": False, "drawn": {}, "random": ()}, "the stream rejects its state"),
    ],
)
def test_an_invalid_position_is_rejected(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        reader(Stateful).restore({"epoch": 0, "read": 1} | changed)


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
def test_an_invalid_generator_state_is_rejected(name: str, state: Any) -> None:
    """NumPy itself would read past the end of such a state."""
    position = position_of("map-style")
    position["began"][name] = state
    with pytest.raises(UsageError, match=f"{name} rejects its state"):
        reader(Mapped).restore(position)


OTHERS: list[Any] = [
    *(None, True, 3, -1.5, "word", b"", [], [1], (), (1, 2, 3), {}, {"a": 1}, {"state": {}}, KEY),
    *(torch.zeros(3), {"bit_generator": "MT19937", "state": {"key": KEY, "pos": None}}),
    (torch.default_generator.get_state(), (3, (1,), None), None),
    (torch.default_generator.get_state()[1:], random.getstate(), None),
]


@pytest.mark.parametrize("value", OTHERS)
def test_any_value_as_a_position_or_state_is_rejected(value: Any) -> None:
    good = {"epoch": 0, "read": 1}
    state = {"source": {"at": 1}, "over": False, "drawn": {}, "random": value}
    began = {"began": {"data.other": value}}
    for make, position in ((Mapped, value), (LateState, good | state), (Mapped, good | began)):
        with pytest.raises(UsageError, match="the position in the data"):
            reader(make).restore(position)


class Files:
    """A source with a state, whose length is its number of files, not that of its mini-batches."""

    place = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        while self.place < 7:
            self.place += 1
            yield torch.full((2, 1), float(self.place)), torch.zeros(2, 1)
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("read", range(1, 14))
def test_a_source_that_goes_on_behind_its_length_is_not_over(read: int) -> None:
    def reader() -> Reader:
        return Reader(Files(), microbatches=1, seed=0, epochs=2)

    first = reader()
    for _ in range(read + 1):
        first.read()
    second = reader()
    second.restore(first.position(prefetched=True))
    left = [float(found.inputs[0][0]) for found in iter(second.read, None)]
    assert left == [*range(1, 8), *range(1, 8)][read:]
