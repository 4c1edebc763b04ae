"""Offload: which storages that graphs save move to the host's memory and back, and when."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeworker.host.position import Tracker
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.device.numerics import deterministic_mode
from pipeworker.worker.stage.layers import StageConfig
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.offload import Copies, SavedGraph, StreamCopies
from pipeworker.worker.stage.stage import Stage
from support.devices.copies import CPU, LateCopies
from support.devices.device import LateDevice
from support.in_process.layers import Layer


class One:
    """A stage that is the first and the last, and its copies."""

    def __init__(
        self, *layers: nn.Module | Callable[[Any], Any], copies: Copies | None = None
    ) -> None:
        self.late = LateCopies()
        built = [one if isinstance(one, nn.Module) else Layer(one) for one in layers]
        copies = copies or self.late
        self.stage = Stage(
            built, StageConfig(0, 0, seed=0, device=CPU), Tracker(), loss=_mean, copies=copies
        )
        self.stage.begin(1)

    def given(self, *shape: int, count: int = 1) -> list[MicroBatch]:
        made = [MicroBatch(m, offload=True) for m in range(count)]
        for mb in made:
            mb.value, mb.wants_grad = torch.randn(shape), (False,)
        return made

    def forward(self, mb: MicroBatch) -> None:
        self.stage.forward(mb)
        self.stage.end_action(mb)

    def backward(self, mb: MicroBatch) -> None:
        self.stage.backward(mb)
        self.stage.end_action(mb)

    @property
    def moved(self) -> list[str]:
        """The copies, without what orders them."""
        return [line for line in self.late.log if line[0] in "ob"]


def _mean(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output.mean()


def test_what_is_on_the_device_anyway_is_not_copied() -> None:
    """Weights, buffers, the input and a view of it; the loss itself. What tanh gave is."""
    norm = nn.BatchNorm1d(4).eval()
    one = One(lambda x: x[:, 1:].t().t(), nn.Linear(3, 4), norm, torch.tanh, torch.exp)
    (mb,) = one.given(5, 4)
    one.forward(mb)
    each = 5 * 4 * 4
    assert one.moved == [f"out {each}"] * 3  # the linear layer's output, tanh's and exp's


def test_a_memory_is_copied_once_however_often_it_is_saved() -> None:
    def parts(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.chunk(3, dim=1)
        return q * k + k * v.t().contiguous().t() + (q * v).t().t() * q

    one = One(nn.Linear(6, 6), parts)
    (mb,) = one.given(2, 6)
    one.forward(mb)
    assert one.moved.count("out 48") == 1


def test_what_leaves_is_let_go_of_when_the_next_action_has_ended_and_comes_back() -> None:
    one = One(nn.Linear(3, 3), torch.tanh, lambda x: x * 2)
    mbs = one.given(2, 3, count=3)
    for mb in mbs:
        one.forward(mb)
    out, back = ["follow", "out 24"], ["follow", "back 24"]
    assert one.late.log == [*out, *out, "wait", *out, "wait"]
    one.late.log.clear()
    for mb in mbs[:2]:
        assert mb.offloaded
        mb.offloaded.fetch()
    assert one.late.log == [*back, *back]
    one.backward(mbs[0])
    assert one.late.log == [*back, *back, "wait"]
    one.backward(mbs[1])
    one.backward(mbs[2])  # though nobody fetched it
    assert one.late.log[5:] == ["wait", *back, "wait"]


class Sees(torch.autograd.Function):
    """Notes how what it saves lies in memory, before and after."""

    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        Sees.note(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Sees.note(*ctx.saved_tensors)
        return gradient

    @staticmethod
    def note(x: torch.Tensor) -> None:
        lies = x.stride(), x.storage_offset(), x.data_ptr() % 64, x.dtype
        Sees.seen.append((lies, x.tolist()))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[1:, ::2],
        lambda x: x[:1].expand(3, 4),
        lambda x: x.bfloat16(),
        lambda x: torch.view_as_complex(x.reshape(3, 2, 2)).conj(),
    ],
)
def test_what_comes_back_lies_in_memory_as_it_did(view: Callable[[Any], Any]) -> None:
    """Strides and alignment decide which kernel runs."""
    sees: Callable[[Any], Any] = Sees.apply
    real = lambda y: torch.view_as_real(y) if y.is_complex() else y  # noqa: E731
    Sees.seen.clear()
    one = One(nn.Linear(4, 4), lambda x: real(sees(view(x * 2))))  # type: ignore[no-untyped-call]
    mbs = one.given(3, 4, count=2)
    for mb in mbs:
        one.forward(mb)
    for mb in mbs:
        one.backward(mb)
    assert Sees.seen[:2] == Sees.seen[2:]


def _check_gradients(width: int, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Check that a linear layer and a function have the same gradients with offload and without."""
    gradients: list[Any] = []
    for away in (False, True):
        torch.manual_seed(0)
        one = One(nn.Linear(3, width), function, copies=Copies())  # at once
        mbs = one.given(2, 3, count=2)
        for mb in mbs:
            mb.offload = away
            one.forward(mb)
        for mb in mbs:
            one.backward(mb)
        gradients += (p.grad for p in one.stage.layers[0].parameters())
    assert torch.equal(gradients[0], gradients[2])
    assert torch.equal(gradients[1], gradients[3])


def test_a_tensor_that_a_kernel_writes_after_it_was_saved_comes_back_as_written() -> None:
    """Torch saves the noise of RReLU before the kernel draws it."""
    _check_gradients(3, nn.RReLU(0.1, 0.9))


def test_a_memory_that_is_saved_again_after_a_change_is_copied_again() -> None:
    """The graph of what was saved before leads nowhere, so nothing is wrong with it."""

    def change(x: torch.Tensor) -> torch.Tensor:
        saved = torch.sigmoid(x).detach()
        unused = saved * x
        saved.mul_(2)
        return unused.detach() + saved * x

    _check_gradients(3, change)


def _gates(x: torch.Tensor) -> torch.Tensor:
    """As in a GRU on the CPU: parts of one memory that are changed in place one after the other."""
    first, second, third = torch.unsafe_chunk(x * 2, 3, 1)
    return first.sigmoid_() * second.sigmoid_() + third.tanh_()


def test_parts_of_a_memory_with_versions_of_their_own_come_back_as_they_were_saved() -> None:
    _check_gradients(12, _gates)


CHANGED = r"modified by an inplace operation: \[torch.FloatTensor \[.*\]\] is at version"


def test_a_change_in_place_of_what_has_left_is_found_as_without_hooks() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        saved = torch.sigmoid(x)
        found = saved * 1
        saved.detach().add_(0)
        return found

    one = One(nn.Linear(3, 3), change)
    (mb,) = one.given(2, 3)
    one.forward(mb)
    with pytest.raises(UserCodeError, match=CHANGED):
        one.backward(mb)


class _Meta(Copies):
    """Copies of tensors on the meta device, whose memory a tensor of the CPU cannot replace."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta


def test_what_has_left_takes_no_memory_of_another_device() -> None:
    """Torch lets tensors of some accelerators replace those of the CPU, and of others not."""
    graph = SavedGraph(_Meta(), frozenset())
    packed = graph.pack(torch.empty(2, 3, device="meta"))
    assert packed.unpack().shape == (2, 3)
    assert packed.unpack().is_meta


def test_a_change_in_place_of_what_stays_is_found_as_without_hooks() -> None:
    linear = nn.Linear(3, 3)
    one = One(nn.Linear(3, 3), linear)
    (mb,) = one.given(2, 3)
    one.forward(mb)
    linear.weight.detach().add_(0)
    with pytest.raises(UserCodeError, match=CHANGED):
        one.backward(mb)


def test_a_checkpoint_inside_a_layer_keeps_its_own_input_there() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.exp(torch.sin(x)))

    for reentrant in (False, True):
        checkpointed = partial(checkpoint, inner, use_reentrant=reentrant)
        one = One(nn.Linear(3, 3), checkpointed)
        first, second = one.given(2, 3, count=2)
        one.forward(first)
        one.forward(second)
        one.backward(first)
        one.backward(second)
        assert one.moved == ["out 24", "out 24", "back 24", "back 24"]


@pytest.mark.parametrize("fills", [False, True])
def test_memory_that_torch_fills_is_copied_to_behind_the_fill(fills: bool) -> None:
    """``--deterministic`` has torch fill what it allocates, in the computing stream."""
    device = LateDevice(["offloads"])
    copies = StreamCopies(device, least=1)
    source = device.pinned(8).fill_(7)
    with deterministic_mode(lambda: fills):
        copies.follow()
        target = copies.back(source)
        copies.wait(copies.mark())
    assert device.read(target).tolist() == [7] * 8
