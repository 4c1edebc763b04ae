"""Senders over a socket: what it does not take at once is queued and sent by a thread."""

from __future__ import annotations

import abc
import socket
import threading
from collections import deque
from typing import Any

import torch

from pipeworker.errors import PeerLost, ProtocolError
from pipeworker.host.task_thread import TaskThread
from pipeworker.plan.actions import Edge
from pipeworker.worker.transport import handshake
from pipeworker.worker.transport.links.link import (
    COMPLETE,
    OneLane,
    Pending,
    PendingSend,
    peer_lost,
)

RECORD_BYTES = 2048
"""The longest record by which a receiver posts buffers."""

Ancillary = list[tuple[int, int, bytes]]
"""Control messages of a Unix socket, as ``socket.recvmsg`` returns them."""


class QueuedSender(OneLane, abc.ABC):
    """The source's end of an edge over a socket.

    While sends are queued, only the thread uses the socket, so that messages keep their order.
    """

    def __init__(self, edge: Edge, connection: socket.socket) -> None:
        self._edge = edge
        self._socket = connection
        self._lock = threading.Lock()
        self._queue: deque[PendingSend] = deque()
        self._error: Exception | None = None  # ends every later send that would be queued
        self._thread = TaskThread(str(edge))

    def close(self) -> None:
        """Close the socket and end the thread; queued sends fail."""
        error = PeerLost(f"the channel {self._edge} was closed")
        self._error = self._error or error
        # Wakes the thread, and a caller that holds the lock while the socket is full.
        handshake.shut_down(self._socket)
        self._thread.close()
        self._socket.close()
        self._fail(error)

    @abc.abstractmethod
    def _send_queued(self) -> None:
        """Wait for the socket once, then send what is possible of the queue."""

    def _send_all(self) -> None:
        """Send, on the thread, all that is queued."""
        try:
            while self._queue:
                self._send_queued()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
            for pending in self._queue:
                pending.fail(self._error)
            self._queue.clear()


class PostedSender(QueuedSender):
    """A sender whose receiver posts its buffers over a Unix socket.

    A send is delivered when a buffer is posted for its tag.
    """

    ancillary_bytes = 0
    """The room for the control messages of a receiver's record."""

    def __init__(self, edge: Edge, connection: socket.socket) -> None:
        super().__init__(edge, connection)
        self._posts: dict[int, deque[Any]] = {}  # posted buffers by tag, oldest first

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        """Deliver a tensor if its buffer is posted, else queue it."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._queue:
                while not (posts := self._posts.get(tag)):
                    record = self._receive_record(socket.MSG_DONTWAIT)
                    if record is None:
                        break
                    self._register(*record)
                if posts:
                    self._deliver(tensor, tag)
                    return COMPLETE
            pending = PendingSend(tensor, tag)
            self._queue.append(pending)
            self._deliver_posted()
            if pending.done.is_set():
                return COMPLETE
            self._thread.submit(self._send_all)
        return pending

    @abc.abstractmethod
    def _register(self, record: bytes, ancillary: Ancillary) -> None:
        """Note the buffers that a record of the receiver posts; raise ProtocolError if invalid."""

    @abc.abstractmethod
    def _deliver(self, tensor: torch.Tensor, tag: int) -> None:
        """Copy a tensor into the oldest buffer posted for a tag, and notify the receiver."""

    def _send_queued(self) -> None:
        record = self._receive_record(0)
        with self._lock:
            if record is not None:
                self._register(*record)
            self._deliver_posted()

    def _receive_record(self, flags: int) -> tuple[bytes, Ancillary] | None:
        """Return one record of the receiver and its control messages, or None if none is there."""
        try:
            record, ancillary, _, _ = self._socket.recvmsg(
                RECORD_BYTES, self.ancillary_bytes, flags
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise peer_lost(self._edge, error) from error
        if not record:
            raise peer_lost(self._edge, "the receiver is gone")
        return record, ancillary

    def _deliver_posted(self) -> None:
        """Deliver every queued send whose buffer is posted, in order within each tag."""
        blocked: set[int] = set()
        for pending in list(self._queue):
            if pending.tag in blocked or not self._posts.get(pending.tag):
                blocked.add(pending.tag)
                continue
            assert pending.tensor is not None
            self._deliver(pending.tensor, pending.tag)
            self._queue.remove(pending)
            pending.finish()

    def _invalid(self, post: str) -> ProtocolError:
        return ProtocolError(f"the channel {self._edge}: the receiver posted {post}")
