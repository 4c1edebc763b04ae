"""Mini-batches of torchdata's real ``StatefulDataLoader``, where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from pipeworker.worker.data.reader import MicroBatches, Reader
from pipeworker.worker.stage.rng import seed_all
from support.in_process.data_sources import EPOCHS, Factory, Mapped, pair, round_trip

LENGTH = 4


class Plain(Dataset[Any]):
    """A dataset whose items draw nothing: torchdata does not restore draws of its processes."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return torch.full((1, 2), index), torch.zeros(1)


class Resumable(IterableDataset[Any]):
    """An iterable with a state of its own, which counts the items that it makes."""

    made = 0

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        process = get_worker_info()
        first, every = (process.id, process.num_workers) if process else (0, 1)
        while self.at < LENGTH:
            self.at += 1
            if self.at % every == first:
                Resumable.made += 1
                yield (torch.full((1, 2), self.at), torch.zeros(1)) if process else pair(self.at)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def factory(kind: str, workers: int) -> Factory:
    """Return ``data()`` with a loader of torchdata, or skip the test."""
    try:
        torchdata = importlib.import_module("torchdata.stateful_dataloader")
    except ImportError:
        pytest.skip("torchdata is not installed: pip install '.[torchdata]'")
    shared: dict[str, Any] = {"batch_size": None, "num_workers": workers}
    if kind == "iterable":
        return lambda: torchdata.StatefulDataLoader(Resumable(), **shared)
    dataset = Plain() if workers else Mapped(LENGTH)
    return lambda: torchdata.StatefulDataLoader(dataset, shuffle=True, **shared)


def reader(data: Factory) -> Reader:
    """Return a reader as in a new process, which has run the job file under a seed."""
    seed_all(8)
    return Reader(data, microbatches=1, seed=3, epochs=EPOCHS)


def read(found: Reader) -> tuple[int, torch.Tensor] | None:
    """Read a mini-batch; seed the generators after it, as layers do."""
    cut: MicroBatches | None = found.read()
    seed_all(9)
    return None if cut is None else (cut.batch.epoch, cut.inputs[0])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map-style", "iterable"])
def test_a_stateful_loader_resumes_with_equal_bits(kind: str, workers: int) -> None:
    data = factory(kind, workers)
    uncut = reader(data)
    positions, seen = [], []
    while (found := read(uncut)) is not None:
        positions.append(round_trip(uncut.position(prefetched=False)))
        seen.append(found)
    assert [epoch for epoch, _ in seen] == [n // LENGTH for n in range(LENGTH * EPOCHS)]
    for done in (1, LENGTH - 1, LENGTH, LENGTH + 2):
        resumed = reader(data)
        resumed.restore(positions[done - 1])
        for epoch, value in seen[done : done + LENGTH]:
            after = read(resumed)
            assert after is not None
            assert after[0] == epoch
            assert torch.equal(after[1], value)


def test_an_iterable_with_a_state_is_not_read_again() -> None:
    data = factory("iterable", 0)
    uncut = reader(data)
    for _ in range(LENGTH - 1):
        read(uncut)
    position = round_trip(uncut.position(prefetched=False))
    before = Resumable.made
    resumed = reader(data)
    resumed.restore(position)
    assert read(resumed) is not None
    assert Resumable.made == before + 1
