"""A check of the private names of torch: each exists, and does what pipeworker relies on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

from pipeworker.errors import UsageError
from pipeworker.worker import internals

SUPPORTED = "2.13 to 2.15"
"""The versions of torch that the metadata allows."""


def check(*, compiles: bool = False, behaviours: bool = True) -> None:
    """Check each private name by what it does, in a few milliseconds.

    What only an accelerator can test is checked to exist, and so are fake tensors: what they need
    takes a second to import, and the survey uses real tensors if they fail.

    Args:
        compiles: whether the job compiles its layers; this too takes a second to import.
        behaviours: whether to check what the names do; if not, only that each exists.

    Raises:
        UsageError: torch lacks a name, or its behaviour is another one.
    """
    if compiles:
        internals.preload()
    if internals.missing:
        raise _unsupported(internals.missing[0], "is missing")
    if not behaviours:
        return
    # The user's process may have other modes and another default device. A device in force makes
    # every call slower.
    other = torch.get_default_device() != torch.device("cpu")
    on_cpu = torch.device("cpu") if other else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), on_cpu:
        for name, works in (BEHAVIOURS | (COMPILER if compiles else {})).items():
            try:
                if not works():
                    raise _unsupported(name, "behaves differently")
            except (ImportError, AttributeError):
                raise _unsupported(name, "is missing") from None
            except (TypeError, ValueError, RuntimeError) as error:
                raise _unsupported(name, f"behaves differently: {error}") from error


def _unsupported(name: str, problem: str) -> UsageError:
    return UsageError(
        f"torch {torch.__version__}: its private name {name} {problem}; install torch {SUPPORTED}"
    )


def _pytree_works() -> bool:
    tree = {"a": [1, (2,)]}
    leaves, spec = internals.pytree.tree_flatten(tree)
    entry = internals.pytree.SUPPORTED_SERIALIZED_TYPES[dict]
    return (
        leaves == internals.pytree.tree_leaves(tree) == [1, 2]
        and internals.pytree.tree_unflatten([3, 4], spec) == {"a": [3, (4,)]}
        and internals.pytree.tree_map(str, tree)
        == internals.pytree.tree_map_only(int, str, tree)
        == {"a": ["1", ("2",)]}
        and internals.pytree.SUPPORTED_NODES[dict].flatten_fn({"a": 1})[0] == [1]
        and entry.serialized_type_name != internals.pytree.NO_SERIALIZED_TYPE_NAME_FOUND
        and dict in internals.pytree.BUILTIN_TYPES
    )


def _engine_works() -> bool:
    x, weight = _leaf(), _leaf()
    product = x * weight
    (gradient,) = internals.engine((product,), (torch.ones(2),), True, False, (x,), True, False)
    untouched = x.grad is None is weight.grad
    internals.engine((product,), (torch.ones(2),), False, False, (), True, True)
    return untouched and gradient.tolist() == _values(x.grad) == _values(weight.grad) == [3, 3]


def _accumulator_works() -> bool:
    x = _leaf()
    node: Any = _node(x * 2).next_functions[0][0]
    with torch.no_grad():
        node(torch.ones(2))
    return type(node) is internals.AccumulateGrad and _values(x.grad) == [1, 1]


def _sequence_works() -> bool:
    nodes: list[Any] = [_node(_leaf() * 2) for _ in range(2)]
    nodes.append(nodes[0].next_functions[0][0])
    first, second, leaf = map(internals.sequence_of, nodes)
    return first < second < leaf


def _prefix_works() -> bool:
    plain = _node(torch.tanh(_leaf()))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        hooked = _node(torch.tanh(_leaf()))
    saved = [getattr(node, f"{internals.SAVED_PREFIX}result") for node in (plain, hooked)]
    tensors = all(isinstance(one.data, torch.Tensor) for one in saved)
    return tensors and saved[0].unpack_hook is None and callable(saved[1].unpack_hook)


def _sparse_parts_work() -> bool:
    x = torch.tensor([0.0, 2.0]).to_sparse()
    x = torch.cat([x, x])  # marked as not coalesced
    indices, values = internals.dense_parts(x)
    shared = internals.storage_key(values) == internals.storage_key(internals.dense_parts(x)[1])
    return shared and indices.tolist() == [[1, 3]] and _values(values) == [2, 2]


def _version_works() -> bool:
    x = torch.zeros(2)
    before = internals.version_of(x)
    x.detach().add_(1)
    return internals.version_of(x) == before + 1


def _base_works() -> bool:
    x = torch.zeros(2)
    return internals.base_of(x[1:]) is x and internals.base_of(x) is None


def _buffers_work() -> bool:
    norm, value = nn.BatchNorm1d(2), torch.ones(2)
    internals.buffers_of(norm)["running_mean"] = value
    return norm.running_mean is value


def _submodules_work() -> bool:
    module = nn.Module()
    held = internals.submodules_of(module)
    module.one = nn.Identity()
    return [*held] == ["one"]


def _alias_works() -> bool:
    y = _leaf() * 2
    alias = internals.alias_of(y)
    y.add_(1)
    other = alias.grad_fn not in (None, y.grad_fn)
    return (
        other
        and alias.data_ptr() == y.data_ptr()
        and internals.version_of(alias) == internals.version_of(y)
    )


def _in_place(change: Callable[[list[torch.Tensor], float], object], expected: float) -> bool:
    tensors = [torch.full((2,), 3.0), torch.tensor(3.0)]
    change(tensors, 2.0)
    return _values(torch.stack([tensors[0][0], tensors[1]])) == [expected, expected]


def _count_works() -> bool:
    x = torch.zeros(4)
    alone = internals.storage_uses(x)
    view = x[1:]
    return internals.storage_uses(x) == alone + 1 and view.numel() == 3


def _dispatch_works() -> bool:
    x = torch.zeros(4)
    made: list[str] = []
    with internals.observing(lambda func, *_: made.append(f"{func.overloadpacket} {func.is_view}")):
        y = (x * 2).view(2, 2)
    key, storage = internals.storage_key(y), y.untyped_storage()
    gone = weakref.ref(storage)
    del storage
    same = internals.storage_key(y[0]) == key != internals.storage_key(x)
    return same and gone() is not None and made == ["aten.mul False", "aten.view True"]


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2


def _apply_works() -> bool:
    y = internals.apply_of(_Twice)(_leaf())
    return _values(y) == [6, 6] and isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)


class _Loads(nn.Module):
    called = False

    def _load_from_state_dict(self, *_: Any) -> None:
        self.called = True


def _loading_works() -> bool:
    module = _Loads()
    module.load_state_dict({})
    return (
        module.called
        and internals.loads_itself(module)
        and not internals.loads_itself(nn.BatchNorm1d(2))
    )


def _hooks_work() -> bool:
    seen: list[Any] = []
    one, other = _leaf(), _leaf()
    one.register_hook(seen.append)  # type: ignore[no-untyped-call]
    internals.move_hooks(one, other)
    torch.autograd.backward((other * 3).sum())
    hooked = internals.has_hooks(other), internals.has_hooks(_leaf())
    return [_values(gradient) for gradient in seen] == [[3, 3]] and hooked == (True, False)


def _moving_works() -> bool:
    calls: list[str] = []
    module, weight = nn.Module(), nn.Parameter(torch.ones(2))
    module.weight = weight
    weight.register_hook(lambda _: calls.append("hook"))  # type: ignore[no-untyped-call]
    weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda _: calls.append("added")
    )
    internals.move_module(module, torch.device("meta"))
    torch.autograd.backward((weight * 3).sum())
    return module.weight is weight and weight.is_meta and calls == ["hook", "added"]


def _default_store_works() -> bool:
    if dist.is_initialized():
        return isinstance(internals.default_store(), internals.Store)
    try:
        internals.default_store()
    except ValueError:
        return True
    return False


def _gloo_works() -> bool:
    timeout = timedelta(days=3)
    options = internals.gloo_options([], timeout)
    kind = internals.ProcessGroupGloo
    return options._timeout == timeout and options._devices == [] and callable(kind.create_device)


def _nccl_works() -> bool:
    if not dist.is_nccl_available():
        return True
    kind, options = internals.nccl_kind()
    return options._timeout == timedelta(days=30) and callable(kind.eager_connect_single_device)


def _batch_norms_work() -> bool:
    kinds = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
    return all(issubclass(kind, internals.BatchNorm) for kind in kinds)


def _callbacks_work() -> bool:
    with internals.calling_around_compilations(print, print):
        return True


def _limits_work() -> bool:
    internals.allow_any_number_of_graphs()  # a limit that is gone raises an AttributeError
    return True


def _graphs_run_twice_in_other_threads() -> bool:
    internals.allow_any_number_of_graphs()
    found: list[bool] = []
    thread = Thread(target=lambda: found.append(internals.graphs_donate_buffers()))
    thread.start()
    thread.join()
    return found == [False]


def _leaf() -> torch.Tensor:
    return torch.full((2,), 3.0, requires_grad=True)


def _node(tensor: torch.Tensor) -> torch.autograd.graph.Node:
    assert tensor.grad_fn is not None
    return tensor.grad_fn


def _values(tensor: torch.Tensor | None) -> list[float]:
    return [] if tensor is None else list(tensor.tolist())


def _saved_buffers_work() -> bool:
    module = nn.Module()
    module.register_buffer("one", torch.ones(1))
    module.register_buffer("two", torch.ones(1), persistent=False)
    return [*internals.unsaved_buffers_of(module)] == ["two"]


def _module_hooks_work() -> bool:
    module, ran = nn.Identity(), []
    module.register_forward_pre_hook(lambda *_: ran.append(1))
    module.register_forward_hook(lambda *_: ran.append(2))
    taken = internals.take_hooks(module)
    module(torch.ones(1))
    silent = not ran
    internals.put_hooks(module, taken)
    module(torch.ones(1))
    return silent and ran == [1, 2]


def _saved_hooks_work() -> bool:
    before = internals.saved_tensor_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return before is None and internals.saved_tensor_hooks() is not None


def _backwards_are_numbered() -> bool:
    x = torch.ones(1, requires_grad=True)
    numbers: list[int] = []
    x.register_hook(lambda _: numbers.append(internals.current_backward()))  # type: ignore[no-untyped-call]
    for _ in range(2):
        torch.autograd.grad(x * 2, x)
    return len({*numbers}) == 2


def _backward_hooks_work() -> bool:
    modules = nn.Identity(), nn.Identity(), nn.Identity()
    modules[0].register_full_backward_hook(lambda *_: None)
    modules[1].register_full_backward_pre_hook(lambda *_: None)
    return [internals.has_backward_hooks(module) for module in modules] == [True, True, False]


def _schema_works() -> bool:
    one, two = torch.ones(1), torch.ones(1)
    found = [*internals.changed_by(torch.ops.aten.add_.Tensor, (one, two), {})]
    return len(found) == 1 and found[0] is one


def _modes_work() -> bool:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode() as mode, internals.suspended(mode):
        torch.ones(1)
    return not seen


BEHAVIOURS: dict[str, Callable[[], bool]] = {
    "torch.utils._pytree": _pytree_works,
    "torch.autograd.Variable._execution_engine": _engine_works,
    "torch._C._functions.AccumulateGrad": _accumulator_works,
    "torch.autograd.graph.Node._raw_saved_result": _prefix_works,
    "torch.Tensor._indices, _values": _sparse_parts_work,
    "torch.autograd.graph.Node._sequence_nr": _sequence_works,
    "torch.Tensor._version": _version_works,
    "torch.Tensor._base": _base_works,
    "torch.nn.Module._buffers": _buffers_work,
    "torch.nn.Module._modules": _submodules_work,
    "torch.utils.data.DataLoader._iterator": (
        lambda: internals.kept_iterator(DataLoader(TensorDataset(torch.ones(1)))) is None
    ),
    "torch.ops.aten.alias": _alias_works,
    "torch._foreach_mul_": lambda: _in_place(internals.multiply, 6),
    "torch._foreach_div_": lambda: _in_place(internals.divide, 1.5),
    "torch._C._storage_Use_Count(UntypedStorage._cdata)": _count_works,
    "torch._C._FunctionBase.apply": _apply_works,
    "torch.utils._python_dispatch.TorchDispatchMode": _dispatch_works,
    "torch.nn.Module._load_from_state_dict": _loading_works,
    "torch.Tensor._backward_hooks": _hooks_work,
    "torch._C._swap_tensor_impl, _post_accumulate_grad_hooks": _moving_works,
    "torch.nn.Module._non_persistent_buffers_set": _saved_buffers_work,
    "torch.nn.Module._forward_hooks, _forward_pre_hooks, _backward_hooks": _module_hooks_work,
    "torch._C._autograd._top_saved_tensors_default_hooks": _saved_hooks_work,
    "torch._C._current_graph_task_id": _backwards_are_numbered,
    "torch.nn.Module._backward_pre_hooks": _backward_hooks_work,
    "torch._ops.OpOverload._schema": _schema_works,
    "torch.overrides._push_mode, _pop_mode": _modes_work,
    "torch.distributed.distributed_c10d._get_default_store": _default_store_works,
    "torch._C._distributed_c10d.ProcessGroupGloo._Options": _gloo_works,
    "torch.nn.modules.batchnorm._BatchNorm": _batch_norms_work,
    "torch._C._distributed_c10d.ProcessGroupNCCL": _nccl_works,
}
"""By private name, whether it does what pipeworker relies on."""
COMPILER: dict[str, Callable[[], bool]] = {
    "torch._dynamo.callback.callback_handler": _callbacks_work,
    "torch._dynamo.config": _limits_work,
    "torch._functorch.config._config": _graphs_run_twice_in_other_threads,
}
"""As above, for jobs that compile their layers."""
