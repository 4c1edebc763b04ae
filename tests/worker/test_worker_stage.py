"""One stage alone: where it is when a layer raises, what it refuses, what it draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.wire.messages import Phase, Position
from pipeworker.worker.position import Tracker
from pipeworker.worker.stage import Stage, describe, distinct_tensors

STEP = 7


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def stage(
    layers: Sequence[nn.Module], loss: Callable[[Any, Any], Any] | None = mean, first: int = 0
) -> Stage:
    return Stage(layers, first, seed=3, device=torch.device("cpu"), tracker=Tracker(), loss=loss)


def begin(made: Stage, *, again: bool, microbatches: int = 2, step: int = STEP) -> None:
    weights = [1 / microbatches] * microbatches
    made.begin(step, weights, frozenset(range(microbatches) if again else ()))


def run(made: Stage, inputs: Sequence[Any], *, again: bool, step: int = STEP) -> list[float]:
    """All micro-batches of one step on a stage that is the first and the last."""
    begin(made, again=again, microbatches=len(inputs), step=step)
    for m, x in enumerate(inputs):
        made.put_input(m, x, [False], torch.zeros(()))
        made.forward(m)
    for m in range(len(inputs)):
        if again:
            made.recompute(m)
        made.backward(m, [])
    return [made.losses.values[m].item() for m in range(len(inputs))]


class Fails(nn.Module):
    """Raises in the nth forward, or in backward."""

    def __init__(self, forward: int = 0) -> None:
        super().__init__()
        self.count, self.bad = 0, forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == self.bad:
            raise ValueError("in forward")
        if not self.bad:
            return _Refuse.apply(x)  # type: ignore[no-any-return]
        return x


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("in backward")


@pytest.mark.parametrize(
    ("bad", "again", "phase", "microbatch"),
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
    bad: int, again: bool, phase: Phase, microbatch: int
) -> None:
    made = stage([nn.Linear(3, 3), nn.Tanh(), Fails(bad), nn.ReLU(), nn.Linear(3, 1)], first=10)
    with pytest.raises(ValueError, match="in backward" if bad == 0 else "in forward"):
        run(made, [torch.ones(2, 3)] * 2, again=again)
    assert made.tracker.get() == Position(phase, STEP, microbatch, 12)
    assert made.refused == ("" if bad == 0 else "Tensor[2, 3] float32")


def test_the_position_when_the_loss_raises() -> None:
    def loss(output: Any, target: Any) -> Any:
        raise ValueError("in loss")

    made = stage([nn.Linear(3, 1)], loss)
    with pytest.raises(ValueError, match="in loss"):
        run(made, [torch.ones(2, 3)], again=True)
    assert made.tracker.get() == Position(Phase.LOSS, STEP, 0, -1)


def test_the_position_moves_through_backward() -> None:
    made = stage([])
    where: list[Position] = []

    class Note(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            x.register_hook(lambda _: where.append(made.tracker.get()))
            return x * 1

    made.layers = [nn.Linear(3, 3), Note(), nn.Tanh(), Note()]
    run(made, [torch.ones(2, 3)], again=False)
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
    for again in (False, True):
        layers = noisy()
        losses = run(stage(layers, noisy_loss), inputs, again=again)
        results.append((losses, gradients(layers)))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


def test_every_step_and_micro_batch_draws_anew() -> None:
    x = torch.ones(4, 6)
    made = stage(noisy(), noisy_loss)
    losses = run(made, [x, x], again=False, step=1) + run(made, [x, x], again=False, step=2)
    assert len(set(losses)) == 4
    assert run(stage(noisy(), noisy_loss), [x, x], again=True, step=2) == losses[2:]


def test_what_a_layer_draws_does_not_depend_on_the_grouping() -> None:
    layers = noisy()
    x = torch.ones(4, 6)
    whole = run(stage(layers, noisy_loss), [x], again=False)
    upper, lower = stage(layers[:2], None), stage(layers[2:], noisy_loss, first=2)
    for made in (upper, lower):
        begin(made, again=False, microbatches=1)
    upper.put_input(0, x, [False])
    lower.put_input(0, upper.forward(0).detach(), [True], None)
    lower.forward(0)
    assert [lower.losses.values[0].item()] == whole


def test_gradients_of_the_input_are_given_back() -> None:
    made = stage([nn.Identity()], None)
    begin(made, again=False, microbatches=1)
    a, b, ids = torch.ones(2), torch.ones(2), torch.tensor([1, 2])
    made.put_input(0, (a, [ids, b], a), [True, False, True])
    out = made.forward(0)
    assert out[0] is out[2]
    assert out[1][0] is ids
    assert [t.requires_grad for t in distinct_tensors(out)] == [True, False, True]
    given = made.backward(0, [torch.full((2,), 5.0), None])
    assert given[0] is not None
    assert given[0].tolist() == [5.0, 5.0]
    assert given[1] is None


def test_a_stage_forgets_a_micro_batch_after_its_backward() -> None:
    made = stage([nn.Linear(3, 1)])
    run(made, [torch.ones(2, 3)] * 4, again=True)
    assert made._kept == {}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, t: 1.0, "returned a float: it must return a scalar tensor"),
        (lambda o, t: None, "returned a NoneType"),
        (lambda o, t: o, r"returned a tensor of shape \(2, 3\): it must be a scalar"),
        (lambda o, t: (1.0, 2), "returned a float"),
        (lambda o, t: (o, 2), r"returned a tensor of shape \(2, 3\)"),
        (lambda o, t: (o.sum(), 2, 3), "returned a tuple"),
    ],
)
def test_a_loss_that_is_none(loss: Callable[[Any, Any], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(stage([nn.Linear(3, 3)], loss), [torch.ones(2, 3)], again=False)


def test_a_loss_of_one_element_is_a_scalar() -> None:
    made = stage([nn.Linear(3, 1)], lambda o, t: o.mean(0))
    begin(made, again=False, microbatches=1)
    made.put_input(0, torch.ones(2, 3), [False], None)
    made.forward(0)
    made.backward(0, [])


def test_a_layer_that_begins_to_change_its_input_is_refused() -> None:
    class Later(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return (x if self.calls < 2 else x.mul_(2)) * 1

    made = stage([Later(), nn.Linear(3, 1)])
    with pytest.raises(UsageError, match="use --recompute never"):
        run(made, [torch.ones(2, 3)] * 2, again=True)


def test_describe() -> None:
    x = torch.zeros(4, 8)
    assert describe(x) == "Tensor[4, 8] float32"
    assert describe({"a": x, "b": (x, torch.tensor(True), 3)}) == (
        "Tensor[4, 8] float32, Tensor[] bool"
    )
    assert describe(3) == ""


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
                made.begin(STEP, [weight], frozenset())
                made.put_input(0, x, [False], torch.zeros(()))
                made.forward(0)
                made.backward(0, [])
                value = made.losses.values[0]
            else:
                value = loss(layer(x), torch.zeros(())) * weight
                value.backward()
            found.append((value.detach(), *gradients([layer])))
        assert all(map(torch.equal, *found))


class Changes(nn.Module):
    """Its output requires grad the first time only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(2, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.linear(x)
        return y if self.calls == 1 else y.detach()


def test_an_output_that_stops_requiring_grad_when_recomputed_is_refused() -> None:
    made = stage([Changes()], None)
    begin(made, again=True, microbatches=1)
    made.put_input(0, torch.ones(1, 2), [False])
    made.forward(0)
    made.recompute(0)
    with pytest.raises(UsageError, match=r"1 tensors .* 0 when they were recomputed"):
        made.backward(0, [torch.ones(1, 2)])
