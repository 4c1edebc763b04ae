"""A device that works late and in an order of its own, so that a wait that is missing is seen.

Its memory is the host's, and its tensors look like the host's. What a thread gives it within
:meth:`LateDevice.active` is queued in the current stream with the addresses of what it reads and
writes, and is done when somebody waits for it, or at once in streams that are eager. Memory that is
freed is spoilt as soon as its allocator may give it out again.
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
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pipeworker.worker.device.mapping import Mapping
from pipeworker.worker.device.nccl import Communicators

_aten = torch.ops.aten
_VIEWS = {_aten._unsafe_view.default, _aten.lift_fresh.default}
_READS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
_LINE = 64
_PATIENCE, _LOOK = 20.0, 0.0003  # seconds
ORDERS = (
    "compute>sends",
    "receives>compute",
    "sends>host",
    "receives>host",
    "used by sends",
    "used by compute",
)
"""What is ordered by events, and by telling the allocator, where tensors travel."""


@dataclass(eq=False)
class LateStream:
    """Work in turn: calls, and events that are waited for."""

    name: str
    device: LateDevice
    given: int = 0
    done: int = 0
    queue: deque[Callable[[], None] | LateEvent] = field(default_factory=deque)

    def give(self, work: Callable[[], None] | LateEvent) -> None:
        self.queue.append(work)
        self.given += 1

    def wait_event(self, event: Any) -> None:
        if f"{event.stream.name}>{self.name}" != self.device.without:
            self.device.give(self, event.now())


@dataclass(eq=False)
class LateEvent:
    """A place in a stream."""

    stream: LateStream
    place: int

    def record(self, stream: Any) -> None:
        self.stream, self.place = stream, stream.given

    @property
    def reached(self) -> bool:
        return self.stream.done >= self.place

    def now(self) -> LateEvent:
        return self

    @property
    def _ignored(self) -> bool:
        return f"{self.stream.name}>host" == self.stream.device.without

    def query(self) -> bool:
        return self._ignored or self.reached

    def synchronize(self) -> None:
        if not self._ignored:
            self.stream.device.come_to(self)


@dataclass(eq=False)
class _Block:
    """Memory of the device, or pinned."""

    memory: Any
    stream: LateStream | None  # None: pinned
    view: weakref.ref[memoryview] | None = None
    users: set[LateStream] = field(default_factory=set)


class LateDevice:
    """An accelerator; see the module.

    Args:
        eager: names of the streams that work as soon as they may, of ``compute``, ``sends``,
            ``receives``, ``aside``, and those that are made.
        without: one of ORDERS, ``compute>aside`` or ``aside>compute``, which does not hold.

    Attributes:
        pins: memory of the host's that was pinned: bytes, by address.
        waits: who waited for the device: the names of threads.
    """

    def __init__(self, eager: Sequence[str] = (), without: str = "") -> None:
        self.without = without
        self.compute, self.sends, self.receives, self.aside = self._streams = [
            LateStream(name, self) for name in ("compute", "sends", "receives", "aside")
        ]
        self._eager_names = eager
        self._eager = [stream for stream in self._streams if stream.name in eager]
        self._blocks: dict[int, _Block] = {}
        self._freed: deque[int] = deque()
        self._lock = threading.RLock()
        self._local = threading.local()
        self.pins: dict[int, int] = {}
        self.waits: list[str] = []

    # What an accelerator is.

    device = torch.device("privateuseone")

    @property
    def mapping(self) -> Mapping | None:
        return None

    @property
    def communicators(self) -> Communicators | None:
        return None

    def stream(self, name: str) -> LateStream:
        """Another one, of what has its own."""
        made = LateStream(name, self)
        with self._lock:
            self._streams.append(made)
            if name in self._eager_names:
                self._eager.append(made)
        return made

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
        self._settle()
        return LateEvent(stream, stream.given)

    def holds(self, tensor: torch.Tensor) -> bool:
        block = self._block_of(tensor)
        return block is not None and block.stream is not None

    def empty(self, count: int) -> torch.Tensor:
        return self._new(count, self.current)

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

    # What a test does with it.

    @contextmanager
    def active(self) -> Iterator[None]:
        """Of this thread."""
        with _Functions(self), _Operators(self):
            yield

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device, at once."""
        target = _strided(self._new(tensor.nbytes, self.current), tensor)
        with _disable_current_modes(), torch.no_grad():
            target.copy_(tensor)
        return target

    def take(self, layers: Sequence[nn.Module]) -> None:
        """Have the tensors of some layers."""
        for module in layers:
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor.data = self.put(tensor.data)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host, when all is done."""
        self.settle()
        with _disable_current_modes(), torch.no_grad():
            return tensor.detach().clone()

    def settle(self) -> None:
        """All that was given is done."""
        for stream in self._streams:
            self._come_to(LateEvent(stream, stream.given))

    # How it works.

    def give(self, stream: LateStream, work: Callable[[], None] | LateEvent) -> None:
        with self._lock:
            self._settle()
            stream.give(work)
            self._hurry()

    def come_to(self, event: LateEvent) -> None:
        self.waits.append(threading.current_thread().name)
        self._come_to(event)

    def _come_to(self, event: LateEvent) -> None:
        """What waits for another process gives up the turn meanwhile."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            with self._lock:
                self._settle()
                there = self._advance(event)
                self._hurry()
            if there:
                return
            assert time.monotonic() < deadline, "the device waits for ever"
            time.sleep(_LOOK)

    def _advance(self, event: LateEvent) -> bool:
        """As far as this process can; whether it has come there."""
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

    def _hurry(self) -> None:
        """Do what eager streams need not wait for."""
        for stream in self._eager * len(self._eager):
            self.do_ready(stream)

    def do_ready(self, stream: LateStream) -> None:
        while stream.queue:
            work = stream.queue[0]
            if isinstance(work, LateEvent) and not work.reached:
                return
            self._do_next(stream)

    def _new(self, count: int, stream: LateStream | None) -> torch.Tensor:
        """Memory that holds nothing of use; it is spoilt again behind its last use."""
        self._settle()
        memory = self.memory(max(1, count) + _LINE)
        ctypes.memset(memory, 0xFF, len(memory))
        start = -ctypes.addressof(memory) % _LINE
        return self.block(memory, start, max(1, count), stream)[:count]

    def memory(self, count: int) -> Any:
        return (ctypes.c_char * count)()

    def block(self, memory: Any, start: int, count: int, stream: LateStream | None) -> torch.Tensor:
        """A storage of its own, which says when nothing refers to it any more."""
        address = ctypes.addressof(memory) + start
        view = memoryview(memory).cast("B")[start : start + count]
        block = self._blocks[address] = _Block(memory, stream)
        block.view = weakref.ref(view, lambda _: self._freed.append(address))
        return torch.frombuffer(view, dtype=torch.uint8)

    def _settle(self) -> None:
        """Spoil what is free."""
        while self._freed:
            block = self._blocks.pop(self._freed.popleft())
            stream, memory = block.stream, block.memory
            if stream is not None:
                for user in block.users - {stream}:
                    stream.give(LateEvent(user, user.given))
                stream.give(_spoiling(memory))

    def _block_of(self, tensor: torch.Tensor) -> _Block | None:
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def bare(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The memory of a tensor without a claim to it, and what keeps it mapped."""
        if not tensor.numel():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype), None
        block, address = self._block_of(tensor), tensor.data_ptr()
        pinned = any(start <= address < start + size for start, size in self.pins.items())
        assert block or pinned, "the device copies from memory that is not pinned"
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum(stride * (size - 1) for size, stride in sizes)
        count = reach * tensor.element_size()
        memory = (ctypes.c_char * count).from_address(tensor.data_ptr())
        flat = torch.frombuffer(memory, dtype=tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride()), block and block.memory

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Queue an operator; gives its results, which hold nothing yet."""
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
                assert not leaf.dim(), f"{func} is given a tensor of the host"
                late.append(leaf.clone())
            else:
                late.append(leaf)
        meta = [_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        shapes = func(*_both(structure, meta)[0], **_both(structure, meta)[1])
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
            late_args, late_kwargs = _both(structure, late)
            made = pytree.tree_leaves(func(*late_args, **late_kwargs))
            tensors = [one for one in made if isinstance(one, torch.Tensor)]
            for out, one in zip(outs, tensors, strict=bool(outs)):
                if out is not None:
                    out.copy_(one)

        self.give(self.current, work)
        return results

    def _results(self, func: Any, args: Any, kwargs: Any, shapes: Any) -> Any:
        """What an operator returns: what it writes to, or new tensors."""
        schema = func._schema
        if not schema.returns or shapes is None:
            return None
        several = isinstance(shapes, (tuple, list))
        given = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
        written = {
            name: given[a.name]
            for a in schema.arguments
            if a.alias_info and a.alias_info.is_write and a.name in given
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
        sizes = zip(shape.shape, shape.stride(), strict=True)
        reach = 1 + sum(stride * (size - 1) for size, stride in sizes) if shape.numel() else 0
        return _strided(self._new(reach * shape.element_size(), self.current), shape)

    def _at_once(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The host waits for all the device was given."""
        self.waits.append(threading.current_thread().name)
        self.settle()
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
    """What looks at memory without an operator."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and self._device.holds(args[0]):
            self._device.waits.append(threading.current_thread().name)
            self._device.settle()
        return func(*args, **(kwargs or {}))


def _both(structure: Any, leaves: list[Any]) -> tuple[Any, Any]:
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return args, kwargs


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _strided(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not like.numel():
        return memory.new_empty(0).view(like.dtype).as_strided(like.shape, like.stride())
    return memory.view(like.dtype).as_strided(like.shape, like.stride())


def _spoiling(memory: Any) -> Callable[[], None]:
    def spoil() -> None:
        ctypes.memset(memory, 0xFF, len(memory))

    return spoil


EAGER = [
    names
    for count in range(4)
    for names in itertools.combinations(("compute", "sends", "receives"), count)
]
"""All choices of streams that are eager."""
