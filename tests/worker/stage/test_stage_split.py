"""Two parts of a backward give the bits of the whole."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipeworker.worker.stage.split import backward_input
from support.draws import draws
from support.in_process.split_backward import MICROBATCHES, Matmul, Mixed, check, forward, same


def mlp(depth: int = 4, width: int = 8) -> nn.Sequential:
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU(inplace=True))]
    return nn.Sequential(*layers)


def test_no_matmul_of_an_mlp_is_repeated_and_half_is_deferred() -> None:
    assert check(mlp(), [(5, 8)]) == (8 * MICROBATCHES, 4 * MICROBATCHES, 4 * MICROBATCHES)


def test_no_matmul_of_a_transformer_layer_is_repeated() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    whole, first, second = check(layer, [(3, 4, 8)])
    assert first + second == whole
    assert second == 4 * MICROBATCHES  # the weights of the two projections and the two linears


def test_the_first_stage_defers_everything() -> None:
    table = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8))
    tokens = torch.tensor([[1, 2, 1], [6, 0, 1]])
    whole, first, second = check(table, [], lambda module, _: module(tokens))
    assert (first, second) == (0, whole)


def _slices(m: Any, x: Any) -> Any:
    value = m.a(x[0]).clone()
    value[1:3] = m.b(x[0][1:3]) * m.free[1:3]
    return m.norm(value)


def _splits(m: Any, x: Any) -> Any:
    first, _, third, _ = m.a(x[0]).split(2, 1)
    left, right = m.weights.chunk(2)
    return F.linear(torch.cat([first, third] * 2, 1), left), F.linear(x[0], right) + m.free


def _autocast(m: Any, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return m.norm(m.a(torch.relu_(m.a(x[0]))) + m.b(x[0]))


def _offloaded(m: Any, x: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        value = m.a(x[0])
    return m.b(value)


class Scale(torch.autograd.Function):
    """One gradient of two is None."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return value * 2, other * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        return first * 2, None


MIXED: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "shared in a chain": (1, lambda m, x: m.a(torch.tanh(m.a(torch.tanh(m.a(x[0])))))),
    "shared in parallel": (1, lambda m, x: m.a(x[0]) + m.a(x[0] * 2) * m.a(x[0] + 1)),
    "shared in chain and parallel": (1, lambda m, x: m.a(m.a(x[0]) + m.b(x[0])) * m.a(x[0])),
    "shared weight with another bias": (
        1,
        lambda m, x: F.linear(m.a(x[0]), m.a.weight.t(), m.b.bias) + m.b(x[0]),
    ),
    "a branch without the input": (1, lambda m, x: x[0] * m.a(m.free) + m.b(m.free)),
    "a root without the input": (1, lambda m, x: (m.a(x[0]), m.a(m.free), m.free * 2)),
    "a root twice": (1, lambda m, x: (m.a(x[0]),) * 2),
    "roots on a chain": (1, lambda m, x: (m.a(x[0]), m.b(m.a(x[0])), m.norm(x[0]))),
    "a root above another": (1, lambda m, x: (y := m.a(x[0]), m.b(y), torch.tanh(y))),
    "a parameter as root": (1, lambda m, x: (m.free, x[0] * m.free)),
    "an input as root": (2, lambda m, x: (x[0], m.a(x[1]), x[1])),
    "an unused input": (3, lambda m, x: m.a(x[0]) + m.free * x[2]),
    "no input used": (1, lambda m, x: m.a(m.free)),
    "many uses": (2, lambda m, x: sum(m.a(x[0]) * i + x[1] * m.free for i in range(5))),
    "input changed in place": (1, lambda m, x: m.a(x[0].relu_()).relu_() * m.free),
    "slices changed in place": (1, _slices),
    "some outputs of a split": (1, _splits),
    "stack and unbind": (1, lambda m, x: torch.stack([m.a(x[0]), m.b(x[0])]).unbind()[1]),
    "expanded and transposed": (1, lambda m, x: (m.a(x[0]).t() @ m.free).expand(3, 8, 8)),
    "bf16 autocast": (1, _autocast),
    "a function of the user": (
        1,
        lambda m, x: m.b(Matmul.apply(m.a(x[0]), m.b.weight)) + Matmul.apply(m.free, m.b.weight),  # type: ignore[no-untyped-call]
    ),
    "a function that gives None": (
        2,
        lambda m, x: (z := Scale.apply(m.a(x[0]), m.b(x[1])), z[0] + z[1])[1],  # type: ignore[no-untyped-call]
    ),
    "checkpoint": (
        1,
        lambda m, x: m.norm(
            checkpoint(lambda y: m.b(F.dropout(torch.tanh(m.a(y)))), x[0], use_reentrant=False)
        ),
    ),
    "saved on the cpu": (1, _offloaded),
}


@pytest.mark.parametrize("name", MIXED)
def test_bits_are_those_of_the_whole_for(name: str) -> None:
    inputs, run = MIXED[name]
    torch.manual_seed(0)
    whole, first, second = check(Mixed(run), [(5, 8)] * inputs)
    assert first + second <= whole


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)), (4, 2, 6, 6)),
        (nn.Sequential(nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 3, groups=2)), (2, 4, 7)),
        (nn.Sequential(ChannelsLast(), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)), (2, 4, 3, 3)),
        (nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, activation="gelu"), (3, 4, 8)),
        (nn.LSTM(4, 4, 2), (3, 2, 4)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (2, 4)),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), (2, 4)),
        (nn.Bilinear(3, 3, 4), (2, 3)),
        (nn.PReLU(), (2, 3)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_bits_are_those_of_the_whole_for_modules(module: nn.Module, shape: tuple[int, ...]) -> None:
    def run(module: Any, inputs: Any) -> Any:
        if isinstance(module, nn.Bilinear):
            return module(inputs[0], inputs[0])
        output = module(*inputs)
        return output[0] if isinstance(module, nn.LSTM) else output

    whole, first, second = check(module, [shape], run)
    assert first + second <= whole


def test_attention_over_a_learned_memory_is_the_same() -> None:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = nn.Parameter(torch.randn(6, 2, 8))
            self.attention = nn.MultiheadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            value: Tensor = self.attention(x, self.memory, self.memory, need_weights=False)[0]
            return value + self.attention(x, x, x)[0]  # type: ignore[no-any-return]

    check(Memory(), [(3, 2, 8)])


def test_a_leaf_that_is_no_parameter_gets_its_gradient() -> None:
    leaf = torch.ones(4, requires_grad=True)
    caught: list[Any] = []
    roots, gradients, edges = forward(
        nn.Identity(), [torch.ones(2, 4)], lambda _, x: x[0] * leaf, caught
    )
    _, rest = backward_input(roots, gradients, edges)
    assert leaf.grad is None
    rest.run()
    assert torch.equal(leaf.grad, gradients[0].sum(0))  # type: ignore[arg-type]


def _chain(m: Any, x: Any) -> Any:
    return m.a(torch.tanh(m.a(x[0])))


@pytest.mark.parametrize("run", [_chain, lambda m, x: m.a(x[0])], ids=["chain", "single"])
def test_hooks_of_parameters_fire_once_and_what_they_return_counts(run: Any) -> None:
    module = Mixed(run)
    fired = []
    module.a.weight.register_hook(lambda g: (fired.append("tensor"), g * 2)[1])  # type: ignore[func-returns-value, no-untyped-call]
    module.a.weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))  # type: ignore[no-untyped-call]
    roots, gradients, edges = forward(module, [torch.randn(5, 8)], lambda m, x: m(*x), [])
    torch.autograd.backward(roots, gradients, retain_graph=True)
    assert fired == ["tensor", "accumulated"]
    expected, module.a.weight.grad = module.a.weight.grad, None
    fired.clear()
    _, rest = backward_input(roots, gradients, edges)
    rest.run()
    assert fired == ["tensor", "accumulated"]
    assert same(module.a.weight.grad, expected)


def test_hooks_of_modules_fire_once_in_the_first_part() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.linear(x) + y  # type: ignore[no-any-return]

    fired = []
    module = Mixed(lambda m, x: m.a(m.two(m.b(x[0]), m.free)))
    module.two = Two()
    for name, child in module.named_modules():
        child.register_full_backward_hook(lambda *_, name=name: fired.append(name))
        child.register_full_backward_pre_hook(lambda *_, name=name: fired.append(name))
    roots, gradients, edges = forward(module, [torch.randn(5, 8)], lambda m, x: m(*x), [])
    torch.autograd.backward(roots, gradients, retain_graph=True)
    expected = fired[:]
    fired.clear()
    _, rest = backward_input(roots, gradients, edges)
    assert fired == expected
    rest.run()
    assert fired == expected


def test_a_function_of_the_user_is_called_once() -> None:
    module = Mixed(lambda m, x: Matmul.apply(m.a(x[0]), m.b.weight))  # type: ignore[no-untyped-call]
    roots, gradients, edges = forward(module, [torch.randn(5, 8)], lambda m, x: m(*x), [])
    Matmul.calls = 0
    _, rest = backward_input(roots, gradients, edges)
    rest.run()
    assert Matmul.calls == 1


def test_a_checkpoint_is_recomputed_once() -> None:
    count = 0

    def counted(m: Any, y: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return m.b(torch.tanh(m.a(y)))  # type: ignore[no-any-return]

    module = Mixed(lambda m, x: m.norm(checkpoint(counted, m, x[0], use_reentrant=False)))
    roots, gradients, edges = forward(module, [torch.randn(5, 8)], lambda m, x: m(*x), [])
    _, rest = backward_input(roots, gradients, edges)
    rest.run()
    assert count == 2


def test_nothing_behind_an_input_is_reached() -> None:
    module = Mixed(lambda m, x: m.a(x[0]))
    value = module.free * 2
    output = module(value)
    found, rest = backward_input([output], [torch.ones_like(output)], [value])
    rest.run()
    assert torch.equal(found[0], torch.ones(5, 8) @ module.a.weight)  # type: ignore[arg-type]
    assert module.a.weight.grad is not None
    assert module.free.grad is None


@pytest.mark.parametrize("run", [_chain, lambda m, x: m.a(x[0])], ids=["chain", "single"])
def test_gradients_accumulate_in_place(run: Any) -> None:
    module = Mixed(run)
    before = torch.ones(8, 8)
    module.a.weight.grad = before
    roots, gradients, edges = forward(module, [torch.randn(5, 8)], lambda m, x: m(*x), [])
    _, rest = backward_input(roots, gradients, edges)
    rest.run()
    assert module.a.weight.grad is before
    assert not torch.equal(before, torch.ones(8, 8))
    assert not before.requires_grad


def test_a_deep_graph_is_walked() -> None:
    def run(m: Any, x: Any) -> Any:
        value = x[0]
        for _ in range(5000):
            value = value + m.free
        return value

    check(Mixed(run), [(5, 8)])


def test_after_the_second_part_nothing_is_kept() -> None:
    watched: list[Any] = []

    def run(m: Any, x: Any) -> Any:
        value = torch.tanh(m.a(x[0]))
        watched.append(weakref.ref(value))
        return m.b(value)

    roots, gradients, edges = forward(Mixed(run), [torch.randn(5, 8)], lambda m, x: m(*x), [])
    watched.append(weakref.ref(gradients[0]))
    _, rest = backward_input(roots, gradients, edges)
    roots.clear()
    gradients.clear()
    edges.clear()
    assert None not in [w() for w in watched]
    rest.run()
    gc.collect()
    assert [w() for w in watched] == [None, None]
    rest.run()


@st.composite
def programs(draw: Any) -> list[tuple[str, int, int]]:
    """Steps, each an operation on two earlier values."""
    names = ["a", "b", "norm", "bias", "tanh", "relu_", "add", "mul", "user", "split", "cat", "set"]
    steps = []
    for number in range(draw(st.integers(1, 12))):
        index = st.integers(0, number + 2)
        steps.append((draw(st.sampled_from(names)), draw(index), draw(index)))
    return steps


def _interpret(m: Any, inputs: Sequence[Tensor], steps: list[tuple[str, int, int]]) -> Any:
    values = [inputs[0], inputs[1], m.free * 1]
    for name, i, j in steps:
        x, y = values[i], values[j]
        if name in ("a", "b", "norm"):
            values.append(getattr(m, name)(x))
        elif name == "bias":
            values.append(x * m.a.bias + m.free)
        elif name == "tanh":
            values.append(torch.tanh(x))
        elif name == "relu_":
            values.append((x + 0).relu_())
        elif name == "add":
            values.append(x + y)
        elif name == "mul":
            values.append(x * y)
        elif name == "user":
            values.append(Matmul.apply(x, m.b.weight))  # type: ignore[no-untyped-call]
        elif name == "split":
            left, right = m.b(x).chunk(2, 1)
            values.append(torch.cat([left, left * 2], 1) if i > j else torch.cat([right, left], 1))
        elif name == "cat":
            values.append(F.linear(torch.cat([x, y], 1), m.weights.t()))
        else:
            value = x.clone()
            value[:, 2:4] = y[:, :2] * m.a.bias[:2]
            values.append(value)
    return [values[-1], values[len(values) // 2]]


@settings(max_examples=draws(20), deadline=None)
@given(programs())
def test_any_small_program_has_the_bits_of_the_whole(steps: list[tuple[str, int, int]]) -> None:
    torch.manual_seed(0)
    module = Mixed(lambda m, x: _interpret(m, x, steps))
    whole, first, second = check(module, [(5, 8), (5, 8)])
    assert first + second <= whole
