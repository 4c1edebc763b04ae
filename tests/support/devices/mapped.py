"""A late device whose memory other processes map: files without a name, and counters.

A thread of its own does its work as well, a little at a time, since another process cannot make it
do any.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import secrets
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeworker.worker.device.accelerator import Accelerator, CudaIpc, accelerator_for
from pipeworker.worker.transport.links import mapped, shared
from pipeworker.worker.transport.links.link import Lane, Link, Pending, TwoLanes
from support.devices.device import LateDevice
from support.devices.late_streams import LateEvent, LateStream
from support.in_process.transport import FORTH
from support.real_jobs.jobs import Jobs

_TESTS = Path(__file__).parents[2]
_PAUSE = 0.0005  # seconds
_COUNTS = struct.Struct("<2q")


@dataclass(eq=False)
class PosixSignal:
    """An event in shared memory: two counters, of its records and of the records reached."""

    memory: mmap.mmap
    stream: LateStream  # stands for the streams of the other process

    def record(self, stream: Any) -> None:
        recorded, done = _COUNTS.unpack_from(self.memory)
        _COUNTS.pack_into(self.memory, 0, recorded + 1, done)
        stream.device.submit(stream, lambda: struct.pack_into("<q", self.memory, 8, recorded + 1))

    def now(self) -> LateEvent:
        """Return the last record as an event."""
        return _Recorded(self.stream, _COUNTS.unpack_from(self.memory)[0], self)


@dataclass(eq=False)
class _Recorded(LateEvent):
    signal: PosixSignal

    @property
    def reached(self) -> bool:
        return bool(_COUNTS.unpack_from(self.signal.memory)[1] >= self.place)


class PosixMapping(CudaIpc):
    """The mapping of memory by files of ``/proc``.

    Args:
        device: the device whose memory is shared.
        refuses: the reason for which memory cannot be mapped; empty if it can.
    """

    kind = "posix"

    def __init__(self, device: MappedDevice, refuses: str = "") -> None:
        self._late, self._refuses = device, refuses

    def share(self, memory: torch.Tensor) -> bytes:
        file, start, count = self._late.files[memory.untyped_storage().data_ptr()]
        return f"{os.getpid()} {file} {start} {count}".encode()

    def map(self, handle: bytes) -> torch.Tensor:
        if self._refuses:
            raise RuntimeError(self._refuses)
        process, file, start, count = map(int, handle.split())
        memory = _mapped(process, file)
        raw = (ctypes.c_char * len(memory)).from_buffer(memory)
        return self._late.block(raw, start, count, self._late.foreign)

    def signal(self) -> tuple[PosixSignal, bytes]:
        file = os.memfd_create("signal", os.MFD_CLOEXEC)
        os.ftruncate(file, _COUNTS.size)
        made = PosixSignal(mmap.mmap(file, _COUNTS.size), self._late.foreign)
        weakref.finalize(made, os.close, file)  # a handle of a freed event cannot be opened
        return made, f"{os.getpid()} {file}".encode()

    def signal_of(self, handle: bytes) -> PosixSignal:
        process, file = map(int, handle.split())
        return PosixSignal(_mapped(process, file), self._late.foreign)


def _mapped(process: int, file: int) -> mmap.mmap:
    descriptor = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


class MappedDevice(LateDevice):
    """A late device whose memory other processes map."""

    def __init__(self, eager: Sequence[str] = (), without: str = "", refuses: str = "") -> None:
        super().__init__(eager, without)
        self.mapping = PosixMapping(self, refuses)
        self.foreign = LateStream("other", LateDevice())  # the work of other processes
        self.files: dict[int, tuple[int, int, int]] = {}
        self.opened: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def empty(self, count: int) -> torch.Tensor:
        """Return memory in a file of its own."""
        file = os.memfd_create("device", os.MFD_CLOEXEC)
        self.opened.append(file)
        os.ftruncate(file, max(1, count))
        memory = mmap.mmap(file, max(1, count))
        memory[:] = b"\xff" * len(memory)
        raw = (ctypes.c_char * len(memory)).from_buffer(memory)
        made = self.block(raw, 0, len(memory), self.current)
        self.files[made.data_ptr()] = file, 0, len(memory)
        return made[:count]

    def start(self) -> MappedDevice:
        """Start the thread, which does the work of the streams in random order."""
        self._thread.start()
        return self

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        for file in self.opened:
            os.close(file)

    def _work(self) -> None:
        chance = random.Random(1)
        while not self._ended.is_set():
            with self._lock:
                for stream in chance.sample(self._streams, len(self._streams)):
                    self.do_ready(stream)
            time.sleep(_PAUSE)


class HostTensors:
    """A link between such devices for tests that send and receive tensors of the host."""

    def __init__(self, link: Link, device: MappedDevice) -> None:
        self.control: Lane = link.control
        self.bulk: Lane = _HostTensorLane(link.bulk, device)
        self._link, self._device = link, device

    def close(self) -> None:
        self._link.close()

    def stop(self) -> None:
        self._device.stop()


class _HostTensorLane:
    device = torch.device("cpu")
    mapped = False

    def __init__(self, lane: Lane, device: MappedDevice) -> None:
        assert lane.device == device.device
        self._lane, self._device = lane, device

    def allocate(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        with self._device.active():
            return self._lane.send(self._device.put(tensor), tag)

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        with self._device.active():
            buffers = [self._lane.allocate(tensor.nbytes) for tensor in tensors]
            pending = self._lane.receive(buffers, tag)
        return [
            _HostReceive(self._device, *one) for one in zip(pending, tensors, buffers, strict=True)
        ]


@dataclass
class _HostReceive:
    device: MappedDevice
    pending: Pending
    target: torch.Tensor
    buffer: torch.Tensor

    def wait(self) -> None:
        with self.device.active():
            self.pending.wait()
        arrived = self.device.read(self.buffer)
        self.target.copy_(arrived.view(self.target.dtype).view(self.target.shape))


@dataclass
class RealDevice:
    """The first CUDA device."""

    accelerator: Accelerator

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.accelerator.device)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stop(self) -> None: ...


def device_of(kind: str) -> tuple[Accelerator, MappedDevice | RealDevice]:
    """Return an accelerator, and how a test accesses its tensors; ``late`` stands for none."""
    if kind == "late":
        late = MappedDevice(["compute"]).start()
        return late, late
    real = accelerator_for(torch.device(kind, 0))
    assert real
    return real, RealDevice(real)


SENDER = """
import socket, sys, torch
sys.path.insert(0, sys.argv[4])
from pipeworker.worker.transport.links import mapped, shared
from pipeworker.worker.transport.links.link import TwoLanes
from support.devices.mapped import device_of
from support.in_process.transport import FORTH

def connected():
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.connect("\\0" + sys.argv[1])
    return made

accelerator, device = device_of(sys.argv[2])
host = shared.SendingLink(FORTH, connected())
link = TwoLanes(host, mapped.negotiate(connected(), FORTH, accelerator, sends=True))
with device.active():
    for m in range(int(sys.argv[3])):
        link.bulk.send(device.put(torch.arange(1000.0)) * (1.0 + m), 0).wait()
sys.stdin.read()
"""


def between_processes(jobs: Jobs, kind: str) -> None:
    """Check that every bit arrives from a device of another process, in reused buffers."""
    frames = 100
    accelerator, device = device_of(kind)
    name = f"pipeworker-test-{secrets.token_hex(8)}"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        listener.settimeout(60)
        words = ("-c", SENDER, name, kind, str(frames), str(_TESTS))
        sender = jobs.python(*words, stdin=subprocess.PIPE)
        host = shared.ReceivingLink(FORTH, listener.accept()[0])
        lane = mapped.negotiate(listener.accept()[0], FORTH, accelerator, sends=False)
    assert lane
    link = TwoLanes(host, lane)
    with device.active():
        buffers = [link.bulk.allocate(4000).view(torch.float32) for _ in range(8)]
        posted = deque(link.bulk.receive(buffers, 0))
        results = []
        for m in range(frames):
            posted.popleft().wait()
            results.append(buffers[m % 8] * 2.0)
            posted += link.bulk.receive([buffers[m % 8]], 0)
    for m, result in enumerate(results):
        assert torch.equal(device.read(result), torch.arange(1000.0) * (1.0 + m) * 2.0), m
    out, err = sender.communicate(timeout=60)
    assert (sender.returncode, out, err) == (0, "", "")
    link.close()
    device.stop()
