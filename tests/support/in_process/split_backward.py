"""Comparison of a backward in two parts with the whole one, and modules for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from pipeworker.worker.stage.split import DeferredBackward, backward_input


class Cut(torch.autograd.Function):
    """As the boundary of a stage."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, caught: list[Any], *tensors: Tensor) -> Any:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.caught[:] = gradients
        return (None, None, *(None for _ in gradients))


class Matmul(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        Matmul.calls += 1
        value, weight = ctx.saved_tensors
        return gradient @ weight.t(), value.t() @ gradient


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that cost."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.name()
        self.count += name.startswith(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"))
        return op(*args, **(kwargs or {}))


Forward = Callable[[nn.Module, Sequence[Tensor]], Any]
MICROBATCHES = 3


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def forward(
    module: nn.Module, inputs: Sequence[Tensor], run: Forward, caught: list[Any]
) -> tuple[list[Tensor], list[Tensor], list[GradientEdge]]:
    phony = torch.empty(0, requires_grad=True)
    inside = Cut.apply(phony, caught, *inputs) if inputs else ()  # type: ignore[no-untyped-call]
    edges = [get_gradient_edge(tensor) for tensor in inside]
    output = run(module, inside)
    outputs = [output] if isinstance(output, Tensor) else list(output)
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(root.shape, generator=generator).to(root.dtype) for root in roots]
    return roots, gradients, edges


def check(
    module: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    run: Forward = lambda module, inputs: module(*inputs),
) -> tuple[int, int, int]:
    """Compare over micro-batches, the second parts late; the matmuls of whole, first and second."""
    split = copy.deepcopy(module)
    whole, first, second = Calls(), Calls(), Calls()
    torch.manual_seed(0)
    batches = [[torch.randn(shape) for shape in shapes] for _ in range(MICROBATCHES)]
    expected = []
    for number, inputs in enumerate(batches):
        caught: list[Any] = [None] * len(inputs)
        torch.manual_seed(number)
        roots, gradients, _ = forward(module, inputs, run, caught)
        with whole:
            torch.autograd.backward(roots, gradients)
        expected.append(caught)
    deferred: list[DeferredBackward] = []
    for number, inputs in enumerate(batches):
        torch.manual_seed(number)
        roots, gradients, edges = forward(split, inputs, run, [])
        before = [copy.deepcopy(p.grad) for p in split.parameters()]
        with first:
            found, rest = backward_input(roots, gradients, edges)
        assert all(same(a, p.grad) for a, p in zip(before, split.parameters(), strict=True))
        assert len(found) == len(expected[number])
        assert all(same(a, b) for a, b in zip(found, expected[number], strict=True))
        deferred.append(rest)
        del roots, found, edges
        if number:
            with second:
                deferred.pop(0).run()
    with second:
        deferred.pop().run()
    for (name, a), b in zip(split.named_parameters(), module.parameters(), strict=True):
        assert same(a.grad, b.grad), name
    for (name, a), b in zip(split.named_buffers(), module.buffers(), strict=True):  # type: ignore[assignment]
        assert torch.equal(a, b), name
    return whole.count, first.count, second.count


class Mixed(nn.Module):
    """All that may make a graph more than a chain."""

    def __init__(self, run: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.free = nn.Parameter(torch.randn(5, 8))
        self.weights = nn.Parameter(torch.randn(16, 8))
        self.unused = nn.Parameter(torch.randn(3))
        self.run = run

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, inputs)
