"""An emulated device that executes work late and in its own order, to reveal missing waits.

Its memory is the host's, and its tensors look like the host's. Operators that a thread calls within
:meth:`LateDevice.active` are queued in the current stream, with the addresses that they read and
write. They run when a thread waits for them, or at once in eager streams. Freed memory is
overwritten as soon as the allocator may reuse it.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pipeworker.worker.device.accelerator import Accelerator
from support.devices.late_streams import LateEvent, LateStream

_aten = torch.ops.aten
_VIEWS = {_aten._unsafe_view.default, _aten.lift_fresh.default}
_READS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
_LINE = 64
_PATIENCE, _POLL = 20.0, 0.0003  # seconds
ORDERS = (
    *("compute>sends", "receives>compute", "sends>host", "receives>host"),
    *("used by sends", "used by compute"),
)
"""The orderings that transfers need, by events and by the allocator; each can be left out."""


@dataclass(eq=False)
class _Block:
    """A block of device memory, or of pinned host memory."""

    memory: Any
    stream: LateStream | None  # None: pinned
    view: weakref.ref[memoryview] | None = None
    users: set[LateStream] = field(default_factory=set)


class LateDevice(Accelerator):
    """An emulated accelerator; see the module.

    Args:
        eager: names of the streams that run work as soon as possible: ``compute``, ``sends``,
            ``receives``, ``offloads``, ``snapshots``, or one from :meth:`stream`.
        without: an ordering to leave out: one of ORDERS, ``compute>offloads`` or
            ``offloads>compute``.

    Attributes:
        pins: sizes in bytes of pinned host memory, by address.
        waits: names of the threads that waited for the device.
    """

    def __init__(self, eager: Sequence[str] = (), without: str = "") -> None:
        self.without, self._arriving = without, set[int]()
        own = ("compute", "sends", "receives", "offloads", "snapshots")
        self._streams = [LateStream(name, self) for name in own]
        self.compute, self.sends, self.receives, self.offloads, self.snapshots = self._streams
        self._eager_names = eager
        self.eager = [stream for stream in self._streams if stream.name in eager]
        self._blocks: dict[int, _Block] = {}
        self._freed: deque[int] = deque()
        self._lock = threading.RLock()
        self._local = threading.local()
        self.pins: dict[int, int] = {}
        self.waits: list[str] = []

    device = torch.device("privateuseone")

    def stream(self, name: str) -> LateStream:
        """Create a stream for a component that needs one of its own."""
        stream = LateStream(name, self)
        with self._lock:
            self._streams.append(stream)
            if name in self._eager_names:
                self.eager.append(stream)
        return stream

    @property
    def current(self) -> LateStream:
        found: LateStream = getattr(self._local, "stream", self.compute)
        return found

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    def event(self, stream: Any) -> LateEvent:
        self._spoil_freed()
        return LateEvent(stream, stream.submitted)

    def holds(self, tensor: torch.Tensor) -> bool:
        block = self._block_of(tensor)
        return block is not None and block.stream is not None

    def empty(self, count: int) -> torch.Tensor:
        made = self._new(count, self.current)
        if torch.are_deterministic_algorithms_enabled():  # torch fills what it allocates
            block = self._block_of(made)
            assert block
            fill = partial(ctypes.memset, block.memory, 0xFF, len(block.memory))
            self.submit(self.current, fill)
        return made

    def used(self, tensor: torch.Tensor, stream: Any) -> None:
        block = self._block_of(tensor)
        assert block
        if self.without != f"used by {stream.name}":
            block.users.add(stream)

    def pinned(self, count: int) -> torch.Tensor:
        return self._new(count, None)

    def pin(self, address: int, size: int) -> Callable[[], None] | None:
        self.pins[address] = size
        return lambda: self.pins.__delitem__(address)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.operate(_aten.copy_.default, (target, source, True), {})

    # For tests.

    @contextmanager
    def active(self) -> Iterator[None]:
        """Queue the operators of this thread on the device."""
        with _Functions(self), _Operators(self):
            yield

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device immediately."""
        target = _strided(self._new(tensor.nbytes, self.current), tensor)
        with _disable_current_modes(), torch.no_grad():
            target.copy_(tensor)
        return target

    def move(self, layers: Sequence[nn.Module]) -> None:
        """Move the parameters and buffers of layers to the device."""
        for module in layers:
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor.data = self.put(tensor.data)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Execute all queued work, and return a copy of a tensor on the host."""
        self.drain()
        with _disable_current_modes(), torch.no_grad():
            return tensor.detach().clone()

    def drain(self) -> None:
        """Execute all queued work."""
        for stream in self._streams:
            self._run_until(LateEvent(stream, stream.submitted))

    def submit(self, stream: LateStream, work: Callable[[], object] | LateEvent) -> None:
        with self._lock:
            self._spoil_freed()
            stream.submit(work)
            self._run_eager()

    def run_until(self, event: LateEvent) -> None:
        self.waits.append(threading.current_thread().name)
        self._run_until(event)

    def _run_until(self, event: LateEvent) -> None:
        """Run until an event is reached; release the lock while it depends on another process."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            with self._lock:
                self._spoil_freed()
                reached = self._advance(event)
                self._run_eager()
            if reached:
                return
            assert time.monotonic() < deadline, "the device waits forever"
            time.sleep(_POLL)

    def _advance(self, event: LateEvent) -> bool:
        """Execute work up to an event, if this process can; return whether the event is reached."""
        while not event.reached:
            if event.stream.device is not self or not self._do_next(event.stream):
                return False
        return True

    def _do_next(self, stream: LateStream) -> bool:
        work = stream.queue[0]
        if isinstance(work, LateEvent):
            if not self._advance(work):
                return False
        else:
            with _disable_current_modes(), torch.no_grad():
                work()
        stream.queue.popleft()
        stream.done += 1
        return True

    def _run_eager(self) -> None:
        """Execute the work of eager streams that is ready."""
        for stream in self.eager * len(self.eager):
            self.do_ready(stream)

    def do_ready(self, stream: LateStream) -> None:
        while stream.queue:
            work = stream.queue[0]
            if isinstance(work, LateEvent) and not work.reached:
                return
            self._do_next(stream)

    def _new(self, count: int, stream: LateStream | None) -> torch.Tensor:
        """Allocate memory of invalid content; it is overwritten again after its last use."""
        self._spoil_freed()
        memory = self.memory(max(1, count) + _LINE)
        ctypes.memset(memory, 0xFF, len(memory))
        start = -ctypes.addressof(memory) % _LINE
        return self.block(memory, start, max(1, count), stream)[:count]

    def memory(self, count: int) -> Any:
        return (ctypes.c_char * count)()

    def block(self, memory: Any, start: int, count: int, stream: LateStream | None) -> torch.Tensor:
        """Return a tensor with its own storage, and record when nothing refers to it any more."""
        address = ctypes.addressof(memory) + start
        view = memoryview(memory).cast("B")[start : start + count]
        block = self._blocks[address] = _Block(memory, stream)
        block.view = weakref.ref(view, lambda _: self._freed.append(address))
        return torch.frombuffer(view, dtype=torch.uint8)

    def _spoil_freed(self) -> None:
        """Queue the overwriting of freed blocks."""
        while self._freed:
            block = self._blocks.pop(self._freed.popleft())
            stream, memory = block.stream, block.memory
            if stream is not None:
                for user in block.users - {stream}:
                    stream.submit(LateEvent(user, user.submitted))
                stream.submit(partial(ctypes.memset, memory, 0xFF, len(memory)))

    def _block_of(self, tensor: torch.Tensor) -> _Block | None:
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def bare(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return a view of a tensor's memory that does not keep its block alive, and its memory."""
        if not tensor.numel():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype), None
        block, address = self._block_of(tensor), tensor.data_ptr()
        pinned = any(start <= address < start + size for start, size in self.pins.items())
        assert block or pinned, "the device copies from memory that is not pinned"
        memory = (ctypes.c_char * _span(tensor)).from_address(tensor.data_ptr())
        flat = torch.frombuffer(memory, dtype=tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride()), block and block.memory

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Queue an operator; return its results, whose content is not computed yet."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        copies = func is _aten.copy_.default
        if copies and not all(map(self.holds, args[:2])) and not (*args, False)[2]:
            return self._at_once(func, args, kwargs)
        late: list[Any] = []
        kept: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and (copies or self.holds(leaf)):
                bare, memory = self.bare(leaf)
                kept.append(memory)
                late.append(bare)
            elif isinstance(leaf, torch.Tensor):
                assert not leaf.dim(), f"{func}: an argument is a tensor of the host"
                late.append(leaf.clone())
            else:
                late.append(leaf)
        meta = [_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        meta_args, meta_kwargs = pytree.tree_unflatten(meta, structure)
        shapes = func(*meta_args, **meta_kwargs)
        results = self._results(func, args, kwargs, shapes)
        outs: list[torch.Tensor | None] = []
        for fresh in [r for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]:
            if any(fresh is leaf for leaf in leaves):
                outs.append(None)
                continue
            bare, memory = self.bare(fresh)
            kept.append(memory)
            outs.append(bare)

        def work(kept: Any = kept) -> None:
            late_args, late_kwargs = pytree.tree_unflatten(late, structure)
            made = pytree.tree_leaves(func(*late_args, **late_kwargs))
            tensors = [one for one in made if isinstance(one, torch.Tensor)]
            for out, one in zip(outs, tensors, strict=bool(outs)):
                if out is not None:
                    out.copy_(one)

        self.submit(self.current, work)
        return results

    def _results(self, func: Any, args: Any, kwargs: Any, shapes: Any) -> Any:
        """Return the results of an operator: the tensors that it writes to, or new ones."""
        schema = func._schema
        if not schema.returns or shapes is None:
            return None
        several = isinstance(shapes, (tuple, list))
        arguments = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
        written = {
            name: arguments[a.name]
            for a in schema.arguments
            if a.alias_info and a.alias_info.is_write and a.name in arguments
            for name in a.alias_info.before_set
        }
        found = []
        for number, shape in enumerate(shapes if several else [shapes]):
            info = schema.returns[number if len(schema.returns) > 1 else 0].alias_info
            if info and info.is_write:
                found.append(written[next(iter(info.before_set))])
            else:
                found.append(self._like(shape) if isinstance(shape, torch.Tensor) else shape)
        return type(shapes)(found) if several else found[0]

    def _like(self, shape: torch.Tensor) -> torch.Tensor:
        return _strided(self._new(_span(shape), self.current), shape)

    def _at_once(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Execute the current stream's work, then the operator, as a synchronizing call does."""
        self.run_until(self.event(self.current))
        return func(*args, **kwargs)

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not any(map(self.holds, tensors)):
            return func(*args, **kwargs)
        returns = [r.alias_info for r in func._schema.returns]
        if func in _VIEWS or any(info and not info.is_write for info in returns):
            return func(*args, **kwargs)
        return (self._at_once if func in _READS else self.operate)(func, args, kwargs)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: LateDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.dispatch(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """The mode for functions that read memory without an operator."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and self._device.holds(args[0]):
            self._device.run_until(self._device.event(self._device.current))
        return func(*args, **(kwargs or {}))


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum(stride * (size - 1) for size, stride in sizes) if tensor.numel() else 0
    return reach * tensor.element_size()


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _strided(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not like.numel():
        return memory.new_empty(0).view(like.dtype).as_strided(like.shape, like.stride())
    return memory.view(like.dtype).as_strided(like.shape, like.stride())


EAGER = [
    names
    for count in range(4)
    for names in itertools.combinations(("compute", "sends", "receives"), count)
]
"""All choices of eager streams."""
