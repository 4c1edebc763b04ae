"""The private names of torch that pipeworker uses, each with its reason; no other module uses any.

A name that torch lacks is None here. When a worker starts, :mod:`pipeworker.worker.torch_check`
tests what each name does, so that one error names it, however the job was started.

To move to another torch, follow ``docs/versions.md``: change a function here if its name is gone or
behaves differently. One that is here for speed names the public function that it replaces.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from operator import attrgetter, methodcaller
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from pipeworker.worker import kernel_cache

missing: list[str] = []
"""The names below that torch lacks."""


def _find(name: str) -> Any:
    """Return what torch has under this name, or None."""
    try:
        return resolve_name(name)
    except (ImportError, AttributeError):
        missing.append(name)
        return None


if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import ProcessGroupGloo as ProcessGroupGloo
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore
    from torch._C._distributed_c10d import Work as Work
    from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    BatchNorm = _BatchNorm
    pytree = _pytree
    without_fake_modes = unset_fake_temporarily
else:
    # Public, but torch's type stubs do not export them from there.
    PrefixStore, Store, TCPStore = dist.PrefixStore, dist.Store, dist.TCPStore
    ProcessGroupGloo = _find("torch._C._distributed_c10d.ProcessGroupGloo")
    """Makes groups of two ranks that rendezvous at the coordinator's store, without a default
    process group."""
    FakeTensorMode = _find("torch._subclasses.fake_tensor.FakeTensorMode") or object
    """The survey of skips runs layers without memory."""
    _FakeTensor = _find("torch._subclasses.fake_tensor.FakeTensor")
    without_fake_modes = _find("torch._subclasses.fake_tensor.unset_fake_temporarily")
    """Returns a context in which functions that make tensors make real ones."""
    TorchDispatchMode = _find("torch.utils._python_dispatch.TorchDispatchMode") or object
    """Sees every operation, and so the memory that a layer takes for a time on the CPU."""
    BatchNorm = _find("torch.nn.modules.batchnorm._BatchNorm")
    """The common base class of all batch norms, whose statistics are deferred."""
    pytree = _find("torch.utils._pytree")
    """Nested values are flattened as torch's own tools flatten them, with the classes that users
    have registered. Torch 2.13 has no public module for that."""

engine: Callable[..., Any] = _find("torch.autograd.Variable._execution_engine.run_backward")
"""The autograd engine. A backward in two parts calls it to start in the middle of the graph. It is
also called for speed: for a small layer the checks of shapes in ``torch.autograd.backward`` take as
long as the engine, 20 µs a micro-batch."""
AccumulateGrad: type = _find("torch._C._functions.AccumulateGrad")
"""The class of the graph's nodes that add to a leaf's ``.grad``. A split backward calls such a node
itself, which does not run the leaf's hooks."""
SAVED_PREFIX = "_raw_saved_"
"""The prefix of a graph node's attributes with its saved tensors, which show whether a saved-tensor
hook unpacks them."""
sequence_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Returns the number of a graph's node, in the order in which a thread made them, to distinguish
the nodes of a layer from those before it."""
_version: Callable[[torch.Tensor], int] = attrgetter("_version")
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""Returns the tensor that a view is of; None if it is no view. Both have one version counter."""
buffers_of: Callable[[nn.Module], MutableMapping[str, torch.Tensor | None]] = attrgetter("_buffers")
"""Returns a module's own dict of buffers, to restore them; ``named_buffers`` cannot set them."""
submodules_of: Callable[[nn.Module], Mapping[str, nn.Module | None]] = attrgetter("_modules")
"""Returns a module's own dict of submodules, which is watched for new ones without a list."""
kept_iterator: Callable[[Any], Any] = attrgetter("_iterator")
"""Returns the iterator that a ``DataLoader`` keeps with its processes, or None if it keeps none."""
_end_workers: Callable[[Any], None] = _find(
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers"
)
alias_of: Callable[[torch.Tensor], torch.Tensor] = _find("torch.ops.aten.alias.default")
"""Returns a view with a graph node of its own, so that gradients are summed in a fixed order."""
unsaved_buffers_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""Returns the names of a module's buffers that its state dict leaves out; no public name has it."""
FAKE_LOGGER = "torch._subclasses.fake_tensor"
"""The name of the logger that reports each operation that fails on fake tensors."""
current_backward: Callable[[], int] = _find("torch._C._current_graph_task_id")
"""Returns the number of the backward that calls a hook, to distinguish several within a forward."""
_saved_hooks: Callable[[bool], Any] = _find("torch._C._autograd._top_saved_tensors_default_hooks")
_transform: Callable[[], Any] = _find("torch._C._functorch.peek_interpreter_stack")
_pop_mode: Callable[[], Any] = _find("torch.overrides._pop_mode")
_push_mode: Callable[[Any], None] = _find("torch.overrides._push_mode")
"""A function mode is suspended in units, so that they run as if there were none."""
multiply: Callable[[list[torch.Tensor], torch.Tensor | float], object] = _find(
    "torch._foreach_mul_"
)
divide: Callable[[list[torch.Tensor], float], object] = _find("torch._foreach_div_")
"""Change tensors in place in one call, as torch's own optimizers do; for speed."""
_truncated_normal: Callable[..., torch.Tensor] = _find("torch.nn.init._no_grad_trunc_normal_")
"""Fills a tensor with numbers within bounds. It draws until all are, so it needs real ones."""
_share: Callable[..., Any] = _find("torch.UntypedStorage._share_cuda_")
_map: Callable[..., Any] = _find("torch.UntypedStorage._new_shared_cuda")
_uses: Callable[[int], int] = _find("torch._C._storage_Use_Count")
_swap: Callable[[torch.Tensor, torch.Tensor], None] = _find("torch._C._swap_tensor_impl")


def ignores_statistics(node: Any) -> bool:
    """Return whether a graph's node is a batch norm in training, which saves what it does not use.

    For speed: without it, running statistics would be copied in each forward.
    """
    return bool(getattr(node, "_saved_training", False))


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``Function.apply`` without its handling of functorch's wrappers, which no stage has.

    For speed: it saves 10 µs a micro-batch.
    """
    apply: Any = getattr(super(torch.autograd.Function, function), "apply", None)
    return apply  # type: ignore[no-any-return]


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same dtype that has no memory and shares the version counter."""
    counter = tensor.detach()
    counter.data = _nothing(tensor.dtype, tensor.device)
    return counter


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def storage_uses(tensor: torch.Tensor) -> int:
    """Return the number of tensors that use a tensor's storage; this call counts as one.

    A buffer is received into again only when no other tensor uses its storage.
    """
    return int(_uses(tensor.untyped_storage()._cdata))


def observing(
    observe: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], object],
) -> AbstractContextManager[Any]:
    """Return a context in which each operation of torch, with what it made, is observed."""

    class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            observe(func, args, kwargs or {}, made)
            return made

    return Observer()  # type: ignore[no-untyped-call]


class _SharedFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that is not copied with its tensors.

    A mode has ``StorageWeakRef`` objects, which release a count at their end that a copy of them
    has not taken: so the memory of a storage in use would be freed. A module that is copied may
    have fake tensors, such as parameters that its hooks reach.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _SharedFakeMode:
        return self


@cache
def shared_fake_mode() -> FakeTensorMode:
    """Return the one fake mode of this process: fake tensors of two modes cannot be combined."""
    return _SharedFakeMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape but no memory."""
    return isinstance(tensor, _FakeTensor)


@contextmanager
def suspended(mode: TorchFunctionMode) -> Iterator[None]:
    """Suspend a function mode that is active; those entered after it stay in force."""
    later = []
    while (top := _pop_mode()) is not mode:
        later.append(top)
    for one in reversed(later):
        _push_mode(one)
    try:
        yield
    finally:
        for _ in later:
            _pop_mode()
        for one in (mode, *reversed(later)):
            _push_mode(one)


def is_random(func: Any) -> bool:
    """Return whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def changed_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call of an operator changes in place."""
    norm = func.name() in _NORMS
    for place, argument in enumerate(func._schema.arguments):
        is_statistic = norm and argument.name.startswith("running_") and args[_TRAINING]
        if is_statistic or (argument.alias_info is not None and argument.alias_info.is_write):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, torch.Tensor):
                    yield one


_NORMS, _TRAINING = {"aten::native_batch_norm", "aten::cudnn_batch_norm"}, 5
"""Operators that change the statistics which they are given, and do not declare it, in training;
and the place of the argument that shows it."""


@contextmanager
def truncated_normal_by(fill: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Have ``nn.init.trunc_normal_`` call `fill` with torch's own function and its arguments."""
    nn.init._no_grad_trunc_normal_ = partial(fill, _truncated_normal)
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = _truncated_normal


def forward_hooks_of(module: nn.Module) -> MutableMapping[int, Callable[..., Any]]:
    """Return the hooks that are called with a module, its arguments and its output."""
    hooks: MutableMapping[int, Callable[..., Any]] = module._forward_hooks
    return hooks


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a module's own backward has hooks."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def is_transforming() -> bool:
    """Return whether the code that runs is within a transform of torch.func, as vmap."""
    return _transform() is not None


def saved_tensor_hooks() -> Any:
    """Return the hooks that are called for tensors which graphs save now, or None."""
    return _saved_hooks(False)


Hooks = list[dict[int, Callable[..., Any]]]
"""The hooks of a module, and of those within it, which run around its forward."""


def _hook_dicts(module: nn.Module) -> Iterator[MutableMapping[int, Callable[..., Any]]]:
    for one in module.modules():
        yield from (one._forward_pre_hooks, one._forward_hooks)
        yield from (one._backward_pre_hooks, one._backward_hooks)


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module itself has hooks on its forward or its backward."""
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward) or has_backward_hooks(module)


def take_hooks(module: nn.Module) -> Hooks:
    """Remove the hooks of a module, and of those within it, and return them."""
    taken = []
    for hooks in _hook_dicts(module):
        taken.append(dict(hooks))
        hooks.clear()
    return taken


def put_hooks(module: nn.Module, taken: Hooks) -> None:
    """Put hooks that were taken from a module, or from the one it is a copy of, back."""
    for hooks, own in zip(_hook_dicts(module), taken, strict=False):
        hooks.update(own)


def forget_iterator(loader: Any) -> None:
    """Have a ``DataLoader`` end the processes that it keeps; no public function does.

    A garbage collection would end them too, at any time: it closes their queues first, and then
    waits five seconds for each process.
    """
    iterator, loader._iterator = loader._iterator, None
    if iterator is not None:
        _end_workers(iterator)


def keep_iterator(loader: Any, iterator: Any) -> None:
    """Have a ``DataLoader`` keep an iterator of its own that it has forgotten."""
    loader._iterator = iterator


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of changes in place that a tensor and its views have had, or 0."""
    try:
        return _version(tensor)
    except RuntimeError:  # an inference tensor does not count them
        return 0


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share their storage, while that exists."""
    key: int = tensor.untyped_storage()._cdata
    return key


def map_tensor_leaves(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Replace each tensor of a nested value by what a function returns for it.

    A ``torch.Size`` stays one, whereas torch's pytree makes a tuple of it.
    """
    return pytree.tree_map_only(torch.Tensor, function, value, is_leaf=_is_size)


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold a tensor's elements: itself, or the parts of a sparse one.

    The public ``Tensor.indices`` and ``values`` reject a tensor that is not coalesced, as gradients
    of embeddings are, and :meth:`coalesce` copies it.
    """
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()  # as of MKL-DNN, whose memory torch does not show


def loads_itself(module: nn.Module) -> bool:
    """Return whether a module overrides how its tensors are loaded, in code outside torch.

    Torch's own overrides (batch norm has one) change no buffer's shape.
    """
    kind = type(module)
    other = kind._load_from_state_dict is not nn.Module._load_from_state_dict
    return other and not kind.__module__.startswith("torch.nn.modules.")


def share_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Return plain values by which one other process maps a storage of a CUDA device.

    Torch keeps the memory until that process has freed it. The public functions pickle the values.
    """
    _, *handles = _share(storage)
    return tuple(handles)


def map_storage(device: torch.device, handles: Sequence[Any]) -> torch.UntypedStorage:
    """Return the storage behind :func:`share_storage`; RuntimeError: `device` cannot reach it."""
    storage: torch.UntypedStorage = _map(device.index, *handles)
    return storage


def allocator_snapshot(device: torch.device) -> Any:
    """Return what a device's allocator holds, or None if it does not tell."""
    memory = getattr(torch.get_device_module(device.type), "memory", None)
    snapshot = getattr(memory, "_snapshot", None)
    return None if snapshot is None else snapshot()


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether backward calls a function of :meth:`torch.Tensor.register_hook`."""
    return bool(tensor._backward_hooks)


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Make a parameter's hooks run for the tensor that replaces it."""
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def move_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to a device; its parameters remain the same objects, with their hooks.

    ``nn.Module.to`` replaces them on a device that a backend outside of torch has registered, and
    on ``meta``. Ties and the user's references to parameters would then lead to the old objects.
    """
    for parameter in module.parameters():
        if type(parameter) is nn.Parameter and not _can_take_data(parameter, device):
            gradient, parameter.grad = parameter.grad, None
            _swap(parameter, nn.Parameter(parameter.detach().to(device), parameter.requires_grad))
            # A hook is registered with what was swapped away: setting the dicts registers it anew.
            move_hooks(parameter, parameter)
            parameter.grad = None if gradient is None else gradient.to(device)
    return module.to(device)


def _can_take_data(parameter: nn.Parameter, device: torch.device) -> bool:
    """Return whether torch can move a parameter to a device without making a new object."""
    if parameter.device.type == device.type:
        return True
    try:
        parameter.detach().data = torch.empty(0, dtype=parameter.dtype, device=device)
    except RuntimeError:
        return False
    return True


def default_store() -> Store:
    """Return the store of the default process group; ValueError: there is none."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def gloo_options(devices: list[ProcessGroupGloo.Device], timeout: timedelta) -> Any:
    """Return the options of a gloo group that listens on these; public functions accept none."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = devices
    return options


def nccl_group(store: Store, rank: int, device: torch.device) -> Any:
    """Return an NCCL group of two devices, connected; public functions need a default group."""
    kind, options = nccl_kind()
    group = kind(store, rank, 2, options)
    group.eager_connect_single_device(device)
    return group


def nccl_kind() -> tuple[Any, Any]:
    """Return the class of NCCL's groups, and options for one."""
    kind = torch._C._distributed_c10d.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(days=30)  # the coordinator decides which worker hangs, not NCCL
    return kind, options


def preload() -> None:
    """Import the modules that fake tensors and optimizers import: it takes a second, once."""
    kernel_cache.keep_private()
    import torch._dynamo

    with torch.profiler.record_function("preload"):  # as in each step of an optimizer
        pass


@contextmanager
def calling_around_compilations(
    start: Callable[[Any], None], end: Callable[[Any], None]
) -> Iterator[None]:
    """Have `start` and `end` called around each compilation of ``torch.compile`` in the context."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        with suppress(ValueError):  # torch's reset has removed them
            callback_handler.remove_start_callback(start)
            callback_handler.remove_end_callback(end)


def allow_any_number_of_graphs() -> None:
    """Have ``torch.compile`` compile for every new shape, and raise an error where it cannot.

    The graphs can run backward twice: the two parts of a split backward do. On an accelerator they
    run in a thread of torch's own. Settings are per thread, so there the default counts. torch's
    cache does not distinguish such graphs from those of other programs, whose backward may write
    its results into what it needs: a tag does, and precedes that of the user's environment.
    """
    from torch._dynamo import config
    from torch._functorch import config as graphs
    from torch.compiler import config as caches

    config.recompile_limit = config.accumulated_recompile_limit = sys.maxsize
    config.fail_on_recompile_limit_hit = True
    graphs.donated_buffer = graphs._config["donated_buffer"].default = False
    tag = caches._config["cache_key_tag"]  # type: ignore[attr-defined]
    caches.cache_key_tag = tag.default = tag.env_value_default = "pipeworker" + os.environ.get(
        "TORCH_COMPILE_CACHE_KEY_TAG", ""
    )


def graphs_donate_buffers() -> bool:
    """Return whether compiled graphs of this thread may reuse in backward what they have saved."""
    from torch._functorch import config as graphs

    return bool(graphs.donated_buffer)
