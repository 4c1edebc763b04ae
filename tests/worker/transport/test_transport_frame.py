"""Frames and layouts: a value that crosses a channel arrives unchanged."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import PipeworkerError
from pipeworker.worker.transport import frame as frames
from pipeworker.worker.transport import layout as layouts
from pipeworker.worker.transport.frame import Frame, KnownFrames
from support.in_process.transport import MemoryLink

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]

Pair = namedtuple("Pair", "left right")


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a contiguous tensor whose elements differ, as far as its dtype can represent."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 100).reshape(shape).to(dtype)


def cross(value: Any) -> Any:
    """Return the value at the other end: decode its header, and copy its elements as bytes."""
    frame, tensors = frames.describe(value)
    assert frames.matches(frame, value) is not None or _any_overlap(tensors)
    there = frames.from_bytes(frames.to_bytes(frame))
    assert there == frame
    arrived = []
    for tensor, layout in zip(tensors, there.tensors, strict=True):
        packed = layouts.pack(tensor)
        assert packed.is_contiguous()
        buffer = torch.zeros(layout.packed, dtype=layout.dtype)
        assert buffer.numel() == packed.numel()
        if packed.numel():
            link = MemoryLink()
            link.send(packed, 0)
            link.receive([buffer], 0)[0].wait()
        arrived.append(layouts.unpack(buffer, layout))
    return frames.assemble(there, arrived)


def _any_overlap(tensors: list[torch.Tensor]) -> bool:
    return any(layouts.layout_of(t).stride != t.stride() for t in tensors)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether shape, dtype and every bit are equal; a NaN equals itself."""
    if left.shape != right.shape or left.dtype is not right.dtype:
        return False
    plain = [t.detach().clone(memory_format=torch.contiguous_format) for t in (left, right)]
    return torch.equal(*(t.view(-1).view(torch.uint8) for t in plain))


@st.composite
def laid_out(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor that is permuted, sliced and expanded: any layout without overlap."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = filled(tuple(sizes), draw(st.sampled_from(DTYPES)))
    for dim, size in enumerate(sizes):
        if size and draw(st.booleans()):
            start = draw(st.integers(0, size - 1))
            step = draw(st.integers(1, 2))
            tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
    if draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, tensor.dim()))
        shape = list(tensor.unsqueeze(place).shape)
        shape[place] = draw(st.integers(1, 3))
        tensor = tensor.unsqueeze(place).expand(shape)
    return tensor


@given(laid_out())
def test_a_tensor_keeps_its_elements_and_strides(tensor: torch.Tensor) -> None:
    arrived = cross(tensor)
    assert same_bits(arrived, tensor)
    assert arrived.stride() == tensor.stride()


@given(st.data())
def test_tensors_with_elements_in_the_same_memory_are_known(data: st.DataObject) -> None:
    base = torch.zeros(6, 8)
    views = []
    for _ in range(data.draw(st.integers(1, 3))):
        part = base.t() if data.draw(st.booleans()) else base
        for dim in range(2):
            start, step = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 3))
            part = part[(slice(None),) * dim + (slice(start, start + 4, step),)]
        views.append(part)
    for view in views:
        base[:] = 0
        view.add_(1)
        touched = [bool(other.any()) for other in views if other is not view]
        if any(touched):
            assert layouts.have_common_elements(views)
            return
    assert not layouts.have_common_elements([*views, torch.zeros(3)])


def test_halves_of_a_tensor_have_no_common_elements() -> None:
    base = torch.zeros(4, 6)
    assert not layouts.have_common_elements(base.chunk(2, dim=1))
    assert not layouts.have_common_elements([base[:, ::2], base[:, 1::2], torch.zeros(0)])
    assert layouts.have_common_elements([base, base[1:, 2]])
    assert layouts.have_common_elements([base[0], base[0].view(torch.int32)])
    assert layouts.have_common_elements([base[3], base.view(torch.int16)[3]])


def test_views_without_elements_have_none_in_common() -> None:
    """The last element of one of them would lie before its first."""
    empty = torch.zeros(1000)[::100][5:5]
    assert not layouts.have_common_elements([empty, empty.view(1, 0)])
    base = torch.zeros(4)
    assert not layouts.have_common_elements([base, base[4:], base[4:].view(torch.int16)])


@given(laid_out())
def test_only_distinct_elements_move(tensor: torch.Tensor) -> None:
    distinct = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        distinct *= 1 if size > 1 and stride == 0 else size
    assert layouts.pack(tensor).numel() <= max(distinct, tensor.dim() == 0)


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.integers(0, 2),
)
def test_overlapping_elements_arrive_as_a_contiguous_tensor(
    shape: tuple[int, int], stride: tuple[int, int], offset: int
) -> None:
    tensor = filled((24,)).as_strided(shape, stride, offset)
    arrived = cross(tensor)
    assert same_bits(arrived, tensor)
    assert arrived.stride() == tensor.stride() or arrived.is_contiguous()


@given(laid_out())
def test_a_copy_has_the_layout_of_the_original_in_memory_of_its_own(tensor: torch.Tensor) -> None:
    copy = layouts.aligned_copy(tensor)
    assert same_bits(copy, tensor)
    assert layouts.layout_of(copy) == layouts.layout_of(tensor.detach())
    assert not layouts.have_common_elements([copy, tensor])


def test_a_single_element_keeps_its_alignment() -> None:
    tensor = filled((4,))[3]
    copy = layouts.aligned_copy(tensor)
    assert same_bits(copy, tensor)
    assert (copy.data_ptr() - tensor.data_ptr()) % layouts.ALIGNMENT == 0
    assert same_bits(cross(tensor), tensor)


def test_overlapping_windows_arrive_as_a_contiguous_tensor() -> None:
    windows = filled((8,)).unfold(0, 4, 2)
    assert windows.stride() == (2, 1)
    arrived = cross(windows)
    assert same_bits(arrived, windows)
    assert arrived.stride() == (4, 1)


@pytest.mark.parametrize(
    ("tensor", "packed"),
    [
        (filled((4, 3)), (4, 3)),
        (filled((4, 3)).t(), (4, 3)),
        (filled((4, 6))[:, ::2], (4, 3)),
        (filled((4, 1)).expand(4, 9), (4,)),
        (filled(()).expand(7), ()),
        (filled((2, 3, 4, 5)).contiguous(memory_format=torch.channels_last), (2, 4, 5, 3)),
        (filled((0, 3)).t(), (0, 3)),
    ],
    ids=["plain", "transposed", "gapped", "expanded", "scalar", "channels_last", "empty"],
)
def test_the_packed_shape_of_a_layout(tensor: torch.Tensor, packed: tuple[int, ...]) -> None:
    layout = layouts.layout_of(tensor)
    assert layout.packed == packed
    assert layouts.pack(tensor).numel() == torch.Size(packed).numel()
    assert layout.stride == tensor.stride()


@pytest.mark.parametrize("make", [filled, lambda s: filled(s).t()], ids=["plain", "transposed"])
def test_a_dense_tensor_is_copied_at_neither_end(make: Any) -> None:
    tensor = make((3, 4))
    packed = layouts.pack(tensor)
    assert packed.data_ptr() == tensor.data_ptr()
    assert layouts.unpack(packed, layouts.layout_of(tensor)).data_ptr() == tensor.data_ptr()


def test_a_lazy_conjugate_arrives_conjugated() -> None:
    tensor = torch.tensor([[1 + 2j, 3 - 1j]])
    for lazy in (
        tensor.conj(),
        tensor.mH,
        torch.conj(tensor).imag,
        tensor.conj().expand(3, 2),
        tensor.conj()[:, :, None].expand(3, 2, 4),
    ):
        assert lazy.is_conj() or lazy.is_neg()
        assert layouts.pack(lazy).numel() == math.prod(layouts.layout_of(lazy).packed)
        assert torch.equal(layouts.aligned_copy(lazy), lazy)
        assert torch.equal(cross(lazy).resolve_conj(), lazy.resolve_conj())


def test_requires_grad_is_described_and_the_elements_are_detached() -> None:
    x = filled((2, 2)).requires_grad_()
    y = x * 2
    frame, tensors = frames.describe((x, y, y.detach()))
    assert [layout.requires_grad for layout in frame.tensors] == [True, True, False]
    assert not any(layouts.pack(tensor).requires_grad for tensor in tensors)
    assert frames.from_bytes(frames.to_bytes(frame)) == frame


plain_values = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
tensors = st.builds(filled, st.sampled_from([(), (1,), (2, 3), (0,)]), st.sampled_from(DTYPES))


def containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inside, max_size=3)
    keys = st.text(max_size=3) | st.integers(-5, 5)
    return (
        lists
        | lists.map(tuple)
        | st.dictionaries(keys, inside, max_size=3)
        | st.dictionaries(st.text(max_size=3), inside, max_size=3).map(OrderedDict)
    )


def assert_equal(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert same_bits(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


@given(st.recursive(tensors | plain_values, containers, max_leaves=8))
def test_nested_values_arrive_unchanged(value: Any) -> None:
    assert_equal(cross(value), value)


def test_a_tensor_that_occurs_twice_moves_once_and_stays_one() -> None:
    x, y = filled((2,)), filled((2,))
    frame, moved = frames.describe({"a": x, "b": (y, x)})
    assert len(moved) == 2
    assert frame.leaves == (0, 1, 0)
    arrived = cross({"a": x, "b": (y, x)})
    assert arrived["a"] is arrived["b"][1]
    assert arrived["a"] is not arrived["b"][0]


class Tagged(torch.Tensor):
    pass


FREED = torch.ones(2, 3)
FREED.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    "other",
    [
        filled((3, 2)),
        filled((3, 2)).t(),
        filled((2, 3), torch.float64),
        filled((2, 3)).requires_grad_(),
        filled((8,))[1:7].view(2, 3),
        filled((2, 3)).as_subclass(Tagged),
        FREED,
        (filled((2, 3)),),
        None,
    ],
    ids=[
        *("shape", "stride", "dtype", "requires_grad", "alignment", "class", "memory"),
        *("structure", "no tensor"),
    ],
)
def test_a_tensor_of_another_layout_does_not_match(other: Any) -> None:
    frame, _ = frames.describe(filled((2, 3)))
    same = filled((2, 3))
    assert frames.matches(frame, same) == [same]
    assert frames.matches(frame, other) is None


@pytest.mark.parametrize(
    ("known", "other"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ([1, 2], (1, 2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ("a", b"a"),
        (None, 0),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
    ],
)
def test_another_plain_value_does_not_match(known: Any, other: Any) -> None:
    frame, _ = frames.describe(known)
    assert frames.matches(frame, known) == []
    assert frames.matches(frame, other) is None


def test_one_tensor_twice_does_not_match_two_tensors() -> None:
    x, y = filled((2,)), filled((2,))
    frame, _ = frames.describe((x, x))
    assert frames.matches(frame, (x, y)) is None
    assert frames.matches(frame, (y, y)) == [y]


def test_a_tensor_and_its_view_do_not_match_two_tensors_of_their_own() -> None:
    x, y = filled((2,)), filled((2,))
    view = x.view(2)
    (apart, _), (shared, _) = frames.describe((x, y)), frames.describe((x, view))
    assert frames.matches(shared, (x, view)) == [x, view]
    assert frames.matches(apart, (x, view)) is None
    assert frames.matches(shared, (x, y)) is None


def test_a_tensor_between_the_multiples_of_its_element_size_arrives() -> None:
    tensor = torch.frombuffer(bytearray(range(80)), dtype=torch.int32, offset=1, count=4)
    layout = layouts.layout_of(tensor)
    buffer = layouts.buffer_for(layout, lambda size: torch.empty(size, dtype=torch.uint8))
    assert torch.equal(layouts.unpack(buffer.copy_(layouts.pack(tensor)), layout), tensor)


@dataclass
class Record:
    one: int
    two: int


class Thing:
    pass


class OtherThing:
    pass


NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
"""It is strided, as a dense tensor is."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Thing(), "^a Thing cannot pass"),
        (OtherThing(), "^an OtherThing cannot pass"),
        (Record(1, 2), r"a Record cannot pass .*; call torch.export.register_dataclass\(Record\)"),
        ([filled((1,)), {1, 2}], "a set cannot pass"),
        ((slice(filled((1,)), 2),), r"a slice of slice\(tensor.* cannot pass.*: use integers"),
        ([torch.qint8], "the dtype torch.qint8 cannot pass"),
        (torch.eye(2).to_sparse(), "a torch.sparse_coo tensor cannot pass.*make it dense"),
        ([torch.eye(2).to_sparse()], "a torch.sparse_coo tensor cannot pass.*make it dense"),
        (NESTED, "a nested tensor cannot pass.*make it dense"),
        (torch.quantize_per_tensor(filled((2,)), 1.0, 0, torch.qint8), "a quantized tensor cannot"),
        (filled((2,)).as_subclass(Tagged), r"a Tagged, a subclass .*; pass tensor.as_subclass\("),
        ([filled((2,)).as_subclass(Tagged)], "a Tagged, a subclass of torch.Tensor, cannot pass"),
        (torch.empty(2, device="meta"), "a tensor on meta without memory cannot pass"),
        (torch._efficientzerotensor((2,)), "a tensor on cpu without memory cannot pass.*zeros"),
        ([FREED], "a tensor on cpu without memory cannot pass"),
    ],
    ids=[
        "object",
        "object with a vowel",
        "dataclass",
        "set",
        "slice",
        "dtype",
        "sparse",
        "sparse inside",
        "nested",
        "quantized",
        "subclass",
        "subclass inside",
        "meta",
        "zeros",
        "freed inside",
    ],
)
def test_a_value_that_cannot_pass_is_refused_by_its_class(value: Any, message: str) -> None:
    with pytest.raises(PipeworkerError, match=message):
        frames.describe(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            Pair(filled((1,)), 1),
            r"Pair cannot pass.*not every worker knew it\. Define it at the top",
        ),
        ({Thing: 1}, "a dict has the key <class .*Thing.*only plain values"),
        ({(0, ...): filled((1,))}, "a dict has the key Ellipsis"),
        (["\ud800"], "the output of a stage cannot be described: "),
        ([None] * (1 << 17) + [1], "a list cannot pass.*has 131073 parts"),
        (["x" * (17 << 20)], "plain values of 178[0-9]+ bytes cannot pass.*make tensors of them"),
        ([filled(())] * 2 + [filled(()) for _ in range(4096)], "4097 tensors cannot pass"),
        (filled((1,) * 65), "a tensor of more than 64 dimensions cannot pass"),
    ],
    ids=[
        *("namedtuple", "key that is a class", "key that is a tuple"),
        *("half a surrogate", "many parts", "long text", "many tensors", "many dimensions"),
    ],
)
def test_a_value_without_a_description_is_refused_when_it_is_sent(value: Any, message: str) -> None:
    with pytest.raises(PipeworkerError, match=message):
        frames.to_bytes(frames.describe(value)[0])


def test_frames_are_compared_by_their_content() -> None:
    def frame() -> Frame:
        return frames.describe({"x": filled((2, 3)), "n": 1})[0]

    assert frame() == frame()
    assert frame() != frames.describe({"x": filled((2, 3)), "n": 2})[0]


def test_equal_known_frames_are_shared() -> None:
    known = KnownFrames()
    for signature in range(3):
        for microbatch in range(8):
            frame, _ = frames.describe([filled((signature + 2,)), 1.5])
            known.learn(signature, microbatch, frame)
    assert len(known) == 24
    assert len({id(frame) for frame in known.values()}) == 3


def test_known_frames_are_forgotten_when_there_are_too_many() -> None:
    known = KnownFrames()
    frame, _ = frames.describe(filled((2,)))
    for signature in range(4096):
        known.learn(signature, 0, frame)
    known.limit()
    assert len(known) == 4096
    known.learn(0, 1, frame)
    known.limit()
    assert not known
