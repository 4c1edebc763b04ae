"""Signatures of nested values as plain data, and the values that are made up from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack
import pytest
import torch

from pipeworker.errors import PipeworkerError, ProtocolError
from pipeworker.worker.profile.signature import TensorSignature, ValueSignature, input_ranges
from pipeworker.worker.transport.structure import NO_TYPES, TypeRegistry

CPU = torch.device("cpu")


class Both(NamedTuple):
    x: torch.Tensor
    number: int


TYPES = TypeRegistry([Both])


def made(value: Any, known: list[torch.Tensor] | None = None, seen: Any = ()) -> Any:
    """Return a value made of the signature of `value`, packed and unpacked."""
    inputs = input_ranges(seen, seen)
    packed = ValueSignature.of(value, TYPES, inputs).pack()
    return ValueSignature.unpack(packed).make(TYPES, CPU, known or ())


def test_structure_shapes_and_strides_are_kept() -> None:
    x = torch.randn(6, 4, dtype=torch.float64).t()
    value = {"a": [x, (torch.zeros(2, 0), None)], "b": Both(x, 3), 5: "text", "c": True}
    found = made(value)
    assert list(found) == list(value)
    assert found["b"].number == 3
    assert type(found["b"]) is Both
    assert found["a"][0] is found["b"].x  # one tensor in two places
    assert (found["a"][0].shape, found["a"][0].stride()) == (x.shape, x.stride())
    assert found["a"][0].dtype == torch.float64
    assert found["a"][1][0].shape == (2, 0)
    assert (found[5], found["c"]) == ("text", True)


def test_floats_are_small_random_numbers_and_leave_the_generators_alone() -> None:
    state = torch.get_rng_state()
    one, other = made(torch.empty(400, 400)), made(torch.empty(400, 400))
    assert torch.equal(one, other)
    assert 0.9 < one.std() < 1.1
    assert not one.requires_grad
    assert made(torch.empty(8, dtype=torch.complex64)).abs().min() > 0
    assert torch.equal(state, torch.get_rng_state())


def test_integers_of_the_networks_input_keep_their_range() -> None:
    ids, mask = torch.tensor([[3, 9], [5, 4]] * 50), torch.ones(2, dtype=torch.bool)
    found, ones, others = made((ids, mask, torch.tensor([7])), seen=[ids, mask])
    assert found.unique().tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert ones.all()
    assert others.tolist() == [0]
    exact, _, _ = made((ids, mask, torch.tensor([7])), [ids, mask], [ids, mask])
    assert torch.equal(exact, ids)
    assert made(ids, [ids[:1]], [ids]).shape == ids.shape


def test_a_part_of_an_input_is_not_taken_for_the_whole() -> None:
    ids = torch.tensor([[3, 9], [5, 4]])
    signature = ValueSignature.of((ids[:1], ids), NO_TYPES, input_ranges([ids], [ids]))
    assert [tensor.source for tensor in signature.tensors] == [-1, 0]


def test_an_input_without_a_least_element_has_no_range() -> None:
    for x in (torch.ones(0, dtype=torch.long), torch.ones(2) * torch.nan, torch.ones(2) * 1j):
        assert [*input_ranges([x], [x]).values()] == [(0, 0, 0)]


def test_gradients_that_are_wanted_are_described() -> None:
    value = [torch.zeros(2, requires_grad=True), torch.zeros(3)]
    assert ValueSignature.of(value, NO_TYPES, {}).wants_grad == (True, False)


def test_a_value_that_cannot_be_described_is_rejected() -> None:
    for value in (object(), ["\ud800"], Both(torch.zeros(1), 2)):
        with pytest.raises(PipeworkerError):
            ValueSignature.of(value, NO_TYPES, {}).pack()


def test_bytes_that_are_no_signature_are_rejected() -> None:
    good = msgpack.unpackb(ValueSignature.of([torch.zeros(2)], NO_TYPES, {}).pack())
    assert ValueSignature.unpack(msgpack.packb(good)).make(NO_TYPES, CPU)[0].tolist() != [0, 0]
    for at, wrong in ((0, 7), (0, [99, None, 0]), (1, [3]), (1, []), (2, []), (2, [[1]])):
        bad = list(good)
        bad[at] = wrong
        with pytest.raises(PipeworkerError):
            ValueSignature.unpack(msgpack.packb(bad)).make(NO_TYPES, CPU)
    with pytest.raises(ProtocolError):
        ValueSignature.unpack(b"\xff")
    for wrong_tensor in (
        TensorSignature((2,), (1,), "float33"),
        TensorSignature((-2,), (1,), "float32"),
        TensorSignature((1 << 50,), (1,), "float32"),
    ):
        with pytest.raises(ProtocolError):
            wrong_tensor.make(CPU)
