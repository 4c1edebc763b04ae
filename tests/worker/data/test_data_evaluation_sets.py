"""Evaluation data of one source, or of several by name."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from pipeworker.errors import UsageError
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.data.evaluation_sets import read_sets
from pipeworker.worker.data.reader import Reader

SHARED = torch.Generator().manual_seed(3)
"""Of the user's own."""
PAIR = torch.ones(1), torch.ones(1)


def draws(count: int) -> Iterator[Any]:
    for _ in range(count):
        x = torch.randn(2, 1) + torch.randn(2, 1, generator=SHARED)
        yield x, x


def one() -> Iterator[Any]:
    return draws(2)


def three() -> Iterator[Any]:
    return draws(3)


def from_start(start: int) -> Iterator[Any]:
    return iter([(torch.full((1,), float(n)), torch.ones(1)) for n in range(start, 3)])


def both() -> dict[str, Any]:
    return {"val": draws(2), "test": three}


def read(evaluation: Any) -> list[tuple[str, torch.Tensor]]:
    reader = partial(Reader, microbatches=1, seed=5, epochs=1)
    return [(batches.name, batches.inputs[0]) for batches in read_sets(evaluation, reader)]


def test_each_set_is_read_as_if_it_were_the_only_one() -> None:
    state = SHARED.get_state()
    alone = read(one)
    assert torch.equal(SHARED.get_state(), state)
    for evaluation in (both, both, {"val": one, "test": three}):
        found = read(evaluation)
        assert [name for name, _ in found] == ["val", "val", "test", "test", "test"]
        for (_, value), (_, expected) in zip(found, alone, strict=False):
            assert torch.equal(value, expected)
        assert torch.equal(SHARED.get_state(), state)
    assert [name for name, _ in alone] == ["", ""]


class Noise(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1) + index, torch.ones(1)


def test_a_pass_with_processes_that_persist_is_like_the_one_before() -> None:
    options: dict[str, Any] = {"shuffle": True, "num_workers": 1, "persistent_workers": True}
    loader = torch.utils.data.DataLoader(Noise(), 2, **options)
    first, second = read(loader), read(lambda: loader)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))


def test_a_pass_over_the_loader_of_the_data_leaves_its_epoch_and_processes() -> None:
    """A loader whose processes persist has one iteration, which a second one would start again."""
    lengths = {1: 2, 3: 4, 4: 2, 6: 4, 8: 4}  # of the passes; half of the data, or all

    def epochs(evaluate: bool) -> list[torch.Tensor]:
        options: dict[str, Any] = {"shuffle": True, "num_workers": 2, "persistent_workers": True}
        loader = torch.utils.data.DataLoader(Noise(), 1, **options)
        data, found = Reader(loader, microbatches=1, seed=5, epochs=2), []
        while (batches := data.read()) is not None:
            found += batches.inputs
            if evaluate and len(found) in lengths:
                evaluation = read_sets(
                    lambda: loader, partial(Reader, microbatches=1, seed=5, epochs=1)
                )
                seen = [one.inputs[0] for one in itertools.islice(evaluation, lengths[len(found)])]
                evaluation.close()
                passes.append(torch.cat(seen))
                assert len(multiprocessing.active_children()) == 2  # those of the training
        return found

    passes: list[torch.Tensor] = []
    for with_passes, alone in zip(epochs(True), epochs(False), strict=True):
        assert torch.equal(with_passes, alone)
    assert [*map(len, passes)] == [*lengths.values()]
    assert all(torch.equal(one, passes[1][: len(one)]) for one in passes)


@pytest.mark.parametrize("evaluation", [one, both, {"val": one, "test": three}])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_pass_that_ends_early_leaves_the_users_generators_as_they_were(
    evaluation: Any, count: int
) -> None:
    state = SHARED.get_state()
    batches = read_sets(evaluation, partial(Reader, microbatches=1, seed=5, epochs=1))
    list(itertools.islice(batches, count))
    batches.close()
    assert torch.equal(SHARED.get_state(), state)


def test_data_that_cannot_be_read_is_the_error() -> None:
    def evaluation() -> Any:
        raise LookupError("no data")

    for sets in (evaluation, {"val": evaluation}):
        with pytest.raises(UserCodeError, match="no data"):
            read(sets)


@pytest.mark.parametrize(
    "evaluation", [from_start, {"val": from_start}, lambda: {"val": from_start}]
)
def test_a_pass_over_what_takes_a_start_is_whole(evaluation: Any) -> None:
    assert [float(value) for _, value in read(evaluation)] == [0, 1, 2]


def test_a_set_with_a_length_has_it() -> None:
    reader = partial(Reader, microbatches=1, seed=5, epochs=1)
    for sets, lengths in (
        ([PAIR, PAIR], [2, 2]),
        (one, [0, 0]),
        (lambda: {"val": [PAIR], "test": [PAIR, PAIR]}, [1, 2, 2]),
    ):
        assert [found.length for found in read_sets(sets, reader)] == lengths


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({}, r"evaluation\(\): gave an empty dict; put at least one set"),
        ({3: []}, r"evaluation\(\): gave a dict with an int as a name; name each set, as 'val'"),
        ({"": []}, r"gave a dict with an empty text as a name"),
        ({"val": []}, r"evaluation\(\)\['val'\]: is empty; yield at least one"),
        ({"val": [PAIR], "a:b": []}, r"evaluation\(\)\['a:b'\]: is empty"),
        ({"val": [3]}, r"evaluation\(\)\['val'\]: gave an int; make it a pair"),
    ],
)
def test_mistakes_name_the_set(sets: Any, message: str) -> None:
    for evaluation in (sets, lambda: sets):
        with pytest.raises(UsageError, match=message):
            read(evaluation)
