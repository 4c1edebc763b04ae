"""The private names of torch: each does what pipeworker relies on.

``tests/test_imports.py`` checks that this file names each.
"""

from __future__ import annotations

import configparser
import re
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.overrides import TorchFunctionMode

from pipeworker.errors import UsageError
from pipeworker.worker import internals
from support.jobs import Jobs
from support.ranks import Scripts, script
from support.slow import slow

ROOT = Path(__file__).parents[2]
FOUND = re.findall(r'_find\("(.+?)"\)', Path(internals.__file__).read_text(encoding="utf-8"))
"""The names that are looked up when the module is imported."""


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
    """``torch._C._FunctionBase.apply``."""
    for apply in (internals.apply_of(_Twice), _Twice.apply):
        x = torch.ones(2, requires_grad=True)
        y = apply(x, 5)
        assert isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)
        torch.autograd.backward(y.sum())
        assert y.tolist() == [5, 5]
        assert x.grad is not None
        assert x.grad.tolist() == [5, 5]


def test_storage_uses_counts_the_users_of_a_storage() -> None:
    """``torch._C._storage_Use_Count``, ``UntypedStorage._cdata``."""
    x = torch.zeros(4)
    alone = internals.storage_uses(x)
    views = [x[1:], x.detach(), x.view(2, 2)]
    assert internals.storage_uses(x) == alone + 3
    array = x.numpy()
    assert internals.storage_uses(x) > alone + 3
    del views, array
    assert internals.storage_uses(x) == alone


def test_buffers_of_is_the_modules_own_dict() -> None:
    """``torch.nn.Module._buffers``, ``torch.nn.modules.batchnorm._BatchNorm``."""
    norm = nn.BatchNorm1d(2)
    internals.buffers_of(norm)["running_mean"] = torch.ones(2)
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [1, 1]
    assert isinstance(norm, internals.BatchNorm)
    assert all(
        isinstance(kind(2), internals.BatchNorm)
        for kind in (nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    )


def test_version_of_counts_changes_in_place() -> None:
    """``torch.Tensor._version``."""
    x = torch.zeros(2)
    before = internals.version_of(x)
    x.add_(1)
    x.detach().mul_(2)
    assert internals.version_of(x) == before + 2
    assert internals.version_of(x + 1) == 0


def test_base_of_returns_the_tensor_whose_version_counter_a_view_has() -> None:
    """``torch.Tensor._base``."""
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


def test_view_of_may_be_changed_in_place() -> None:
    leaf = torch.ones(2, requires_grad=True)
    view = internals.view_of(leaf)
    assert view.data_ptr() == leaf.data_ptr()
    assert not view.is_leaf
    assert view.requires_grad
    view.add_(1)
    assert leaf.tolist() == [2, 2]


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
    """``torch.Tensor._backward_hooks``."""
    one, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    seen: list[float] = []
    one.register_hook(lambda grad: seen.append(grad[0].item()))  # type: ignore[no-untyped-call]
    internals.move_hooks(one, other)
    torch.autograd.backward((other * 3).sum())
    assert seen == [3.0]


def test_gloo_options_have_a_timeout_and_a_device() -> None:
    """``ProcessGroupGloo._Options``, and its ``_timeout`` and ``_devices``."""
    device = internals.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    options = internals.gloo_options([device], timedelta(days=3))
    assert options._timeout == timedelta(days=3)
    assert options._devices == [device]


def test_nccl_has_options_with_a_timeout() -> None:
    """``torch._C._distributed_c10d.ProcessGroupNCCL``."""
    if not dist.is_nccl_available():
        pytest.skip("this torch is built without NCCL")
    kind, options = internals.nccl_kind()
    assert options._timeout == timedelta(days=30)
    assert callable(kind.eager_connect_single_device)


def test_the_default_store_needs_a_process_group() -> None:
    """``torch.distributed.distributed_c10d._get_default_store``."""
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


def test_stores_fake_tensors_and_pytree() -> None:
    prefixed = internals.PrefixStore("p", HashStore())
    prefixed.set("a", "1")
    assert prefixed.get("a") == b"1"
    assert issubclass(internals.TCPStore, internals.Store)
    with internals.FakeTensorMode() as fake:
        assert fake.from_tensor(torch.ones(2)).shape == (2,)
        assert torch.empty(1 << 45).shape == (1 << 45,)
    internals.preload()
    assert "torch._dynamo" in sys.modules


def test_pytree_flattens_maps_and_knows_the_registered_classes() -> None:
    """``torch.utils._pytree``."""
    tree, pytree = {"a": [1, (2,)]}, internals.pytree
    leaves, spec = pytree.tree_flatten(tree)
    assert leaves == pytree.tree_leaves(tree) == [1, 2]
    assert pytree.tree_unflatten([3, 4], spec) == {"a": [3, (4,)]}
    assert pytree.tree_map(str, tree) == pytree.tree_map_only(int, str, tree)
    assert pytree.tree_map(str, tree) == {"a": ["1", ("2",)]}
    assert pytree.SUPPORTED_NODES[dict].flatten_fn({"a": 1})[0] == [1]
    name = pytree.SUPPORTED_SERIALIZED_TYPES[dict].serialized_type_name
    assert name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND
    assert dict in pytree.BUILTIN_TYPES


def test_dense_parts_are_those_of_a_sparse_tensor_itself() -> None:
    """``torch.Tensor._indices``, ``torch.Tensor._values``."""
    x = torch.tensor([0.0, 2.0]).to_sparse()
    x = torch.cat([x, x])  # marked as not coalesced
    indices, values = internals.dense_parts(x)
    assert internals.storage_key(values) == internals.storage_key(internals.dense_parts(x)[1])
    assert (indices.tolist(), values.tolist()) == ([[1, 3]], [2, 2])


def test_observing_sees_each_operation_and_what_it_makes() -> None:
    """``torch.utils._python_dispatch.TorchDispatchMode``."""
    x = torch.zeros(4)
    made: list[str] = []
    with internals.observing(lambda func, *_: made.append(f"{func.overloadpacket} {func.is_view}")):
        y = (x * 2).view(2, 2)
    assert made == ["aten.mul False", "aten.view True"]
    key, storage = internals.storage_key(y), y.untyped_storage()
    lives = weakref.ref(storage)
    del storage
    assert lives() is not None
    assert internals.storage_key(y[0]) == key != internals.storage_key(x)


class _Loads(nn.Module):
    called = False

    def _load_from_state_dict(self, *_: Any) -> None:
        self.called = True


def test_loads_itself_finds_an_override_outside_of_torch() -> None:
    """``torch.nn.Module._load_from_state_dict``."""
    module = _Loads()
    module.load_state_dict({})
    assert module.called
    assert internals.loads_itself(module)
    assert not internals.loads_itself(nn.BatchNorm1d(2))


def test_unsaved_buffers_are_those_that_are_not_persistent() -> None:
    """``torch.nn.Module._non_persistent_buffers_set``."""
    module = nn.Module()
    module.register_buffer("one", torch.ones(1))
    module.register_buffer("two", torch.ones(1), persistent=False)
    assert [*internals.unsaved_buffers_of(module)] == ["two"]


def test_hooks_that_are_taken_do_not_run_until_they_are_put_back() -> None:
    """``torch.nn.Module._forward_hooks``, ``_forward_pre_hooks``, ``_backward_hooks``."""
    module, ran = nn.Identity(), []
    module.register_forward_pre_hook(lambda *_: ran.append(1))
    module.register_forward_hook(lambda *_: ran.append(2))
    taken = internals.take_hooks(module)
    module(torch.ones(1))
    assert not ran
    internals.put_hooks(module, taken)
    module(torch.ones(1))
    assert ran == [1, 2]


def test_saved_tensor_hooks_are_those_in_force() -> None:
    """``torch._C._autograd._top_saved_tensors_default_hooks``."""
    assert internals.saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert internals.saved_tensor_hooks() is not None


def test_has_backward_hooks_sees_both_kinds() -> None:
    """``torch.nn.Module._backward_pre_hooks``."""
    modules = nn.Identity(), nn.Identity(), nn.Identity()
    modules[0].register_full_backward_hook(lambda *_: None)
    modules[1].register_full_backward_pre_hook(lambda *_: None)
    assert [*map(internals.has_backward_hooks, modules)] == [True, True, False]


def test_changed_by_names_the_argument_that_an_operator_changes() -> None:
    """``torch._ops.OpOverload._schema``."""
    one, two = torch.ones(1), torch.ones(1)
    (found,) = internals.changed_by(torch.ops.aten.add_.Tensor, (one, two), {})
    assert found is one


class _Seeing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_suspended_mode_sees_no_call() -> None:
    """``torch.overrides._push_mode``, ``torch.overrides._pop_mode``."""
    with _Seeing() as mode, internals.suspended(mode):
        torch.ones(1)
    assert not mode.seen


def test_compilations_are_reported_and_have_no_limit_of_graphs() -> None:
    """``torch._dynamo.callback.callback_handler``, ``torch._dynamo.config``."""
    with internals.calling_around_compilations(print, print):
        internals.allow_any_number_of_graphs()  # a limit that is gone raises an AttributeError


# A name that is missing.


def test_a_missing_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.check_names()
    monkeypatch.setattr(internals, "missing", ["torch._gone"])
    monkeypatch.setattr(torch, "__version__", "9.9")
    message = (
        r"^torch 9\.9: its private name torch\._gone is missing; install torch 2\.13 to 2\.15$"
    )
    with pytest.raises(UsageError, match=message):
        internals.check_names()


WITHOUT = """
import os, pkgutil, sys, torch
resolve = pkgutil.resolve_name
def without(name):
    if name == missing:
        raise AttributeError(name)
    return resolve(name)
pkgutil.resolve_name = without
for missing in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        for module in [m for m in sys.modules if m.startswith("pipeworker.worker")]:
            del sys.modules[module]
        try:
            import pipeworker.worker.worker
            pipeworker.worker.internals.check_names()
        except BaseException as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


@slow
def test_a_missing_name_is_named_after_all_is_imported(jobs: Jobs) -> None:
    assert len(FOUND) > 10
    stdout, stderr = jobs.python("-c", WITHOUT, *FOUND).communicate(timeout=60)
    told = f"torch {torch.__version__}: its private name {{}} is missing; install torch"
    assert [line.removesuffix(" 2.13 to 2.15") for line in stdout.splitlines()] == [
        told.format(name) for name in FOUND
    ], stderr


def test_a_worker_checks_torch_before_it_loads_the_job(scripts: Scripts) -> None:
    """However it was started: this one is in a process of the user's."""
    source = script("""
        import torch
        from pipeworker.worker import internals

        internals.missing.append("torch._gone")
        pipeworker.Pipeline(
            [torch.nn.Linear(2, 2)],
            loss=lambda output, target: output.sum(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            run_dir="run",
        )
    """)
    (ended,) = scripts.start(source, 1, alone=True).end()
    message = "its private name torch._gone is missing; install torch 2.13 to 2.15"
    assert f"UsageError: torch {torch.__version__}: {message}" in ended.stderr


def test_the_versions_are_those_of_the_metadata_and_the_readme() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    first, last = (int(part.split(".")[1]) for part in internals.SUPPORTED.split(" to "))
    assert f"\ntorch>=2.{first},<2.{last + 1}\n" in parser["options"]["install_requires"]
    assert f"torch {internals.SUPPORTED}" in (ROOT / "README.md").read_text(encoding="utf-8")
