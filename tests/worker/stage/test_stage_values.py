"""Nested values: the tensors in them, and how they are shown."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from pipeworker.worker.stage.values import (
    checksums,
    describe,
    distinct_tensors,
    map_tensors,
    replace_tensors,
    versions,
)
from pipeworker.worker.transport.layout import aligned_copy

Pair = namedtuple("Pair", "left right")
x, y = torch.zeros(4, 8), torch.ones(3)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (x, "Tensor[4, 8] float32"),
        ((x, None), "(Tensor[4, 8], None) float32"),
        ((x,), "(Tensor[4, 8],) float32"),
        ([x, (y, 2, 0.5, True)], "[Tensor[4, 8], (Tensor[3], 2, 0.5, True)] float32"),
        (
            {"a": x, "b": (x, torch.tensor(True), 3)},
            "{'a': Tensor[4, 8] float32, 'b': (Tensor[4, 8] float32, Tensor[] bool, 3)}",
        ),
        (Pair(x, "text"), "Pair(left=Tensor[4, 8], right=str) float32"),
        ({}, "{}"),
        ((), "()"),
        (3, "3"),
        (None, "None"),
        (object(), "object"),
    ],
)
def test_describe(value: Any, shown: str) -> None:
    assert describe(value) == shown


def test_a_long_container_is_shown_in_part() -> None:
    assert describe([x] * 20) == f"[{', '.join(['Tensor[4, 8]'] * 16)}, ... 4 more] float32"
    assert describe(dict.fromkeys(range(17), 1)).endswith("15: 1, ... 1 more}")


def test_distinct_tensors_come_once_and_in_order() -> None:
    found = distinct_tensors({"a": [y, x], "b": (y, 1, None)})
    assert [id(t) for t in found] == [id(y), id(x)]
    assert distinct_tensors(x)[0] is x
    assert distinct_tensors(3) == []


def test_one_tensor_at_two_places_stays_one() -> None:
    leaf = torch.ones(2, requires_grad=True)
    value = [leaf * 1, x]
    value.append(value[0])
    for change in (aligned_copy, torch.Tensor.detach):
        made = map_tensors(change, value)
        assert not made[0].requires_grad
        assert made[0] is made[2]
        assert made[0] is not value[0]
        assert torch.equal(made[0], value[0])
    detached, copied = (map_tensors(f, value)[0] for f in (torch.Tensor.detach, aligned_copy))
    assert detached.data_ptr() == value[0].data_ptr() != copied.data_ptr()
    assert map_tensors(torch.Tensor.detach, x) is not x
    assert replace_tensors(value, {id(x): y})[1] is y
    assert replace_tensors(x, {}) is x
    shape = replace_tensors([x, (x.shape, 1)], {id(x): y})[1][0]
    assert type(shape) is torch.Size
    assert shape == x.shape


def test_changes_in_place_are_seen() -> None:
    value = (torch.ones(2), [torch.ones(2)])
    before = versions(value)
    value[1][0].add_(1)
    assert [now - old for now, old in zip(versions(value), before, strict=True)] == [0, 1]


def test_checksums_tell_tensors_apart_and_leave_nested_ones_out() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    sparse = torch.eye(2).to_sparse()
    found = checksums((x, y, [nested, sparse]))
    assert found == (*checksums(x), *checksums(y), *checksums(sparse))
    assert checksums(x) != checksums(x + 1)
    assert len({checksums(sparse), checksums(2 * sparse), checksums(sparse.t())}) == 2


def test_a_checksum_of_one_element_with_a_stride() -> None:
    one = torch.arange(6.0).reshape(2, 3)[:1, 0]
    assert one.stride() == (3,)
    assert checksums(one) == checksums(one.clone(memory_format=torch.contiguous_format))


def test_a_checksum_does_not_depend_on_where_a_tensor_is_in_memory() -> None:
    for dtype in (torch.float32, torch.bool, torch.complex64):
        whole = torch.arange(41).to(dtype)
        assert checksums(whole[1:]) == checksums(whole[1:].clone())
        assert checksums(whole[1:]) != checksums(whole[:-1]) or dtype is torch.bool
    assert checksums(torch.zeros(0)) == (0,)


@pytest.mark.parametrize("count", [2, 3, 40, 40_000])
def test_checksums_tell_elements_apart_that_change_places(count: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.uint8):
        table = (torch.arange(3.0 * count) % 251).view(count, 3).to(dtype)
        for other in (table.flip(0), table.roll(1, 0), table.flip(1)):
            assert checksums(table) != checksums(other)


def test_checksums_tell_rows_of_a_large_tensor_apart_that_change_places() -> None:
    table = torch.randn(3, 1 << 13, dtype=torch.float64)
    assert checksums(table) != checksums(table.flip(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [16, 20_000])
def test_checksums_tell_signs_apart_that_cancel_out(dtype: torch.dtype, count: int) -> None:
    signs = torch.ones(count, dtype=dtype)
    signs[[1, 3]] = -1
    assert checksums(signs) != checksums(torch.ones(count, dtype=dtype))
    assert checksums(signs) != checksums(signs.roll(4))
