"""Mini-batches: read under a stream of their own, checked, and split as by torch.tensor_split."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pipeworker.errors import UsageError, a_type
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.data.reader import Reader, sample_shares


def reader(data: Any, *, microbatches: int = 3, seed: int = 0, repeat: bool = True) -> Reader:
    return Reader(data, microbatches=microbatches, seed=seed, epochs=None if repeat else 1)


def pair(samples: int = 4, start: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(start, start + samples)
    return x[:, None], x


def first(read: Reader) -> list[tuple[int, float]]:
    """Return the epoch and the first sample of each of the next five mini-batches."""
    found = []
    for _ in range(5):
        cut = read.read()
        assert cut is not None
        found.append((cut.batch.epoch, cut.targets[0][0].item()))
    return found


def two() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield pair(start=0)
    yield pair(start=10)


class Mapped(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return pair(start=10 * index)


EPOCHS = [(0, 0), (0, 10), (1, 0), (1, 10), (2, 0)]


@pytest.mark.parametrize(
    "data",
    [
        two,
        lambda: list(two()),
        list(two()),
        tuple(two()),
        Mapped(),
        lambda: Mapped(),
        DataLoader(TensorDataset(*map(torch.cat, zip(*two(), strict=True))), batch_size=4),
    ],
    ids=["generator", "function", "list", "tuple", "map-style", "function map-style", "DataLoader"],
)
def test_exhausted_data_starts_a_new_epoch(data: Any) -> None:
    assert first(reader(data)) == EPOCHS


def test_a_mini_batch_that_was_peeked_at_stays_the_next_one() -> None:
    read = reader(two)
    assert read.peek() is read.peek()
    assert first(read) == EPOCHS


def test_one_epoch_of_data_ends_after_it() -> None:
    read = reader(two, repeat=False)
    assert [read.read() is None for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("data", [two, DataLoader(Mapped(), batch_size=None)])
def test_reading_ends_after_the_given_number_of_epochs(data: Any) -> None:
    def reader_of(epochs: int) -> Reader:
        return Reader(data, microbatches=3, seed=0, epochs=epochs)

    read = reader_of(2)
    found = [read.read() for _ in range(6)]
    assert [cut and cut.batch.epoch for cut in found] == [0, 0, 1, 1, None, None]
    ended = read.position(prefetched=False)
    for epochs, more in ((2, [None]), (3, [2, 2, None])):
        read = reader_of(epochs)
        read.restore(ended)
        assert [cut and cut.batch.epoch for cut in (read.read() for _ in more)] == more


def test_a_position_at_the_begin_of_an_epoch_after_the_last_is_the_end() -> None:
    """A run without a limit stopped there; the resumed run has a limit of one epoch."""
    read = reader(two)
    for _ in range(3):
        read.read()
    more = Reader(two, microbatches=3, seed=0, epochs=1)
    more.restore(read.position(prefetched=True))
    assert more.read() is None


def test_length_is_zero_if_the_data_has_none() -> None:
    class BrokenLength(list[Any]):
        def __len__(self) -> int:
            raise OSError("not now")

    lengths = []
    for data in (list(two()), two, DataLoader(Mapped(), batch_size=None), BrokenLength(two())):
        read = reader(data)
        assert read.length == 0
        read.peek()
        lengths.append(read.length)
    assert lengths == [2, 0, 2, 0]


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("data", [list, [], lambda: iter(())])
def test_empty_data_is_rejected(data: Any, repeat: bool) -> None:
    with pytest.raises(UsageError, match=r"data\(\): is empty"):
        reader(data, repeat=repeat).read()


def test_a_generator_object_has_one_epoch() -> None:
    read = reader(two())
    for _ in range(2):
        read.read()
    said = "exhausted, and gave nothing when started again.*make data a function, so that each"
    with pytest.raises(UsageError, match=f"{said} epoch gets a fresh"):
        read.read()
    kept = iter(two())
    read = reader(lambda: kept)
    for _ in range(2):
        read.read()
    with pytest.raises(UsageError, match="have it make a fresh iterator each time it is called"):
        read.read()
    read = reader(two(), repeat=False)
    assert [read.read() is None for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (torch.zeros(2), r"gave a Tensor; make it a pair \(input, target\)"),
        ((torch.zeros(2),) * 3, r"gave a tuple of 3; make it a pair \(input, target\)"),
        (("text", torch.zeros(2)), "an input without a tensor"),
        ((torch.zeros(2),), "gave a tuple of 1"),
        (
            [torch.zeros(2)] * 3,
            r"gave a list of 3; .*, as \(batch\[:-1\], batch\[-1\]\), in a collate_fn",
        ),
        ([torch.zeros(2)], r"gave a list of 1; make it a pair \(input, target\)$"),
        ({"x": torch.zeros(2)}, r"gave a dict of 'x'; .* as \(dict\(batch\), batch\['target'\]\)"),
        (UserDict(x=0, labels=1), r"a UserDict of 'x', 'labels'; .*, batch\['labels'\]\)"),
        ((UserDict(x=torch.zeros(2)), 1), r"gave a UserDict; make it a plain dict, dict\(batch\)"),
        ((np.zeros(2), np.zeros(2)), r"a numpy ndarray; make it a tensor, torch\.from_numpy\(arr"),
        ((torch.zeros(2), {"y": np.zeros(2)}), "gave a numpy ndarray"),
        ((torch.zeros(2), SimpleNamespace(y=torch.zeros(2))), "a SimpleNamespace that holds tens"),
        (None, "gave a NoneType"),
        ((1, torch.zeros(2)), "without a tensor, an int; make it a tensor, or a dict of tensors"),
        ((torch.zeros(2), torch.tensor(1)), "without dims; .*, as a DataLoader makes it"),
        (
            (torch.zeros(2, 2).to_sparse(), torch.zeros(2)),
            "a sparse tensor, which cannot be split; make it dense",
        ),
        (
            (torch.zeros(2), torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])),
            "a nested tensor, which cannot be split; make it dense",
        ),
        ((torch.zeros(2), torch.zeros(3)), r"disagree in dim 0, the batch: \(2,\), \(3,\)"),
        ((torch.zeros(2), ["a", "b"]), "a list of 2 plain values beside tensors of 2 samples"),
        (({"x": torch.zeros(3), "y": [(1, 2, 3)]}, None), "a tuple of 3 plain values beside"),
        (({"a": torch.zeros(2, 1), "b": torch.zeros(1)}, 0), r"\(2, 1\), \(1,\)"),
        (
            (torch.zeros(9, 2), [torch.zeros(n % 3, 4) for n in range(9)]),
            r"batch: \(9, 2\), \(0, 4\), \(1, 4\), \(2, 4\); .* padded to one length",
        ),
        ((torch.zeros(1), [torch.zeros(n) for n in range(2, 20)]), r"\(7,\), \(8,\), …; make it"),
        (
            ((torch.zeros(5, 2), torch.zeros(5, 5)), torch.zeros(2, 5)),
            "transpose a tensor whose batch is another dim, .* as a mask, in forward",
        ),
        ((torch.zeros(0, 3), torch.zeros(0)), "without samples"),
    ],
)
def test_an_invalid_mini_batch_is_rejected(item: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        reader([item]).read()


def test_a_dataset_whose_targets_are_numbers_is_one_of_samples() -> None:
    """A loop may have a number for a target that its loss does not use."""

    class Samples(Mapped):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(1, 8), index

    with pytest.raises(UsageError, match=r"gave a Samples of samples, .*; return DataLoader\("):
        reader(Samples()).read()
    assert reader(DataLoader(Samples(), batch_size=2)).read()
    assert reader([(torch.zeros(1, 8), 0)]).read()


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(((torch.zeros(2), torch.zeros(2)), torch.zeros(2)), id="as many tensors"),
        pytest.param((torch.zeros(2), np.float64(1)), id="a number of NumPy that is a float"),
        pytest.param((torch.zeros(1), ["a"]), id="one sample"),
        pytest.param((torch.zeros(3), ["a", "b"]), id="other samples"),
    ],
)
def test_other_values_beside_tensors_are_accepted(item: Any) -> None:
    assert reader([item]).read()


def test_only_the_first_mini_batch_shows_whether_a_list_has_a_value_for_each_sample() -> None:
    names = ["a", "b"]
    read = reader([(torch.zeros(samples), names) for samples in (3, 2)])
    assert [cut.targets[0] for _ in range(2) if (cut := read.read())] == [names, names]
    alone = reader([(torch.zeros(2), names)], microbatches=1).read()  # nothing is divided
    assert alone is not None
    assert alone.targets == [names]


@pytest.mark.parametrize("source", [3, None, object()])
def test_a_function_that_returns_no_iterable_is_rejected(source: Any) -> None:
    with pytest.raises(UsageError, match=f"gave {a_type(source)}; return an iterable"):
        reader(lambda: source).read()


@pytest.mark.parametrize(
    "batch", [pair(4), [*pair(4)], ({"x": pair(4)[0]}, pair(4)[1]), {"x": pair(4)[0], "n": 1}]
)
def test_a_function_that_returns_one_mini_batch_is_rejected(batch: Any) -> None:
    said = f"gave {a_type(batch)} that has a tensor in it, as one mini-batch; return an iterable"
    with pytest.raises(UsageError, match=said):
        reader(lambda: batch).read()


@given(st.integers(1, 40), st.integers(1, 12))
def test_mini_batches_are_split_as_by_tensor_split(samples: int, microbatches: int) -> None:
    x, y = pair(samples)
    cut = reader([(x, y)], microbatches=microbatches).read()
    assert cut is not None
    count = min(samples, microbatches)
    assert (cut.batch.samples, cut.batch.microbatches) == (samples, count)
    assert all(map(torch.equal, cut.inputs, x.tensor_split(count)))
    assert all(map(torch.equal, cut.targets, y.tensor_split(count)))
    assert len(cut.inputs) == len(cut.targets) == count
    assert sample_shares(samples, count) == [len(piece) / samples for piece in cut.inputs]


def test_nested_tensors_are_split_and_plain_values_go_to_all() -> None:
    x, y = pair(4)
    cut = reader([({"x": x, "more": [y, "text"]}, (y, None))], microbatches=2).read()
    assert cut is not None
    for m, (xm, ym) in enumerate(zip(x.tensor_split(2), y.tensor_split(2), strict=True)):
        assert torch.equal(cut.inputs[m]["x"], xm)
        assert torch.equal(cut.inputs[m]["more"][0], ym)
        assert cut.inputs[m]["more"][1] == "text"
        assert torch.equal(cut.targets[m][0], ym)
        assert cut.targets[m][1] is None


def test_pieces_are_a_copy_with_the_strides_and_alignment_of_the_mini_batch() -> None:
    memory = torch.arange(100.0)
    x = memory[3:27].view(4, 6).t().contiguous().t()
    y = memory[1:5]
    cut = reader([((x, x), y)], microbatches=2).read()
    assert cut is not None
    piece, same = cut.inputs[1]
    assert piece is same
    assert torch.equal(piece, x[2:])
    assert piece.stride() == x.stride()
    assert piece.data_ptr() % 64 == x[2:].data_ptr() % 64
    assert cut.targets[0].data_ptr() % 64 == y.data_ptr() % 64
    memory.zero_()
    piece.add_(1)
    assert cut.inputs[0][0]._version == 0
    assert cut.targets[1].tolist() == [3.0, 4.0]


class _Labelled(torch.Tensor): ...


_WHOLE = torch.arange(24.0).view(6, 4)
_COMPLEX = torch.ones(6, dtype=torch.complex64)
_ARRAY = np.arange(25, dtype=np.float32)


@pytest.mark.parametrize(
    ("item", "lent"),
    [
        pytest.param(((_WHOLE, torch.ones(6)), torch.zeros(6)), (True, True, True), id="sole"),
        pytest.param((_WHOLE, _WHOLE), (False, False), id="one tensor twice"),
        pytest.param((_WHOLE, _WHOLE[:, 0]), (False, False), id="a view of another"),
        pytest.param((_WHOLE[:5], torch.ones(5)), (False, True), id="a part of its storage"),
        pytest.param((torch.ones(4, 6).t(), torch.ones(6)), (False, True), id="transposed"),
        pytest.param(
            (torch.from_numpy(_ARRAY[1:]).view(6, 4), torch.ones(6)), (False, True), id="unaligned"
        ),
        pytest.param(
            tuple(torch.from_numpy(_ARRAY) for _ in "xy"), (False, False), id="one array twice"
        ),
        pytest.param((_COMPLEX.conj(), torch.ones(6)), (False, True), id="conjugated"),
        pytest.param((_COMPLEX.conj().imag, torch.ones(6)), (False, True), id="negated"),
        pytest.param((_Labelled(torch.ones(6)), torch.ones(6)), (False, True), id="subclass"),
    ],
)
def test_what_is_packed_at_once_is_not_copied_if_a_copy_would_be_the_same(
    item: Any, lent: tuple[bool, ...]
) -> None:
    copied, read = (
        Reader([item], microbatches=2, seed=0, epochs=1, lends=(lends, lends)).peek()
        for lends in (False, True)
    )
    for one, other in zip(
        pytree.tree_leaves((copied.inputs, copied.targets)),
        pytree.tree_leaves((read.inputs, read.targets)),
        strict=True,
    ):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.requires_grad == other.requires_grad
    whole = pytree.tree_leaves(item)
    first = pytree.tree_leaves((read.inputs[0], read.targets[0]))
    both = zip(whole, first, strict=True)
    assert tuple(one.data_ptr() == other.data_ptr() for one, other in both) == lent


def test_the_mini_batch_of_a_prediction_is_always_copied() -> None:
    x, y = torch.ones(4, 2), torch.ones(4)
    read = Reader([], microbatches=2, seed=0, epochs=1, lends=(True, True))
    assert read.split((x, y)).inputs[0].data_ptr() == x.data_ptr()
    assert read.split((x, y), whole=True).inputs[0].data_ptr() != x.data_ptr()


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize(
    "x", [torch.arange(21.0).view(7, 3), torch.arange(21.0).view(3, 7).t()], ids=["rows", "columns"]
)
def test_a_replica_has_its_own_pieces_as_they_are_in_a_copy_of_all(
    x: torch.Tensor, lends: bool
) -> None:
    whole = reader([], microbatches=4).split((x, x))
    for replica, own in enumerate((slice(0, 2), slice(2, 4))):
        read = Reader(
            [], microbatches=4, seed=0, epochs=1, lends=(lends, lends), replica=replica, replicas=2
        )
        found = read.split((x, torch.ones(7)))
        assert len(found.inputs) == len(found.targets) == 2
        for piece, expected in zip(found.inputs, whole.inputs[own], strict=True):
            assert torch.equal(piece, expected)
            assert piece.stride() == expected.stride()
            assert piece.data_ptr() % 64 == expected.data_ptr() % 64
        assert len(read.split((x, x), whole=True).inputs) == 4


def test_replicas_compare_the_content_of_a_mini_batch() -> None:
    x, y = pair(4)
    read = Reader([], microbatches=2, seed=0, epochs=1, replicas=2)
    items = [(x, y), (x + 1, y), (x, y.double()), (x, y[:, None]), (x, None), (x, 1), (x, "1")]
    assert len({read.split(item).batch.digest for item in items}) == len(items)
    for item in (*items, (x, (y, object()))):  # an object is shown by its address
        again = (x.clone(), (y, object())) if type(item[1]) is tuple else item
        assert read.split(item).batch.digest == read.split(again).batch.digest


def test_signatures_depend_on_structure_shapes_and_dtypes() -> None:
    x, y = pair(4)
    items = [
        (x, y),
        (x + 1, y),
        (x[:3], y[:3]),
        (x.double(), y),
        ([x], y),
        (x, (y, 1)),
        (x, (y, 2)),
        (x, (y, "1")),
        (x, y),
    ]
    read = reader(items)
    numbers = [cut.batch.signature for _ in items if (cut := read.read())]
    assert numbers == [0, 0, 1, 2, 3, 4, 4, 5, 0]


# The random stream of the data.


def drawn() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(2):
        x = torch.rand(2)
        yield x, x


def numbers(data: Callable[[], Any], *, between: bool = False, seed: int = 0) -> list[float]:
    torch.manual_seed(99)
    read, found = reader(data, seed=seed), []
    for step in range(4):
        cut = read.read()
        assert cut is not None
        found.append(cut.inputs[0][0].item())
        if between:
            torch.manual_seed(step)
            torch.rand(5)
    return found


def test_random_draws_of_layers_do_not_change_the_data() -> None:
    assert numbers(drawn) == numbers(drawn, between=True)


def test_every_epoch_and_seed_draws_other_numbers() -> None:
    assert len(set(numbers(drawn) + numbers(drawn, seed=1))) == 8


def test_a_loader_shuffles_by_the_seed() -> None:
    x = torch.arange(8.0)
    loader = DataLoader(TensorDataset(x, x), batch_size=4, shuffle=True)
    assert numbers(lambda: loader) == numbers(lambda: loader, between=True)
    assert numbers(lambda: loader) != numbers(lambda: loader, seed=1)


def test_an_exception_in_data_is_a_user_code_error() -> None:
    def broken() -> Iterator[Any]:
        yield pair()
        raise KeyError("column")

    read = reader(broken)
    read.read()
    with pytest.raises(UserCodeError, match=r"^data\(\) raised KeyError: 'column'$") as caught:
        read.read()
    assert isinstance(caught.value.__cause__, KeyError)
