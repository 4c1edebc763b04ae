"""Graphs that save buffers which later forwards change give the gradients of the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.host.position import Tracker
from pipeworker.worker.internals import FakeTensorMode
from pipeworker.worker.stage.layers import StageConfig
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.offload import Copies
from pipeworker.worker.stage.saved_buffers import SavedBuffers
from pipeworker.worker.stage.stage import Stage
from support.slow import slow

WIDTH = 3


class Scale(nn.Linear):
    """Multiplies by a buffer that it changes in place."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.change(y.detach().abs().amax(0))
        return y * self.scale

    def change(self, greatest: torch.Tensor) -> None:
        self.scale.mul_(0.9).add_(greatest, alpha=0.1)


class Untraced(Scale):
    """Changes it without a trace in its version."""

    def change(self, greatest: torch.Tensor) -> None:
        self.scale.data.mul_(0.9).add_(greatest, alpha=0.1)


class AtTimes(Scale):
    """Changes it in every other forward, and so not in the very first."""

    forwards: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def change(self, greatest: torch.Tensor) -> None:
        self.forwards += 1
        if self.forwards % 2 == 0:
            super().change(greatest)


class Attribute(Untraced):
    """Has a tensor in a plain attribute in the buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.scale = torch.ones(WIDTH)


class Shared(Untraced):
    """Has the same buffer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("again", self.scale)

    def change(self, greatest: torch.Tensor) -> None:
        assert self.again is self.scale
        super().change(greatest)


class SharedLate(Shared):
    """Has it twice from its first forward on."""

    again: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("again", None)

    def change(self, greatest: torch.Tensor) -> None:
        if self.again is None:
            self.again = self.scale
        super().change(greatest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.get_buffer("again")


class Multiply(torch.autograd.Function):
    """Keeps the buffer on its context, as scales of quantization often are."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.kept = {"scale": scale}
        return y * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.kept["scale"], None


class OnContext(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.Linear.forward(self, x)
        self.change(y.detach().abs().amax(0))
        multiplied: torch.Tensor = Multiply.apply(y, self.scale)  # type: ignore[no-untyped-call]
        return multiplied


class Directional(Scale):
    """Has a forward-mode gradient, of which the graph saves zeros without memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, ones = super().forward(x), torch.ones(len(x), WIDTH)
        both = torch.func.jvp(lambda v: torch.tanh(v @ self.weight), (y,), (ones,))
        found: torch.Tensor = both[0] + both[1]
        return found


class Renorm(nn.Linear):
    """Uses the statistics of a batch norm, whose kernel changes them."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, norm = super().forward(x), self.norm
        normal: torch.Tensor = norm(y)
        return normal + F.batch_norm(y, norm.running_mean, norm.running_var, training=False)


class Switching(nn.Linear):
    """Has a batch norm that is in training in every other forward."""

    forwards: torch.Tensor
    first = True

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.train(self.trains(int(self.forwards)))
        self.forwards += 1
        normal: torch.Tensor = self.norm(super().forward(x))
        return normal

    def trains(self, number: int) -> bool:
        return (number % 2 == 0) is self.first


class SwitchingOnce(Switching):
    """Uses the statistics in the first forward of the third mini-batch, which is not compared."""

    def trains(self, number: int) -> bool:
        return number != 8


class Thawing(nn.Linear):
    """Trains its weight from the second mini-batch on, which a part has in a plain attribute."""

    forwards: torch.Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))
        self.weight.requires_grad_(False)
        self.part = nn.Module()
        vars(self.part)["shared"] = self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forwards == 4:
            self.weight.requires_grad_()
        self.forwards += 1
        return F.linear(x, vars(self.part)["shared"], self.bias)


class SwitchingLate(Switching):
    """Uses the statistics first, as a stage sees when it is built."""

    first = False

    def __init__(self) -> None:
        super().__init__()
        self.norm.eval()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


def layers(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(kind(), nn.Tanh(), kind(), nn.Linear(WIDTH, 1))


def inputs(step: int) -> Sequence[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, WIDTH, generator=generator).unbind()


WAYS = (
    *((False, (0, 2)), (True, ()), (True, (0, 2)), (False, ())),
    *((offload, modes) for offload in (False, True) for modes in ((0,), (1, 2, 3))),
)
KINDS = (
    *(Scale, Untraced, AtTimes, Attribute, Shared, OnContext, Directional, Renorm, Switching),
    *(SwitchingOnce, Thawing),
)


@pytest.mark.parametrize(
    ("kind", "offload", "recompute"),
    [
        pytest.param(kind, *way, marks=() if turn < 2 else slow)
        for kind in KINDS
        for turn, way in enumerate(WAYS)
    ],
)
def test_gradients_are_those_of_the_plain_loop(
    kind: type[nn.Module], offload: bool, recompute: Sequence[int]
) -> None:
    net, plain = layers(kind), layers(kind)
    config = StageConfig(0, 0, 3, torch.device("cpu"))
    stage = Stage([*net], config, Tracker(), loss, Copies() if offload else None)
    for step in range(3):
        stage.begin(step)
        mbs = []
        for m, x in enumerate(inputs(step)):
            mb = MicroBatch(m, 0.25, m in recompute, offload=offload and m not in recompute)
            mb.value, mb.wants_grad, mb.target = x, (False,), torch.zeros(())
            stage.forward(mb)
            mbs.append(mb)
            (loss(plain(x), torch.zeros(())) * 0.25).backward()  # type: ignore[no-untyped-call]
        for mb in mbs:
            if mb.recompute:
                stage.recompute(mb)
            stage.backward(mb)
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name


@pytest.mark.parametrize("recompute", [(), (0, 1, 2, 3)])
def test_a_buffer_that_the_first_forward_makes_another_one_remains_it(
    recompute: Sequence[int],
) -> None:
    test_gradients_are_those_of_the_plain_loop(SharedLate, False, recompute)


def test_fake_tensors_have_no_bits_to_compare() -> None:
    """A plan without measured layers counts their operations on them."""
    with FakeTensorMode():
        layer, scale, mb = nn.Identity(), torch.ones(WIDTH), MicroBatch(0)
        layer.register_buffer("scale", scale)
        saved = SavedBuffers([layer], 0)
        with saved.forward(mb):
            mb.output = scale.mul_(2) * torch.ones(2, WIDTH)
    assert saved.is_empty


class Masked(nn.Linear):
    """Masks its weights in place in every forward, which changes them in the first one alone."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


class Teacher(nn.Linear):
    """Adds what a moving average of its weights gives, which no graph saves."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.teacher.weight
        weight.data = weight.data * 0.9 + self.weight.data * 0.1
        with torch.no_grad():
            other: torch.Tensor = self.teacher(x)
        return super().forward(x) + other


class PowerIteration(nn.Linear):
    """Divides by a norm that it estimates by a vector in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.u = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.u.data = F.normalize(self.weight.data @ self.u.data, dim=0)
        norm: torch.Tensor = (self.weight @ self.u).norm()
        return super().forward(x) / norm


class Decays(nn.Linear):
    """Decays its weights in every forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.9)
        return super().forward(x)


class LateStatistics(Renorm):
    """Uses the statistics from the second mini-batch on."""

    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        y = nn.Linear.forward(self, x)
        normal: torch.Tensor = self.norm(y)
        return normal if self.forwards <= 4 else super().forward(x)


def train(kind: Callable[[], nn.Module], counts: Sequence[int]) -> None:
    """Train a stage by mini-batches of as many micro-batches as `counts` has, like a plain loop."""
    net, plain = layers(kind), layers(kind)
    stage = Stage([*net], StageConfig(0, 0, 3, torch.device("cpu")), Tracker(), loss)
    for step, count in enumerate(counts):
        stage.begin(step)
        mbs = [MicroBatch(m, 0.25) for m in range(count)]
        for mb, x in zip(mbs, inputs(step), strict=False):
            mb.value, mb.wants_grad, mb.target = x, (False,), torch.zeros(())
            stage.forward(mb)
            (loss(plain(x), torch.zeros(())) * 0.25).backward()  # type: ignore[no-untyped-call]
        for mb in mbs:
            stage.backward(mb)
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert one.grad is other.grad or torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Masked, Teacher, partial(nn.BatchNorm1d, WIDTH)])
def test_parameters_may_change_where_no_backward_needs_their_old_numbers(
    kind: Callable[[], nn.Module],
) -> None:
    train(kind, [4, 4, 4])


@pytest.mark.parametrize(
    ("kind", "place", "advice"),
    [
        (PowerIteration, r"layer 0 \(PowerIteration\): u", "keep what forwards change in buffers"),
        (Decays, r"layer 2 \(Decays\): weight", "change weights in the optimizer's step"),
        (LateStatistics, "layer 0 .*: norm.running_mean", "use --recompute always"),
        (SwitchingLate, r"layer 0 \(SwitchingLate\): norm", "use --recompute always"),
    ],
)
def test_a_change_without_a_trace_of_what_a_graph_has_saved_is_refused(
    kind: type[nn.Module], place: str, advice: str
) -> None:
    with pytest.raises(UsageError, match=f"{place}: the forward of micro-batch 1 .* {advice}"):
        train(kind, [4, 4])


def test_a_mini_batch_of_one_micro_batch_may_change_its_weights() -> None:
    train(Decays, [1, 1, 1])
