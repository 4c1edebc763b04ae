"""Links over TLS between hosts, for a network that is not trusted.

Who is not of the job can neither connect nor read or change anything (:mod:`credentials`). In the
encrypted connection the ends prove which edge they are for, as over any link.

One message is a head (tag and length) and the tensor's bytes. A send writes what the socket takes
at once and leaves the rest to a thread. Who waits for a tensor reads the connection, straight into
the memory of what was posted; while large ones are expected, a thread does, so that they arrive
while the stage computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from pipeworker.environment import timings
from pipeworker.errors import PeerLost, PipeworkerError, ProtocolError
from pipeworker.plan.actions import Edge
from pipeworker.worker.transport import proof
from pipeworker.worker.transport.credentials import Credentials
from pipeworker.worker.transport.links.link import COMPLETE, OneLane, Pending
from pipeworker.worker.transport.proof import Left, Place, Steps

_HEAD = struct.Struct("<2q")  # tag, bytes
_RECORD_BYTES = 16 << 10  # what TLS encrypts at once: a small message is one
_LARGE_BYTES = 256 << 10  # less takes as long to read as to wake a thread that does
_IDLE = 30  # seconds until the kernel asks whether a silent peer is there
_AGAIN = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's memory; it does not keep the tensor."""
    whole = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(whole).cast("B")


def _lost(edge: Edge, why: object) -> PeerLost:
    return PeerLost(f"the channel {edge} closed: {why}")


@dataclass(slots=True, eq=False)
class _Sending:
    tensor: torch.Tensor | None  # until it is sent
    parts: deque[memoryview]
    done: threading.Event = field(default_factory=threading.Event)
    error: PeerLost | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class SendingLink(OneLane):
    """The source's end. What the socket does not take at once is sent by a thread."""

    device = torch.device("cpu")

    def __init__(self, edge: Edge, connection: socket.socket) -> None:
        self._edge = edge
        self._socket = connection
        self._socket.setblocking(False)
        self._lock = threading.Lock()
        self._queue: deque[_Sending] = deque()  # while there is one, only the thread writes
        self._work = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: PeerLost | None = None

    def allocate(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        raise AssertionError(f"{self._edge} begins here")

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        memory = _memory_of(tensor)
        first = memory[: _RECORD_BYTES - _HEAD.size]
        begin = memoryview(_HEAD.pack(tag, len(memory)) + first)
        sending = _Sending(tensor, deque([begin, memory[len(first) :]]))
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._queue and self._write(sending):
                return COMPLETE
            self._queue.append(sending)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._finish, name=str(self._edge), daemon=True
                )
                self._thread.start()
        self._work.release()
        return sending

    def close(self) -> None:
        """End the thread as well; what is queued is not sent."""
        self._give_up(PeerLost(f"the channel {self._edge} was closed"))
        _wake(self._socket)
        self._work.release()
        if self._thread is not None:
            self._thread.join()
        self._socket.close()

    def _finish(self) -> None:
        """Send what is queued as the socket takes it."""
        room = select.poll()
        room.register(self._socket, select.POLLOUT | select.POLLIN)
        while self._work.acquire() and self._error is None:
            while self._queue:
                sending = self._queue[0]
                try:
                    if not self._write(sending):
                        room.poll()
                        continue
                except PeerLost as error:
                    self._give_up(error)
                    return
                with self._lock:
                    self._queue.popleft()
                sending.tensor = None  # who waits for this send later need not keep it
                sending.done.set()

    def _give_up(self, error: PeerLost) -> None:
        with self._lock:
            self._error = self._error or error
            for sending in self._queue:
                sending.error = self._error
                sending.done.set()

    def _look(self) -> None:
        """Whether the target is there: it says nothing, and what is closed takes one write more."""
        try:
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as error:
            raise _lost(self._edge, error) from error
        raise _lost(self._edge, "the receiver is gone")

    def _write(self, sending: _Sending) -> bool:
        """Whether the socket has taken all of it."""
        self._look()
        parts = sending.parts
        while parts:
            part = parts.popleft()
            while part:
                try:
                    part = part[self._socket.send(part) :]
                except _AGAIN:
                    parts.appendleft(part)
                    return False
                except OSError as error:
                    raise _lost(self._edge, error) from error
        return True


@dataclass(slots=True, eq=False)
class _Receiving:
    link: ReceivingLink
    tensor: torch.Tensor
    done: bool = False

    def wait(self) -> None:
        if not self.done:
            self.link.complete(self)


class ReceivingLink(OneLane):
    """The target's end. Whoever waits reads for all, or the thread, one at a time."""

    device = torch.device("cpu")

    def __init__(self, edge: Edge, connection: socket.socket) -> None:
        self._edge = edge
        self._socket = connection
        self._turn = threading.Condition()
        self._reads = False  # somebody reads the connection
        self._waiting = 0  # who waits for that to end, or for a tensor
        self._posted: dict[int, deque[_Receiving]] = {}
        self._large = 0  # how many large ones are posted
        self._early: dict[int, deque[bytearray]] = {}  # what came before it was posted
        self._head = bytearray(_HEAD.size)
        self._next: tuple[int, int] | None = None  # the head of a message whose body is not read
        self._thread: threading.Thread | None = None
        self._error: PipeworkerError | None = None

    def allocate(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        raise AssertionError(f"{self._edge} ends here")

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        posted = [_Receiving(self, tensor) for tensor in tensors]
        with self._turn:
            if self._error is not None:
                raise self._error
            early = self._early.get(tag, ())
            queue = self._posted.setdefault(tag, deque())
            for receiving in posted:
                if early:
                    self._fill(receiving, early.popleft())
                    continue
                queue.append(receiving)
                self._large += receiving.tensor.nbytes >= _LARGE_BYTES
            if self._large and not self._reads:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._read_large, name=str(self._edge), daemon=True
                    )
                    self._thread.start()
                self._turn.notify_all()
        return posted

    def close(self) -> None:
        """End the thread as well, and wake who waits."""
        with self._turn:
            self._error = self._error or PeerLost(f"the channel {self._edge} was closed")
            self._turn.notify_all()
        _wake(self._socket)
        if self._thread is not None:
            self._thread.join()
        with self._turn:
            self._turn.wait_for(lambda: not self._reads)
        self._socket.close()

    def complete(self, receiving: _Receiving) -> None:
        """Wait for one message, or read the connection until it has come."""
        with self._turn:
            self._waiting += 1
            while not receiving.done and self._error is None and self._reads:
                self._turn.wait()
            self._waiting -= 1
            if receiving.done:
                return
            if self._error is not None:
                raise self._error
            self._reads = True
        with self._reading():
            while not receiving.done:
                self._take(posted=False)

    def _read_large(self) -> None:
        """Read while a large tensor is expected, until something comes that nobody expects."""
        while True:
            with self._turn:
                while self._error is None and (self._reads or not self._expects()):
                    self._turn.wait()
                if self._error is not None:
                    return
                self._reads = True
            with contextlib.suppress(PipeworkerError), self._reading():
                while self._large and self._take(posted=True):
                    pass

    def _expects(self) -> bool:
        return bool(self._large and (self._next is None or self._posted.get(self._next[0])))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Whoever reads says when it has ended, and what is wrong for everybody."""
        error: PipeworkerError | None = None
        try:
            yield
        except PipeworkerError as caught:
            error = caught
            raise
        finally:
            with self._turn:
                self._error = self._error or error
                self._reads = False
                if self._waiting or self._large or self._error is not None:
                    self._turn.notify_all()

    def _take(self, *, posted: bool) -> bool:
        """Read one message; with `posted`, only if somebody has posted for it."""
        if self._next is None:
            self._read(memoryview(self._head))
            self._next = _HEAD.unpack(self._head)
        tag, count = self._next
        with self._turn:
            queue = self._posted.get(tag)
            receiving = queue.popleft() if queue else None
        if receiving is None:
            if posted:
                return False
            self._keep(tag, count)
        else:
            self._check(receiving, count)
            self._read(_memory_of(receiving.tensor))
        self._next = None
        if receiving is not None:
            with self._turn:
                self._large -= count >= _LARGE_BYTES
                receiving.done = True
                if self._waiting:
                    self._turn.notify_all()
        return True

    def _keep(self, tag: int, count: int) -> None:
        """Read what nobody has posted for yet."""
        try:
            memory = bytearray(count)  # the system gives what is written to
        except (ValueError, OverflowError, MemoryError) as error:
            raise ProtocolError(f"the channel {self._edge}: {count} bytes were to come") from error
        self._read(memoryview(memory))
        with self._turn:
            if queue := self._posted.get(tag):
                receiving = queue.popleft()
                self._large -= receiving.tensor.nbytes >= _LARGE_BYTES
                self._fill(receiving, memory)
                self._turn.notify_all()
            else:
                self._early.setdefault(tag, deque()).append(memory)

    def _fill(self, receiving: _Receiving, data: bytearray) -> None:
        self._check(receiving, len(data))
        _memory_of(receiving.tensor)[:] = data
        receiving.done = True

    def _check(self, receiving: _Receiving, count: int) -> None:
        if count != receiving.tensor.nbytes:
            raise PipeworkerError(
                f"the channel {self._edge}: {count} bytes came where "
                f"{receiving.tensor.nbytes} were expected"
            )

    def _read(self, memory: memoryview) -> None:
        while memory:
            try:
                count = self._socket.recv_into(memory)
            except OSError as error:
                raise _lost(self._edge, error) from error
            if not count:
                raise _lost(self._edge, "the sender is gone")
            memory = memory[count:]


def _wake(connection: socket.socket) -> None:
    """End what waits on it. An SSLSocket's own way would let others read it unencrypted."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def connect(
    edge: Edge, secret: bytes, where: Place, credentials: Credentials, host: str, *, sends: bool
) -> ReceivingLink | SendingLink:
    """Connect this worker's end of an edge; the target listens at `host`, its own address.

    Args:
        secret: what the two ends alone know.

    Raises:
        OSError: the other end cannot be reached.
        Stranger: who listens in its place is not the peer.
    """
    if sends:
        theirs, _, port = where.store.get(where.key).decode().rpartition(" ")
        while True:
            limit = min(where.left(), timings().reach)
            connection = socket.create_connection((theirs, int(port)), timeout=limit)
            part = proof.proving(secret, sends=True)
            steps = credentials.steps(_set_up(connection), part, connects=True)
            try:
                return SendingLink(edge, proof.finish(steps, connection, where.deadline))
            except (Left, ConnectionError, ssl.SSLEOFError):
                if time.monotonic() > where.deadline:
                    raise
            time.sleep(timings().look)  # it was cut off, because of others or by them

    def steps_of(connection: socket.socket) -> Steps:
        part = proof.proving(secret, sends=False)
        return credentials.steps(_set_up(connection), part, connects=False)

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=proof.GUESTS) as listener:
        where.store.set(where.key, f"{host} {listener.getsockname()[1]}")
        return ReceivingLink(edge, proof.admit(listener, edge, where.deadline, steps_of))


def _set_up(connection: socket.socket) -> socket.socket:
    """Small messages leave at once. The kernel sizes the buffers: as far as a program may, it does
    so better."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
    return connection
