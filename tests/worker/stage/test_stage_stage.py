"""One stage alone: where it is when a layer raises, what it refuses, what it draws."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.facts.position import Phase, Position
from pipeworker.host.position import Tracker
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.stage import losses
from pipeworker.worker.stage.layers import StageConfig
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.stage import Stage
from pipeworker.worker.stage.values import distinct_tensors

STEP = 7


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def stage(
    layers: Sequence[nn.Module], loss: Callable[[Any, Any], Any] | None = mean, first: int = 0
) -> Stage:
    return Stage(layers, StageConfig(0, first, 3, torch.device("cpu")), Tracker(), loss)


def given(
    value: Any,
    target: Any = None,
    *,
    number: int = 0,
    weight: float = 1.0,
    recompute: bool = False,
    wants: Sequence[bool] = (False,),
) -> MicroBatch:
    """A micro-batch as it comes to a stage."""
    mb = MicroBatch(number, weight, recompute)
    mb.value, mb.wants_grad, mb.target = value, wants, target
    return mb


def run(made: Stage, inputs: Sequence[Any], *, recompute: bool, step: int = STEP) -> list[float]:
    """All micro-batches of one step on a stage that is the first and the last."""
    made.begin(step)
    mbs = [
        given(x, torch.zeros(()), number=m, weight=1 / len(inputs), recompute=recompute)
        for m, x in enumerate(inputs)
    ]
    for mb in mbs:
        made.forward(mb)
    for mb in mbs:
        if recompute:
            made.recompute(mb)
        made.backward(mb)
    return [*losses.shares(mbs)[0]]


class Fails(nn.Module):
    """Raises in the nth forward, or in backward."""

    def __init__(self, forward: int = 0) -> None:
        super().__init__()
        self.count, self.bad = [0], forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count[0] += 1
        if self.count == [self.bad]:
            raise ValueError("in forward")
        if not self.bad:
            return _Refuse.apply(x)  # type: ignore[no-any-return, no-untyped-call]
        return x


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("in backward")


@pytest.mark.parametrize(
    ("bad", "recompute", "phase", "microbatch"),
    [
        (1, False, Phase.FORWARD, 0),
        (2, False, Phase.FORWARD, 1),
        (2, True, Phase.FORWARD, 1),
        (3, True, Phase.RECOMPUTE, 0),
        (4, True, Phase.RECOMPUTE, 1),
        (0, True, Phase.BACKWARD, 0),
        (0, False, Phase.BACKWARD, 0),
    ],
)
def test_the_position_when_a_layer_raises(
    bad: int, recompute: bool, phase: Phase, microbatch: int
) -> None:
    made = stage([nn.Linear(3, 3), nn.Tanh(), Fails(bad), nn.ReLU(), nn.Linear(3, 1)], first=10)
    expected = "ValueError: in backward$"
    if bad:
        expected = r"ValueError: in forward \(its input was Tensor\[2, 3\] float32\)$"
    with pytest.raises(UserCodeError, match=rf"^layer 12 \(Fails\) raised {expected}"):
        run(made, [torch.ones(2, 3)] * 2, recompute=recompute)
    assert made.tracker.get() == Position(phase, STEP, microbatch, 12)


def test_the_position_when_the_loss_raises() -> None:
    def loss(output: Any, target: Any) -> Any:
        raise ValueError("in loss")

    made = stage([nn.Linear(3, 1)], loss)
    given = r"its output was Tensor\[2, 1\] float32, its target Tensor\[\] float32"
    with pytest.raises(UserCodeError, match=rf"^loss\(\) raised ValueError: in loss \({given}\)$"):
        run(made, [torch.ones(2, 3)], recompute=True)
    assert made.tracker.get() == Position(Phase.LOSS, STEP, 0, -1)


class Nothing(nn.Module):
    def forward(self, x: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("layers", "value", "expected"),
    [
        (
            [nn.Linear(3, 3), Nothing(), nn.Tanh()],
            torch.ones(2, 3),
            "layer 11 (Nothing): returned None, on which layer 12 (Tanh) raised TypeError: ",
        ),
        ([nn.Tanh()], None, "layer 9 (Block): returned None, on which layer 10 (Tanh) raised Type"),
        (
            [nn.Linear(3, 3), Nothing()],
            torch.ones(2, 3),
            "layer 11 (Nothing): returned None, on which loss() raised AttributeError: ",
        ),
    ],
)
def test_a_layer_that_returns_none_is_named_itself(
    layers: list[nn.Module], value: Any, expected: str
) -> None:
    made = Stage(
        layers,
        StageConfig(0, 10, seed=5, device=torch.device("cpu"), class_before="Block"),
        Tracker(),
        loss=lambda output, target: output.mean(),
    )
    with pytest.raises(UsageError, match=re.escape(expected)):
        made.forward(MicroBatch(0, value=value, wants_grad=[]))


def test_the_position_moves_through_backward() -> None:
    where: list[Position] = []

    class Note(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            x.register_hook(lambda _: where.append(made.tracker.get()))  # type: ignore[no-untyped-call]
            return x * 1

    made = stage([nn.Linear(3, 3), Note(), nn.Tanh(), Note()])
    run(made, [torch.ones(2, 3)], recompute=False)
    assert [(p.phase, p.layer) for p in where] == [(Phase.BACKWARD, 3), (Phase.BACKWARD, 1)]


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + random.random() + float(np.random.rand()) + torch.rand(x.shape)


def noisy() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Dropout(0.5), nn.Linear(6, 6), Noise(), nn.Dropout(0.5), nn.Linear(6, 1)]


def noisy_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * torch.rand(output.shape)).sum()


def gradients(layers: Sequence[nn.Module]) -> list[torch.Tensor]:
    found = [p.grad for p in nn.Sequential(*layers).parameters()]
    assert None not in found
    return [grad for grad in found if grad is not None]


def test_recompute_draws_what_forward_drew() -> None:
    inputs = [torch.randn(4, 6) for _ in range(3)]
    results = []
    for recompute in (False, True):
        layers = noisy()
        losses = run(stage(layers, noisy_loss), inputs, recompute=recompute)
        results.append((losses, gradients(layers)))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


def test_every_step_and_micro_batch_draws_anew() -> None:
    x = torch.ones(4, 6)
    made = stage(noisy(), noisy_loss)
    losses = run(made, [x, x], recompute=False, step=1) + run(made, [x, x], recompute=False, step=2)
    assert len(set(losses)) == 4
    assert run(stage(noisy(), noisy_loss), [x, x], recompute=True, step=2) == losses[2:]


def test_what_a_layer_draws_does_not_depend_on_the_grouping() -> None:
    layers = noisy()
    x = torch.ones(4, 6)
    whole = run(stage(layers, noisy_loss), [x], recompute=False)
    upper, lower = stage(layers[:2], None), stage(layers[2:], noisy_loss, first=2)
    for made in (upper, lower):
        made.begin(STEP)
    first = given(x)
    upper.forward(first)
    second = given(first.outgoing.detach(), wants=[True])
    lower.forward(second)
    assert [*losses.shares([second])[0]] == whole


def test_gradients_of_the_input_are_given_back() -> None:
    made = stage([nn.Identity()], None)
    made.begin(STEP)
    a, b, ids = torch.ones(2), torch.ones(2), torch.tensor([1, 2])
    mb = given((a, [ids, b], a), wants=[True, False, True])
    made.forward(mb)
    out = mb.outgoing
    assert out[0] is out[2]
    assert out[1][0] is ids
    assert [t.requires_grad for t in distinct_tensors(out)] == [True, False, True]
    mb.output_gradients = [torch.full((2,), 5.0), None]
    made.backward(mb)
    first, second = mb.input_gradients
    assert first is not None
    assert first.tolist() == [5.0, 5.0]
    assert second is None


@pytest.mark.parametrize("recompute", [False, True])
def test_a_micro_batch_keeps_nothing_after_its_backward(recompute: bool) -> None:
    made = stage([nn.BatchNorm1d(3), nn.Linear(3, 1)])
    made.begin(STEP)
    mb = given(torch.ones(2, 3), torch.zeros(()), recompute=recompute)
    made.forward(mb)
    if recompute:
        made.recompute(mb)
    made.backward(mb)
    assert mb.loss is not None
    assert not mb.loss.requires_grad
    for name in ("value", "target", "output", "outgoing", "boundary", "buffers_before"):
        assert getattr(mb, name) is None, name
    assert mb.weight_gradients is None
    assert mb.offloaded is None
    for name in ("arrived", "departing", "output_gradients", "input_gradients", "edges"):
        assert not getattr(mb, name), name


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, t: 1.0, "returned a float; return a scalar tensor"),
        (lambda o, t: None, "returned a NoneType"),
        (lambda o, t: o, r"returned a tensor of shape \(2, 3\); return a scalar"),
        (lambda o, t: (1.0, 2), "returned a float"),
        (lambda o, t: (o, 2), r"returned a tensor of shape \(2, 3\)"),
        (lambda o, t: o.sum() * 1j, "returned a tensor of torch.complex64; return a real scalar"),
        (lambda o, t: (o.sum(), 2, 3), "returned a tuple"),
    ],
)
def test_a_loss_that_is_none(loss: Callable[[Any, Any], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(stage([nn.Linear(3, 3)], loss), [torch.ones(2, 3)], recompute=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_losses_are_weighted_as_each_by_itself(dtype: torch.dtype) -> None:
    mbs = [MicroBatch(m, weight) for m, weight in enumerate([0.3, 0.3, 0.1, 0.1, 0.2])]
    for mb in mbs:
        mb.loss = torch.randn((1, 1) if mb.number else (), dtype=dtype)
    expected = [float(mb.loss * mb.weight) for mb in mbs if mb.loss is not None]
    assert losses.shares(mbs) == ((*expected,), ())


def test_all_micro_batches_have_a_count_or_none() -> None:
    mbs = [MicroBatch(m, 0.5) for m in range(2)]
    for mb, loss in zip(mbs, (torch.ones(()), (torch.ones(()), 2)), strict=True):
        losses.record(mb, loss)
    with pytest.raises(UsageError, match=r"returned a pair .* for 1 of 2 micro-batches and a sca"):
        losses.shares(mbs)


@pytest.mark.parametrize("count", [0.3, 3, np.int64(1 << 40), np.float32(0.25), (1 << 24) + 1.0])
def test_a_count_is_not_rounded(count: Any) -> None:
    mb = MicroBatch(0)
    losses.record(mb, (torch.ones(()), count))
    assert losses.shares([mb]) == ((1.0,), (count,))


def test_a_loss_of_one_element_is_a_scalar() -> None:
    made = stage([nn.Linear(3, 1)], lambda o, t: o.mean(0))
    run(made, [torch.ones(2, 3)], recompute=False)


def test_a_layer_that_begins_to_change_its_input_is_refused() -> None:
    class Later(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return (x if self.calls < 2 else x.mul_(2)) * 1

    made = stage([Later(), nn.Linear(3, 1)])
    with pytest.raises(UsageError, match="use --recompute never"):
        run(made, [torch.ones(2, 3)] * 2, recompute=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_loss_counts_as_if_it_had_been_multiplied_by_its_weight(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3)
    for weight in (1 / 3, 0.1, 3 / 7, 1.0):
        found = []
        for ours in (True, False):
            torch.manual_seed(1)
            layer = nn.Linear(3, 3)
            loss = lambda output, target: ((output - target) ** 2).to(dtype).mean()  # noqa: E731
            if ours:
                made = stage([layer], loss)
                made.begin(STEP)
                mb = given(x, torch.zeros(()), weight=weight)
                made.forward(mb)
                made.backward(mb)
                ((value,), _) = losses.shares([mb])
            else:
                value = loss(layer(x), torch.zeros(())) * weight  # type: ignore[no-untyped-call]
                value.backward()
            found.append((torch.tensor(float(value)), *gradients([layer])))
        assert all(map(torch.equal, *found))


class Changes(nn.Module):
    """Its output requires grad the first time only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(2, 2), [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        y: torch.Tensor = self.linear(x)
        return y if self.calls == [1] else y.detach()


def test_an_output_that_stops_requiring_grad_when_recomputed_is_refused() -> None:
    made = stage([Changes()], None)
    made.begin(STEP)
    mb = given(torch.ones(1, 2), recompute=True)
    made.forward(mb)
    made.recompute(mb)
    mb.output_gradients = [torch.ones(1, 2)]
    with pytest.raises(UsageError, match=r"1 tensor of its output .* 0 in the recompute"):
        made.backward(mb)


def test_an_update_inside_a_backward_is_refused_where_forwards_are_repeated() -> None:
    def updating() -> nn.Linear:
        layer = nn.Linear(2, 2)

        def update(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(0.1)

        layer.weight.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
        return layer

    inputs = [torch.ones(2, 2)] * 2
    run(stage([updating()]), inputs, recompute=False)
    with pytest.raises(UsageError, match="weights were changed between the forward of micro-batch"):
        run(stage([updating()]), inputs, recompute=True)


class Clamps(nn.Linear):
    """Changes its weight in its 200th forward, long after the recomputes that are watched."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls: list[None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(None)
        if len(self.calls) == 200:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return super().forward(x)


def test_a_forward_that_changes_weights_late_is_refused_where_forwards_are_repeated() -> None:
    inputs = [torch.ones(2, 2)] * 3
    for recompute, steps in ((False, 70), (True, 33)):
        made = stage([Clamps()])
        for _ in range(steps):
            run(made, inputs, recompute=recompute)
            made.end()
    run(made, inputs, recompute=True)
    with pytest.raises(UsageError, match="weights were changed between a forward and its recom"):
        made.end()


class CountsLate(nn.Linear):
    """Uses the number of its forwards, which a list holds, after those that are all checked."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls: list[None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(None)
        return super().forward(x) * max(1, len(self.calls) - 200)


def test_a_recompute_that_begins_to_differ_late_is_found_by_the_rare_checks() -> None:
    made = stage([CountsLate()])
    inputs = [torch.ones(2, 2)]
    for _ in range(127):
        run(made, inputs, recompute=True)
    with pytest.raises(UsageError, match="has other numbers in the recompute"):
        run(made, inputs, recompute=True)


class Keeps(nn.Module):
    """Uses a tensor of its last forward, which a plain attribute holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x if self.last is None else x + self.last)
        self.last = out.detach()
        return out


def test_a_tensor_kept_for_the_next_forward_is_the_same_in_a_recompute() -> None:
    losses, gradients = [], []
    for recompute in (False, True):
        torch.manual_seed(2)
        layer = Keeps()
        made = stage([layer])
        for step in range(2):
            inputs = [torch.randn(3, 2) for _ in range(3)]
            losses.append(run(made, inputs, recompute=recompute, step=step))
        assert layer.linear.weight.grad is not None
        gradients.append(layer.linear.weight.grad)
    assert losses[:2] == losses[2:]
    assert torch.equal(*gradients)
