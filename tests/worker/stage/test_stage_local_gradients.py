"""Layers that call backward() within their forward train as in the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.host.position import Tracker
from pipeworker.worker.stage.layers import StageConfig
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.stage import Stage
from support.slow import slow

WIDTH, COUNT = 3, 4


class Local(nn.Linear):
    """Has losses of its own besides the one at the end, for each number in `powers`."""

    numbers: torch.Tensor

    def __init__(self, *powers: int, detaches: bool = True) -> None:
        super().__init__(WIDTH, WIDTH)
        self.powers, self.detaches = powers, detaches
        self.register_buffer("numbers", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x.detach() if self.detaches else x
        for power in self.powers:
            own: torch.Tensor = super().forward(seen).pow(power).mean()
            own.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return torch.tanh(super().forward(x))


class AtTimes(Local):
    """Has them from the second mini-batch on, and there not for the first micro-batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = int(self.numbers)
        self.numbers += 1
        self.powers = (2, 4) if number >= COUNT and number % COUNT in (1, 2) else ()
        return super().forward(x)


class Clipped(Local):
    """Clips the gradient of its own loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x.detach()).pow(2).sum().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        return x


class Steps(Local):
    """Trains itself, by an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.own.zero_grad()
        super().forward(x.detach()).pow(2).sum().backward()  # type: ignore[no-untyped-call]
        self.own.step()
        self.own.zero_grad()
        return x + super().forward(x).detach()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


def net(make: Callable[[], Local]) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Linear(WIDTH, 1))


def microbatch(number: int, *, recompute: bool = False, split: bool = False) -> MicroBatch:
    mb = MicroBatch(number, 1 / COUNT, recompute, split_backward=split)
    generator = torch.Generator().manual_seed(number)
    mb.value, mb.target = torch.randn(5, WIDTH, generator=generator), torch.zeros(())
    mb.wants_grad = (False,)
    return mb


@pytest.mark.parametrize(
    ("make", "split", "recompute"),
    [
        pytest.param(make, split, recompute, marks=slow if (number + turn + split) % 3 else ())
        for number, make in enumerate([lambda: Local(2), lambda: Local(2, 3, 4), AtTimes])
        for split in (False, True)
        for turn, recompute in enumerate([(), (0, 2), (0, 1, 2, 3)])
    ],
)
def test_gradients_are_those_of_the_plain_loop(
    recompute: Sequence[int], split: bool, make: Callable[[], Local]
) -> None:
    layers, plain = net(make), net(make)
    stage = Stage([*layers], StageConfig(0, 0, 3, torch.device("cpu")), Tracker(), loss)
    for step in (1, 2, 3):
        stage.begin(step)
        mbs = [microbatch(m, recompute=m in recompute, split=split) for m in range(COUNT)]
        for mb in mbs:
            stage.forward(mb)
        for mb in mbs:
            if mb.recompute:
                stage.recompute(mb)
            if split:
                stage.backward_input(mb)
                stage.backward_weight(mb)
            else:
                stage.backward(mb)
            x = microbatch(mb.number).value
            one = loss(plain(x), torch.zeros(())) / COUNT
            one.backward()  # type: ignore[no-untyped-call]
    for ours, other in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, other.grad)  # type: ignore[arg-type]


def test_a_backward_that_reaches_an_earlier_stage_is_an_error() -> None:
    layers = net(lambda: Local(2, detaches=False))
    stage = Stage([*layers], StageConfig(1, 4, 3, torch.device("cpu")), Tracker())
    stage.begin(1)
    mb = microbatch(0)
    mb.wants_grad = (True,)
    with pytest.raises(UsageError, match=r"^stage 1: backward\(\) inside a forward reaches layers"):
        stage.forward(mb)


def test_a_layer_may_train_itself() -> None:
    layers, plain = net(Steps), net(Steps)
    stage = Stage([*layers], StageConfig(0, 0, 3, torch.device("cpu")), Tracker(), loss)
    stage.begin(1)
    mbs = [microbatch(m) for m in range(COUNT)]
    for mb in mbs:
        x, target = mb.value, mb.target
        stage.forward(mb)
        (loss(plain(x), target) / COUNT).backward()  # type: ignore[no-untyped-call]
    for mb in mbs:
        stage.backward(mb)
    for ours, other in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, other)
        assert (ours.grad is None) is (other.grad is None)
    assert torch.equal(layers[0].weight.grad, plain[0].weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("powers", [(), (2, 3)])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_what_a_layer_makes_of_its_gradient_counts(scale: float, powers: tuple[int, ...]) -> None:
    layers, plain = net(lambda: Clipped(*powers)), net(lambda: Clipped(*powers))
    stage = Stage([*layers], StageConfig(0, 0, 3, torch.device("cpu")), Tracker(), loss)
    stage.begin(1, loss_scale=scale)
    mb = microbatch(0, recompute=True)
    x, target = mb.value, mb.target
    stage.forward(mb)
    stage.recompute(mb)
    stage.backward(mb)
    (loss(plain(x), target) / COUNT).backward()  # type: ignore[no-untyped-call]
    for ours, other in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, scale * other.grad)  # type: ignore[arg-type,operator]


class Assigns(Local):
    """Sets the gradient of its own loss itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = nn.functional.linear(x.detach(), self.weight).pow(2).mean()
        (gradient,) = torch.autograd.grad(own, [self.weight])
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient
        return x


class AddsInPlace(Assigns):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.grad is None:
            return super().forward(x)
        self.weight.grad.add_(1)
        return x


class Removes(Local):
    """Removes its gradients, as of a loss of its own, and has none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.zero_grad()
        return super().forward(x)


class Halves(Local):
    """Changes the gradient that earlier backwards have left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.grad is not None:
            self.weight.grad.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("kind", [Removes, Halves])
def test_a_gradient_that_a_layer_removes_or_changes_is_refused_in_the_first_forward(
    kind: type[Local], recompute: bool
) -> None:
    """It depends on the schedule whether a backward has left one by then."""
    stage = Stage([*net(kind)], StageConfig(0, 4, 3, torch.device("cpu")), Tracker(), loss)
    stage.begin(1)
    with pytest.raises(UsageError, match=rf"^layer 5 \({kind.__name__}\): weight: .* zero_grad"):
        stage.forward(microbatch(0, recompute=recompute))


@pytest.mark.parametrize("kind", [Local, Steps])
def test_a_checked_forward_leaves_no_gradient(kind: type[Local]) -> None:
    layers = net(kind)
    stage = Stage([*layers], StageConfig(0, 4, 3, torch.device("cpu")), Tracker(), loss)
    stage.begin(1)
    stage.forward(microbatch(0))
    assert all(weight.grad is None for weight in layers.parameters())


class Widening(Local):
    """Has gradients of more bits than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()
        for weight in self.parameters():
            weight.grad_dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16()).float()


def test_gradients_may_have_another_dtype_than_their_weights() -> None:
    layers = net(Widening)
    stage = Stage([*layers], StageConfig(0, 4, 3, torch.device("cpu")), Tracker(), loss)
    stage.begin(1)
    mb = microbatch(0)
    stage.forward(mb)
    stage.backward(mb)
    assert layers[1].weight.grad.dtype is torch.float32  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [Assigns, AddsInPlace])
def test_a_gradient_that_a_layer_sets_itself_is_refused(kind: type[Local]) -> None:
    layers = net(kind)
    stage = Stage([*layers], StageConfig(0, 4, 3, torch.device("cpu")), Tracker(), loss)
    stage.begin(1)
    layers[1].weight.grad = torch.ones(WIDTH, WIDTH)
    with pytest.raises(UsageError, match=rf"^layer 5 \({kind.__name__}\): weight: .* its gradient"):
        stage.forward(microbatch(0))
