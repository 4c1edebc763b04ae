"""Links over TLS between hosts, for a network that is not trusted.

Processes outside the job can neither connect nor read or change any data
(:mod:`pipeworker.worker.transport.credentials`). Over the encrypted connection the ends prove which
edge they are for, as over any link.

A message is a header (tag, length in bytes) and the tensor's bytes. A send writes as much as the
socket takes at once and leaves the rest to a thread. A thread that waits for a tensor reads the
connection, straight into the posted memory; while large tensors are expected a thread of the link
does, so that they arrive while the stage computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from pipeworker.errors import PeerLost, PipeworkerError, ProtocolError
from pipeworker.host.task_thread import TaskThread
from pipeworker.plan.actions import Edge
from pipeworker.worker.transport import handshake
from pipeworker.worker.transport.credentials import Login
from pipeworker.worker.transport.handshake import RendezvousPoint
from pipeworker.worker.transport.links.link import (
    COMPLETE,
    OneLane,
    Pending,
    PendingReceive,
    PendingSend,
    peer_lost,
)
from pipeworker.worker.transport.links.sending import QueuedSender

HEADER = struct.Struct("<2q")
"""The header of a message: tag, bytes."""
LARGE_BYTES = 256 << 10
"""The size from which waking a thread takes less time than reading the tensor."""
_RECORD_BYTES = 16 << 10  # a TLS record: a small message fits in one
_WOULD_BLOCK = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor; the view does not keep the tensor alive."""
    whole = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(whole).cast("B")


class SendingLink(QueuedSender):
    """The source's end. The thread sends what the socket does not take at once."""

    def __init__(self, edge: Edge, connection: socket.socket) -> None:
        super().__init__(edge, connection)
        connection.setblocking(False)
        self._ready = select.poll()
        self._ready.register(connection, select.POLLOUT | select.POLLIN)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        """Send what the socket takes at once, and queue the rest."""
        memory = _memory_of(tensor)
        first = memory[: _RECORD_BYTES - HEADER.size]
        begin = memoryview(HEADER.pack(tag, len(memory)) + first)
        parts = deque([begin, memory[len(first) :]])
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._queue and self._write(parts):
                return COMPLETE
            pending = PendingSend(tensor, tag, parts)
            self._queue.append(pending)
            self._thread.submit(self._send_all)
        return pending

    def _send_queued(self) -> None:
        with self._lock:
            if not self._queue:
                return
            pending = self._queue[0]
        if not self._write(pending.parts):
            self._ready.poll()
            return
        with self._lock:
            if self._queue:  # it may have been closed meanwhile
                self._queue.popleft()
        pending.finish()

    def _write(self, parts: deque[memoryview]) -> bool:
        """Write until the socket takes no more; return whether it has taken all parts."""
        self._check_receiver()
        while parts:
            part = parts.popleft()
            while part:
                try:
                    part = part[self._socket.send(part) :]
                except _WOULD_BLOCK:
                    parts.appendleft(part)
                    return False
                except OSError as error:
                    raise peer_lost(self._edge, error) from error
        return True

    def _check_receiver(self) -> None:
        """Raise PeerLost if the receiver has closed: it sends nothing, so only a close is readable.

        A write would not detect it: one more succeeds after the peer has closed.
        """
        try:
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as error:
            raise peer_lost(self._edge, error) from error
        raise peer_lost(self._edge, "the receiver is gone")


class ReceivingLink(OneLane):
    """The target's end. One thread at a time reads for all: a waiting one, or the link's own."""

    def __init__(self, edge: Edge, connection: socket.socket) -> None:
        self._edge = edge
        self._socket = connection
        self._changed = threading.Condition()
        self._reading = False  # whether a thread reads the connection
        self._waiting = 0  # threads that wait for another one's reading
        self._posted: dict[int, deque[PendingReceive]] = {}  # by tag
        self._large = 0  # how many large receives are posted
        self._early: dict[int, deque[bytearray]] = {}  # messages that came before their receives
        self._header = bytearray(HEADER.size)
        self._next: tuple[int, int] | None = None  # the header of a message whose body is not read
        self._thread = TaskThread(str(edge))
        self._error: PipeworkerError | None = None

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        """Post buffers, each as long as its message."""
        pending = [PendingReceive(self.complete, tensor) for tensor in tensors]
        with self._changed:
            if self._error is not None:
                raise self._error
            early = self._early.get(tag, ())
            queue = self._posted.setdefault(tag, deque())
            for receive in pending:
                if early:
                    self._fill(receive, early.popleft())
                    continue
                queue.append(receive)
                self._large += receive.tensor.nbytes >= LARGE_BYTES
            self._read_ahead()
        return pending

    def complete(self, receive: PendingReceive) -> None:
        """Read the connection, or wait for the thread that does, until a receive is done."""
        with self._changed:
            self._waiting += 1
            while not receive.done and self._error is None and self._reading:
                self._changed.wait()
            self._waiting -= 1
            if receive.done:
                return
            if self._error is not None:
                raise self._error
            self._reading = True
        with self._reader():
            while not receive.done:
                self._read_message(posted_only=False)

    def close(self) -> None:
        """Close the socket, end the thread, and wake the threads that wait."""
        with self._changed:
            self._error = self._error or PeerLost(f"the channel {self._edge} was closed")
            self._changed.notify_all()
        handshake.shut_down(self._socket)
        self._thread.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._reading)
        self._socket.close()

    def _read_ahead(self) -> None:
        """Make the thread read if a large tensor is expected; the caller holds the lock."""
        if self._large and not self._reading and self._error is None:
            self._thread.submit(self._read_large)

    def _read_large(self) -> None:
        """Read while a large tensor is expected, up to a message for which no receive is posted."""
        with self._changed:
            expected = self._large and (self._next is None or self._posted.get(self._next[0]))
            if self._reading or self._error is not None or not expected:
                return
            self._reading = True
        with contextlib.suppress(PipeworkerError), self._reader():
            while self._large and self._read_message(posted_only=True):
                pass

    @contextlib.contextmanager
    def _reader(self) -> Iterator[None]:
        """Read inside the context; at its end other threads may, or get the error that ended it."""
        error: PipeworkerError | None = None
        try:
            yield
        except PipeworkerError as caught:
            error = caught
            raise
        finally:
            with self._changed:
                self._error = self._error or error
                self._reading = False
                if self._waiting or self._error is not None:
                    self._changed.notify_all()
                self._read_ahead()

    def _read_message(self, *, posted_only: bool) -> bool:
        """Read one message; with `posted_only`, only if its receive is posted. Return if it was."""
        if self._next is None:
            self._read(memoryview(self._header))
            self._next = HEADER.unpack(self._header)
        tag, count = self._next
        with self._changed:
            queue = self._posted.get(tag)
            receive = queue.popleft() if queue else None
        if receive is None:
            if posted_only:
                return False
            self._read_early(tag, count)
            self._next = None
            return True
        self._check(receive, count)
        self._read(_memory_of(receive.tensor))
        self._next = None
        with self._changed:
            self._large -= count >= LARGE_BYTES
            receive.done = True
            if self._waiting:
                self._changed.notify_all()
        return True

    def _read_early(self, tag: int, count: int) -> None:
        """Read a message whose receive is not posted yet, into memory of its own."""
        try:
            memory = bytearray(count)  # the system commits only pages that are written to
        except (ValueError, OverflowError, MemoryError) as error:
            raise ProtocolError(
                f"the channel {self._edge}: the sender announced {count} bytes"
            ) from error
        self._read(memoryview(memory))
        with self._changed:
            if queue := self._posted.get(tag):
                receive = queue.popleft()
                self._large -= receive.tensor.nbytes >= LARGE_BYTES
                self._fill(receive, memory)
                self._changed.notify_all()
            else:
                self._early.setdefault(tag, deque()).append(memory)

    def _fill(self, receive: PendingReceive, data: bytearray) -> None:
        self._check(receive, len(data))
        _memory_of(receive.tensor)[:] = data
        receive.done = True

    def _check(self, receive: PendingReceive, count: int) -> None:
        if count != receive.tensor.nbytes:
            raise PipeworkerError(
                f"the channel {self._edge}: received {count} bytes where "
                f"{receive.tensor.nbytes} were expected"
            )

    def _read(self, memory: memoryview) -> None:
        while memory:
            try:
                count = self._socket.recv_into(memory)
            except OSError as error:
                raise peer_lost(self._edge, error) from error
            if not count:
                raise peer_lost(self._edge, "the sender is gone")
            memory = memory[count:]


def connect(
    edge: Edge, login: Login, point: RendezvousPoint, host: str, *, sends: bool
) -> ReceivingLink | SendingLink:
    """Connect this worker's end of an edge over TLS.

    The target listens at `host`, an address of this host, which it publishes.

    Raises:
        OSError: the other end cannot be reached.
        AuthenticationError: the process that listens in its place is not the peer.
    """
    if sends:
        address = handshake.parse_address(point.store.get(point.key))
        return SendingLink(edge, login.connect(address, point.deadline))
    listener, own_address = handshake.listen(host)
    with listener:
        point.store.set(point.key, own_address)
        return ReceivingLink(edge, handshake.accept(listener, edge, point.deadline, login.steps))
