"""What torch does not promise: its private names, in one place.

Each entry says what it is for, and what it saves where it is there for speed. A torch that lacks
one fails at import, by that name.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _storage_Use_Count
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = [
    "SAVED_PREFIX",
    "AccumulateGrad",
    "BatchNorm",
    "FakeTensorMode",
    "PrefixStore",
    "ProcessGroupGloo",
    "Store",
    "TCPStore",
    "Work",
    "alias_of",
    "apply_of",
    "buffers_of",
    "default_store",
    "divide",
    "engine",
    "gloo_options",
    "has_nccl",
    "loads_itself",
    "map_storage",
    "move_hooks",
    "multiply",
    "nccl_group",
    "preload",
    "pytree",
    "run_backward",
    "share_storage",
    "storage_uses",
    "version_of",
    "view_of",
]
# pytree: nested values are taken apart as torch's own tools do, registered classes among them.
# FakeTensorMode: the survey of skips runs layers without memory.
# BatchNorm: the common class of all batch norms, for deferred statistics.
# The c10d classes: links of two ranks on their own, which meet at a store of ours.
# engine, AccumulateGrad, SAVED_PREFIX: a backward in two parts enters the graph in its middle. The
# node that adds to a leaf's .grad can be called without firing the leaf's hooks; what nodes saved
# tells whether hooks bring it back.

engine: Callable[..., Any] = Variable._execution_engine.run_backward
AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
SAVED_PREFIX = "_raw_saved_"
_multiply, _divide = torch._foreach_mul_, torch._foreach_div_
_alias = torch.ops.aten.alias.default
_share: Callable[..., Any] = torch.UntypedStorage._share_cuda_
_map: Callable[..., Any] = torch.UntypedStorage._new_shared_cuda
_view = torch.ops.aten._unsafe_view.default


def run_backward(
    roots: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor | None, ...]
) -> None:
    """As torch.autograd.backward, without its checks of shapes.

    They take as long as the engine's own call for a small layer: 20 µs a micro-batch.
    """
    engine(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``Function.apply`` without its care for functorch, whose wrappers no stage is given.

    Saves 10 µs a micro-batch.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors refer to the memory of this one (the look itself counts as one).

    A buffer is received into again only when nobody looks at it any more.
    """
    return int(_storage_Use_Count(tensor.untyped_storage()._cdata))


def buffers_of(module: nn.Module) -> MutableMapping[str, torch.Tensor | None]:
    """A module's own buffers, to be put back: ``named_buffers`` gives no place to put to."""
    return module._buffers


def loads_itself(module: nn.Module) -> bool:
    """Whether the user, or a library, has given a module a way of its own to load its tensors.

    Batch norm has one that gives no buffer another shape.
    """
    kind = type(module)
    other = kind._load_from_state_dict is not nn.Module._load_from_state_dict
    return other and not kind.__module__.startswith("torch.nn.modules.")


def share_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Plain values by which another process maps a storage of a CUDA device, once for each share.

    torch's public way pickles them. It keeps the memory until the other process has let go.
    """
    _, *handles = _share(storage)
    return tuple(handles)


def map_storage(device: torch.device, handles: Sequence[Any]) -> torch.UntypedStorage:
    """The storage another process has shared; RuntimeError where its memory cannot be reached."""
    storage: torch.UntypedStorage = _map(device.index, *handles)
    return storage


def version_of(tensor: torch.Tensor) -> int:
    """Counts changes in place."""
    return tensor._version


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view with a node of its own in the graph, so that gradients add in a fixed order."""
    alias: torch.Tensor = _alias(tensor)
    return alias


def view_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is no leaf and no view, so it may be changed in place."""
    view: torch.Tensor = _view(tensor, tensor.shape)
    return view


def multiply(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """In place, all in one go: as torch's own optimizers do."""
    _multiply(list(tensors), factor)


def divide(tensors: Sequence[torch.Tensor], divisor: float) -> None:
    """In place, all in one go."""
    _divide(list(tensors), divisor)


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Hooks that the user registered on a parameter run for the object that stands for it."""
    target._backward_hooks = source._backward_hooks


def default_store() -> Store:
    """The store of the default process group, where the ranks of a script can meet."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def gloo_options(device: ProcessGroupGloo.Device, timeout: Any) -> Any:
    """A group's options: public constructors take neither a device nor these defaults."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [device]
    return options


def has_nccl() -> bool:
    """Whether this torch is built with NCCL, as those for CUDA are, on Linux."""
    return dist.is_nccl_available()


def nccl_group(store: Store, rank: int, device: torch.device) -> Any:
    """A group of two devices, whose communicator is there when this returns.

    torch's public way makes groups of a default one.
    """
    kind = torch._C._distributed_c10d.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(days=30)  # who is silent and who computes is not for it to say
    group = kind(store, rank, 2, options)
    group.eager_connect_single_device(device)
    return group


def preload() -> None:
    """Import what fake tensors and building any torch optimizer import: a second, once."""
    import torch._dynamo  # noqa: F401


def on_compiling(began: Callable[[Any], None], ended: Callable[[Any], None]) -> None:
    """Have these called around each compilation of ``torch.compile``, once each."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(began)
    callback_handler.register_end_callback(ended)


def off_compiling(began: Callable[[Any], None], ended: Callable[[Any], None]) -> None:
    """Not any more."""
    from torch._dynamo.callback import callback_handler

    with contextlib.suppress(ValueError):  # torch has forgotten them, by its reset
        callback_handler.remove_start_callback(began)
        callback_handler.remove_end_callback(ended)


def allow_any_number_of_graphs() -> None:
    """Have ``torch.compile`` compile as often as there are shapes, and say so where it cannot."""
    from torch._dynamo import config

    config.recompile_limit = config.accumulated_recompile_limit = sys.maxsize
    config.fail_on_recompile_limit_hit = True
