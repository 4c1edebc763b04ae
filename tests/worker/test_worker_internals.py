"""The private names of torch: each does what pipeworker relies on."""

from __future__ import annotations

import copy
import sys
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from pipeworker.worker import internals


def test_the_engine_accumulates_like_backward() -> None:
    found = []
    engine = lambda *given: internals.engine(*given, False, False, (), True, True)  # noqa: E731
    for run in (engine, torch.autograd.backward):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        for _ in range(2):
            y = layer(torch.randn(4, 3))
            run((y, y * 2), (torch.ones(4, 2), torch.ones(4, 2)))
        found.append([p.grad for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None)


def test_the_engine_returns_gradients_and_accumulates_none() -> None:
    x = torch.ones(2, requires_grad=True)
    weight = torch.full((2,), 3.0, requires_grad=True)
    (grad,) = internals.engine((x * weight,), (torch.ones(2),), False, False, (x,), True, False)
    assert grad.tolist() == [3, 3]
    assert x.grad is weight.grad is None


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: int) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


def test_apply_of_behaves_like_apply() -> None:
    for apply in (internals.apply_of(_Twice), _Twice.apply):
        x = torch.ones(2, requires_grad=True)
        y = apply(x, 5)
        torch.autograd.backward(y.sum())
        assert y.tolist() == [5, 5]
        assert x.grad is not None
        assert x.grad.tolist() == [5, 5]


def test_storage_uses_counts_the_users_of_a_storage() -> None:
    x = torch.zeros(4)
    alone = internals.storage_uses(x)
    views = [x[1:], x.detach(), x.view(2, 2)]
    assert internals.storage_uses(x) == alone + 3
    array = x.numpy()
    assert internals.storage_uses(x) > alone + 3
    del views, array
    assert internals.storage_uses(x) == alone


def test_buffers_of_is_the_modules_own_dict() -> None:
    norm = nn.BatchNorm1d(2)
    internals.buffers_of(norm)["running_mean"] = torch.ones(2)
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [1, 1]
    assert isinstance(norm, internals.BatchNorm)
    assert all(
        isinstance(kind(2), internals.BatchNorm)
        for kind in (nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    )


def test_sequence_of_orders_the_nodes_of_a_graph_and_puts_leaves_last() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    x = torch.ones(1, requires_grad=True)
    first = x + 1
    apply: Any = Double.apply
    second = apply(first)
    nodes: list[Any] = [first.grad_fn, second.grad_fn, (second + 1).grad_fn]
    nodes.append(nodes[0].next_functions[0][0])
    numbers = [internals.sequence_of(node) for node in nodes]
    assert numbers == sorted(set(numbers))


def test_version_of_counts_changes_in_place() -> None:
    x = torch.zeros(2)
    before = internals.version_of(x)
    x.add_(1)
    x.detach().mul_(2)
    assert internals.version_of(x) == before + 2
    assert internals.version_of(x + 1) == 0


def test_base_of_returns_the_tensor_whose_version_counter_a_view_has() -> None:
    x = torch.zeros(6)
    assert internals.base_of(x) is None
    assert internals.base_of(x[2:].view(2, 2)) is x
    first, second = torch.unsafe_chunk(x, 2)
    assert internals.base_of(first) is None
    first.add_(1)
    assert (internals.version_of(first), internals.version_of(second)) == (1, 0)


def test_alias_of_returns_a_view_with_a_node_of_its_own() -> None:
    y = torch.ones(2, requires_grad=True) * 2
    alias = internals.alias_of(y)
    assert alias.data_ptr() == y.data_ptr()
    assert alias.grad_fn is not None
    assert alias.grad_fn is not y.grad_fn
    y.add_(1)
    assert internals.version_of(alias) == internals.version_of(y)


def test_multiply_and_divide_work_in_place() -> None:
    tensors = [torch.tensor([3.0, 7.0]), torch.tensor(1.0)]
    expected = [(t / 3).mul(0.1) for t in tensors]
    addresses = [t.data_ptr() for t in tensors]
    internals.divide(tensors, 3.0)
    internals.multiply(tensors, 0.1)
    assert all(map(torch.equal, tensors, expected))
    assert [t.data_ptr() for t in tensors] == addresses


def test_the_accumulating_node_of_a_leaf_can_be_called() -> None:
    x = torch.ones(2, requires_grad=True)
    product = (x * 2).grad_fn
    assert product is not None
    node: Any = product.next_functions[0][0]
    kind = type(node)
    assert kind is internals.AccumulateGrad
    with torch.no_grad():
        node(torch.full((2,), 4.0))
    assert x.grad is not None
    assert x.grad.tolist() == [4, 4]


def test_the_prefix_finds_the_saved_tensors_of_a_node() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        hooked = torch.tanh(x).grad_fn
    for node, expected in ((torch.tanh(x).grad_fn, False), (hooked, True)):
        saved = [n for n in dir(type(node)) if n.startswith(internals.SAVED_PREFIX)]
        assert saved == ["_raw_saved_result"]
        assert (getattr(getattr(node, saved[0]), "unpack_hook", None) is not None) is expected


def test_move_hooks_moves_them() -> None:
    one, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    seen: list[float] = []
    one.register_hook(lambda grad: seen.append(grad[0].item()))  # type: ignore[no-untyped-call]
    internals.move_hooks(one, other)
    torch.autograd.backward((other * 3).sum())
    assert seen == [3.0]


def test_a_module_moves_to_a_device_of_another_backend_with_its_parameters() -> None:
    """The device ``meta`` replaces parameters as a device of a backend outside of torch does."""
    calls: list[str] = []
    first, second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    weight = second.weight = first.weight
    weight.register_hook(lambda _: calls.append("hook"))  # type: ignore[no-untyped-call]
    weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda _: calls.append("added")
    )
    assert first.bias is not None
    first.bias.requires_grad_(False)
    weight.grad = torch.ones(2, 2)
    seen = weakref.ref(weight)
    for layer in (first, second):
        assert internals.move_module(layer, torch.device("meta")) is layer
    assert first.weight is second.weight is weight is seen()
    assert weight.is_meta
    assert weight.grad.is_meta
    assert (type(weight), weight.is_leaf) == (nn.Parameter, True)
    assert first.bias.is_meta
    assert not first.bias.requires_grad
    torch.autograd.backward(second(first(torch.ones(1, 2, device="meta"))).sum())
    assert calls == ["hook", "added"]


def test_gloo_options_have_a_timeout_and_a_device() -> None:
    device = internals.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    options = internals.gloo_options([device], timedelta(days=3))
    assert options._timeout == timedelta(days=3)
    assert options._devices == [device]


def test_the_default_store_needs_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="process group has not been initialized"):
        internals.default_store()
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        internals.default_store().set("a", "1")
        assert isinstance(internals.default_store(), internals.Store)
        assert internals.default_store().get("a") == b"1"
    finally:
        dist.destroy_process_group()


def test_a_copy_of_a_fake_tensor_has_the_same_mode() -> None:
    """A copied mode would free storages that others use."""
    with internals.shared_fake_mode() as mode:
        layer = nn.Linear(2, 2)
    copied = copy.deepcopy(layer)
    weight: Any = copied.weight
    assert copied is not layer
    assert weight is not layer.weight
    assert weight.fake_mode is mode


def test_stores_fake_tensors_and_pytree() -> None:
    prefixed = internals.PrefixStore("p", HashStore())
    prefixed.set("a", "1")
    assert prefixed.get("a") == b"1"
    assert issubclass(internals.TCPStore, internals.Store)
    with internals.FakeTensorMode() as fake:
        assert fake.from_tensor(torch.ones(2)).shape == (2,)
        assert torch.empty(1 << 45).shape == (1 << 45,)
    assert internals.pytree.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    internals.preload()
    assert "torch._dynamo" in sys.modules
