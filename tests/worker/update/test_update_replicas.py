"""Gradients as flat vectors, and the replica that updates each weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeworker.plan import partition
from pipeworker.worker.update.replicas import Gradients, Weights, shards

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)


def parameters(*shapes: tuple[int, ...]) -> list[tuple[str, nn.Parameter]]:
    made = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    return [(str(number), parameter) for number, parameter in enumerate(made)]


@given(shapes=SHAPES, count=st.integers(1, 5), piece=st.integers(1, 9))
def test_every_element_has_one_owner(shapes: list[tuple[int, ...]], count: int, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "PIECE_ELEMENTS", piece)
        patch.setattr(partition, "MAX_PIECES", 3)
        found = Gradients(parameters(*shapes), count)
    seen = [index for part in found.parts for p in part for index in range(p.start, p.stop)]
    assert seen == list(range(sum(torch.Size(shape).numel() for shape in shapes)))
    assert all(len(part) <= 3 for part in found.parts)


@given(shapes=SHAPES, count=st.integers(2, 4), data=st.data())
def test_sums_are_those_of_what_is_there(
    shapes: list[tuple[int, ...]], count: int, data: st.DataObject
) -> None:
    """Each replica adds up its part; together they are what adding in order gives."""
    named = [parameters(*shapes) for _ in range(count)]
    want: list[torch.Tensor | None] = [None] * len(shapes)
    for replica in named:
        for index, (_, parameter) in enumerate(replica):
            if data.draw(st.booleans()):
                parameter.grad = gradient = torch.randn(parameter.shape)
                before = want[index]
                want[index] = gradient.clone() if before is None else before + gradient
    all_of = [Gradients(replica, count) for replica in named]
    there = [one.begin() for one in all_of]
    for one in all_of:
        one.make([any(some) for some in zip(*there, strict=True)])
    for owner, own in enumerate(all_of):
        for piece in own.parts[owner]:
            total = own.add(piece, [one.read(piece) for one in all_of], there)
            for other in all_of:
                other.write(piece, total)
    for one in all_of:
        one.end()
        for parameter, wanted in zip(one.parameters, want, strict=True):
            if wanted is None:
                assert parameter.grad is None
            else:
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, wanted)


def test_a_gradient_that_is_a_conjugate_view_is_added_up() -> None:
    """As autograd gives it to a filter that is multiplied by its conjugate."""
    made = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    made.grad = torch.tensor([1 + 2j, 3 - 4j]).conj()
    found = Gradients([("0", made)], 2)
    assert found.begin() == [True]
    found.make([True])
    own = [found.read(piece) for part in found.parts for piece in part]
    assert torch.cat([run for runs in own for run in runs]).tolist() == [1, -2, 3, 4]
    assert torch.equal(made.grad, torch.tensor([1 - 2j, 3 + 4j]))


def test_a_weight_that_is_a_conjugate_view_is_sent_and_received() -> None:
    one, other = (nn.Parameter(torch.ones(2, dtype=torch.complex64)) for _ in range(2))
    one.data = torch.tensor([1 + 2j, 3 - 4j]).conj()
    sent, received = Weights([one]), Weights([other])
    for piece in sent.parts[0]:
        received.write(piece, sent.read(piece))
    received.end()
    assert one.tolist() == other.tolist() == [1 - 2j, 3 + 4j]


@given(sizes=st.lists(st.integers(1, 50), max_size=12), count=st.integers(1, 5))
def test_every_weight_is_updated_by_one_replica(sizes: list[int], count: int) -> None:
    some = [nn.Parameter(torch.zeros(size)) for size in sizes]
    found = shards(some, count)
    assert len(found) == count
    assert sorted(id(p) for shard in found for p in shard) == sorted(map(id, some))
    order = {id(p): number for number, p in enumerate(some)}
    for shard in found:
        assert [order[id(p)] for p in shard] == sorted(order[id(p)] for p in shard)
    loads = [sum(p.numel() for p in shard) for shard in found]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert loads[0] == max(loads) or len(sizes) > count
