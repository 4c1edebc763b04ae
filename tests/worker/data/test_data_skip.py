"""Mini-batches before a position are not loaded again, and those behind it have the equal bits."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    get_worker_info,
)

from pipeworker.errors import UsageError
from pipeworker.worker.data.reader import Reader
from pipeworker.worker.data.reread import Reread
from pipeworker.worker.stage.rng import seed_all
from support.in_process.data_sources import (
    drawn_from_module,
    factory_with_module,
    pair,
    round_trip,
    together,
)
from support.slow import mostly_slow, slow

SAMPLES, BATCH = 18, 3
LENGTH = SAMPLES // BATCH
loaded = torch.zeros(SAMPLES, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
"""How often each item was loaded, in any process."""


class Items(Dataset[Any]):
    """Items that draw from every generator of the stream, and from one inside of a transform."""

    def __init__(self, draw: Callable[[], float] = lambda: 0) -> None:
        self.transforms = [draw]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        loaded[index] += 1
        return pair(index, self.transforms[0]())


class Plain(Items):
    """Items that draw nothing."""

    def __getitem__(self, index: int) -> Any:
        loaded[index] += 1
        x = torch.tensor([[float(index)]])
        return x, x[:, 0]


class Pairs(Items):
    """A map-style dataset whose items are the mini-batches."""

    def __len__(self) -> int:
        return LENGTH


class Lazy(Sampler[int]):
    """A sampler that draws each number from the stream from which the items draw."""

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(SAMPLES) for _ in range(SAMPLES))


class Chunks(Lazy):
    """A sampler that draws a chunk of numbers at once."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(0, SAMPLES, 4):
            yield from torch.randint(SAMPLES, (4,)).tolist()


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    words = {"batch_size": BATCH, "collate_fn": together, **options}
    return DataLoader(dataset or Items(), **words)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def _enclosed(seed: int) -> Callable[[], float]:
    generator = random.Random(seed)
    return lambda: generator.random()


def beside_it() -> DataLoader[Any]:
    """Return a loader whose items draw from a generator of another module, that of a function."""
    factory_with_module()
    return loader(Items(drawn_from_module))


def with_replacement() -> DataLoader[Any]:
    sampler = RandomSampler(range(SAMPLES), replacement=True, num_samples=40, generator=seeded())
    return loader(sampler=sampler)


def shuffles_first(start: int) -> Iterator[Any]:
    for index in torch.randperm(LENGTH)[start:].tolist():
        x = torch.tensor([[float(index)]])
        loaded[index] += 1
        yield x, x[:, 0]


def draws_forever(start: int) -> Iterator[Any]:
    while True:
        loaded[0] += 1
        yield pair()


def shuffles_when_called(path: str = "", *, start: int) -> Iterator[Any]:
    order = torch.randperm(LENGTH).tolist()
    return (Items()[index] for index in order[start:])


def shuffles_and_draws(start: int) -> Iterator[Any]:
    yield from [Items()[index] for index in torch.randperm(LENGTH).tolist()][start:]


def reads_again(start: int) -> Iterator[Any]:
    for index in torch.randperm(LENGTH)[start:].tolist():
        yield Items()[index]


SKIPPED: dict[str, tuple[Callable[[], Any], int]] = {
    "pairs": (Pairs, 0),
    "in order": (loader, 0),
    "shuffled": (lambda: loader(shuffle=True), 0),
    "a function": (lambda: lambda: loader(shuffle=True), 0),
    "with a generator": (lambda: loader(shuffle=True, generator=seeded()), 0),
    "single items": (lambda: loader(batch_size=None, collate_fn=None, shuffle=True), 0),
    "with replacement": (with_replacement, 0),
    "a generator inside": (lambda: loader(Items(np.random.default_rng(4).random)), 0),
    "a method of a generator": (lambda: loader(Items(random.Random(4).random)), 0),
    "a generator inside of a function": (lambda: loader(Items(_enclosed(5))), 0),
    "a generator beside a function": (beside_it, 0),
    "lazy, without draws": (lambda: loader(Plain(), sampler=Lazy()), 0),
    "chunks, without draws": (lambda: loader(Plain(), sampler=Chunks()), 0),
    "start, shuffled": (lambda: shuffles_first, 1),
    "start, drawn": (lambda: draws_forever, 2),
    "start, shuffled when called": (lambda: shuffles_when_called, 2),
}
"""Data, and the mini-batches that are loaded again to resume at any position."""


def reader(make: Callable[[], Any]) -> Reader:
    seed_all(8)
    return Reader(make(), microbatches=1, seed=3, epochs=None)


def read(reader: Reader, count: int) -> list[Any]:
    seen = []
    for _ in range(count):
        cut = reader.read()
        assert cut is not None
        seen.append((cut.batch.epoch, cut.inputs[0]))
        seed_all(9)
    return seen


def resumed(
    make: Callable[[], Any], *places: tuple[int, bool]
) -> Iterator[tuple[Reader, list[Any]]]:
    """Yield new readers, each resumed at one of the places, and what it must read.

    Args:
        places: numbers of mini-batches, and whether one more is prefetched; in reading order.
    """
    uncut, positions = reader(make), []
    seen: list[Any] = []
    for at, prefetched in places:
        seen += read(uncut, at + prefetched - len(seen))
        positions.append(round_trip(uncut.position(prefetched=prefetched)))
    seen += read(uncut, LENGTH + 1)
    del uncut
    for (at, _), position in zip(places, positions, strict=True):
        loaded.zero_()
        again = reader(make)
        again.measure()  # for a scheduler that asks for the number of steps
        again.restore(position)
        yield again, seen[at:][: LENGTH + 1]


def check(again: Reader, expected: list[Any]) -> None:
    for seen, (epoch, x) in zip(read(again, len(expected)), expected, strict=True):
        assert seen[0] == epoch
        assert torch.equal(seen[1], x)


PLACES = sorted(itertools.product((1, LENGTH, LENGTH + 4), (False, True)), key=sum)


@pytest.mark.parametrize("kind", mostly_slow(SKIPPED, 4))
def test_mini_batches_before_the_position_are_not_loaded(kind: str) -> None:
    make, most = SKIPPED[kind]
    for place, (again, expected) in zip(PLACES, resumed(make, *PLACES), strict=True):
        assert loaded.sum() <= most, place
        position = round_trip(again.position(prefetched=False))
        check(again, expected)
        another = reader(make)  # the position of a resumed reader
        another.restore(position)
        check(another, expected)


@slow
def test_the_processes_of_a_loader_continue_their_random_streams() -> None:
    """Up to one mini-batch less than there are processes is loaded again."""

    def make() -> Any:
        return loader(shuffle=True, num_workers=2, prefetch_factor=1)

    [(again, expected)] = resumed(make, (LENGTH + 3, True))
    check(again, expected[:1])
    del again
    assert loaded.sum() <= (1 + 1 + 2) * BATCH
    [(again, expected)] = resumed(make, (LENGTH + 4, False))
    position = round_trip(again.position(prefetched=False))
    check(again, expected)
    another = reader(make)
    another.restore(position)
    check(another, expected[:2])


class Normal(Plain):
    """Items whose noise is one of a pair of numbers that a generator makes at once."""

    scale = 0.0

    def __getitem__(self, index: int) -> Any:
        x, _ = super().__getitem__(index)
        x += self.scale * (random.gauss(0, 1) + np.random.standard_normal())
        return x, x[:, 0]


def _scale(_: int) -> None:
    info: Any = get_worker_info()
    info.dataset.scale = 0.1


def test_a_process_calls_its_function_and_continues_with_the_second_of_a_pair() -> None:
    def make() -> Any:
        return loader(Normal(), num_workers=1, worker_init_fn=_scale)

    [(again, expected)] = resumed(make, (3, False))
    assert not torch.equal(expected[0][1], expected[0][1].round())
    check(again, expected[:1])


def test_a_loader_is_measured_without_its_processes() -> None:
    measured = reader(lambda: loader(num_workers=1))
    assert measured.measure() == LENGTH
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("at", [pytest.param(0, marks=slow), LENGTH + 2])
def test_processes_that_persist_continue_their_streams_and_order(at: int) -> None:
    """The position is in the second epoch, and the run is resumed twice."""

    def make() -> Any:
        return loader(shuffle=True, num_workers=2, prefetch_factor=1, persistent_workers=True)

    [(again, expected)] = resumed(make, (LENGTH + at, True))
    check(again, expected[:5])
    position = round_trip(again.position(prefetched=True))
    assert position["reset"]
    del again
    another = reader(make)
    another.restore(position)
    check(another, expected[4:])


@pytest.mark.parametrize("at", [pytest.param(1, marks=slow), LENGTH + 2])
def test_processes_that_persist_are_replaced_on_resume(at: int) -> None:
    """A new worker reads the first mini-batch of a loader of the job file before it resumes."""

    def make() -> Any:
        return loader(shuffle=True, num_workers=1, persistent_workers=True)

    uncut = reader(make)
    read(uncut, at)
    position = round_trip(uncut.position(prefetched=False))
    expected = read(uncut, 3)
    again = reader(make)
    again.peek()
    again.restore(position)
    check(again, expected)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (pair(index) for index in range(SAMPLES))


@pytest.mark.parametrize("peeks", [pytest.param(False, marks=slow), True])
def test_an_epoch_of_a_stream_does_not_continue_the_processes_of_another(peeks: bool) -> None:
    def make() -> Any:
        return loader(Stream(), num_workers=1, persistent_workers=True)

    uncut = reader(make)
    read(uncut, LENGTH + 2)
    position = round_trip(uncut.position(prefetched=False))
    expected = read(uncut, 3)
    again = reader(make)
    if peeks:
        again.peek()
    again.restore(position)
    check(again, expected)


AGAIN: dict[str, Callable[[], Any]] = {
    "a sampler and items draw alternately": lambda: loader(sampler=Lazy()),
    "a sampler draws again while items draw": lambda: loader(sampler=Chunks()),
    "start, drawn and shuffled in the iteration": lambda: reads_again,
    "another generator in a process": lambda: loader(Items(_enclosed(4)), num_workers=1),
    "start, a loader with processes": lambda: lambda start: loader(num_workers=1),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=slow if "another" in kind else ()) for kind in AGAIN]
)
def test_what_may_have_other_bits_is_read_again(kind: str) -> None:
    [(again, expected)] = resumed(AGAIN[kind], (LENGTH + 4, True))
    check(again, expected[:3])
    assert loaded.sum() >= 4


def test_a_sampler_with_fewer_mini_batches_is_rejected() -> None:
    uncut = reader(loader)
    read(uncut, 4)
    position = uncut.position(prefetched=False) | {"read": 9}
    with pytest.raises(UsageError, match="gave 6 mini-batches in epoch 0, fewer than"):
        reader(loader).restore(position)


def test_states_of_other_processes_are_not_restored() -> None:
    [(again, _)] = resumed(lambda: loader(num_workers=1), (4, True))
    position = again.position(prefetched=False)
    position["processes"][0, -12:] = 255
    with pytest.raises(UsageError, match="the position in the data: a loader's process rejects"):
        reader(lambda: loader(num_workers=1)).restore(position)


def test_another_parameter_of_data_is_not_start() -> None:
    def data(count: int = 2) -> Any:
        return [pair() for _ in range(count)]

    assert len(read(reader(lambda: data), 2)) == 2


def test_reading_again_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 1.0, 2.5, 6.0, 8.0, 9.0])
    progress = Reread("data()", 5, now=lambda: next(clock))
    for done in range(1, 6):
        progress.show(done)
    shown = capsys.readouterr().err
    assert shown == (
        "\rreading data again 2/5\rreading data again 4/5\rdata(): 5 mini-batches were read again "
        "in 9 s; a map-style DataLoader, or data(start), skips them\n"
    )


def test_reading_again_that_takes_long_only_at_its_end_is_one_whole_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = iter([0.0, 1.0, 2.0])
    progress = Reread("data()", 2, now=lambda: next(clock))
    for done in (1, 2):
        progress.show(done)
    assert capsys.readouterr().err == (
        "\rdata(): 2 mini-batches were read again in 2 s; a map-style DataLoader, or data(start), "
        "skips them\n"
    )
