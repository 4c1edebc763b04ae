"""A lane between devices of two hosts, by an NCCL communicator of its own.

NCCL has no tags, and each of its receives must be sent to: so this lane carries only expected
tensors, in order, each as long as the buffer posted for it. Neither host waits for a device; the
compute stream waits for the tensors it needs and for room to send.

A receive occupies the device from its submission until the peer sends. Work submitted later may
have to wait for it (loading a kernel, freeing memory synchronize the device). So a receive is
submitted only when it is waited for, which depends only on work submitted before; and since the
host is far ahead of the device by then, the tensor travels while earlier work computes.

NCCL does not report that a peer is gone: the coordinator does, and ends the process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from pipeworker.environment import timings
from pipeworker.plan.actions import Edge
from pipeworker.record.checkpoint.tensor_file import raw_bytes
from pipeworker.worker.device.accelerator import Accelerator, Event
from pipeworker.worker.internals import PrefixStore, Store
from pipeworker.worker.transport.handshake import RendezvousPoint
from pipeworker.worker.transport.links.link import GroupWork, Pending, PendingReceive, peer_lost

REACH_FACTOR = 2  # NCCL searches all paths between the devices before it connects
_REMEDY = "--backend gloo does without NCCL"


class NcclLane:
    """One end of an edge: rank 0 of its group sends, rank 1 receives."""

    mapped = False

    def __init__(self, edge: Edge, group: Any, accelerator: Accelerator) -> None:
        self.device = accelerator.device
        self._edge, self._group, self._accelerator = edge, group, accelerator
        # Receives, each with the event behind which its buffer is free.
        self._posted: deque[tuple[PendingReceive, Event]] = deque()

    def allocate(self, count: int) -> torch.Tensor:
        return self._accelerator.empty(count)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        """Submit a send behind the current stream."""
        return self._submit(partial(self._group.send, [raw_bytes(tensor)], 1, 0))

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        """Post buffers; each is submitted when it, or one behind it, is waited for."""
        free = self._accelerator.event(self._accelerator.current)
        pending = [PendingReceive(self.complete, tensor) for tensor in tensors]
        self._posted += [(receive, free) for receive in pending]
        return pending

    def complete(self, receive: PendingReceive) -> None:
        """Submit receives up to this one, and make the current stream wait for it."""
        receives = self._accelerator.receives
        while receive.work is None:
            posted, free = self._posted.popleft()
            tensors = [raw_bytes(posted.tensor)]
            with self._accelerator.using(receives):
                receives.wait_event(free)
                posted.work = self._submit(partial(self._group.recv, tensors, 0, 0))
        receive.work.wait()

    def close(self) -> None:
        """Abort the group, in a thread: NCCL may not return where a peer is gone."""
        aborts = threading.Thread(target=self._group.abort, name="nccl closes", daemon=True)
        aborts.start()
        aborts.join(timings().exit)

    def _submit(self, start: Callable[[], Any]) -> GroupWork:
        """Submit a transfer; to wait for it makes the current stream wait."""
        try:
            return GroupWork(self._edge, start().wait)
        except RuntimeError as error:
            raise peer_lost(self._edge, error) from error


def connect(
    edge: Edge, point: RendezvousPoint, interface: str, accelerator: Accelerator, *, sends: bool
) -> NcclLane:
    """Connect the devices of two workers by NCCL.

    `interface` is for NCCL's own connection set-up; "" lets NCCL choose.

    Raises:
        RuntimeError: the devices cannot be connected, or not in time.
    """
    communicators = accelerator.communicators
    assert communicators
    expiring, rank = _ExpiringStore(point.store), 0 if sends else 1
    store = PrefixStore(point.key, expiring)
    store.set(f"here-{rank}", "")
    store.get(f"here-{1 - rank}")  # from here on, only the network takes time
    seconds = min(REACH_FACTOR * timings().reach, point.seconds_left())
    try:
        group = _within(seconds, lambda: communicators.group(store, rank, interface))
    finally:
        expiring.expired = True
    return NcclLane(edge, group, accelerator)


class _ExpiringStore(Store):
    """A store that answers only until the two ends are connected.

    A group keeps its store and reports lost peers to it. By then the job may be over, so that the
    store would not answer; and freeing the group waits for the threads that ask it.
    """

    expired = False

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._checked().set(key, value)

    def get(self, key: str) -> bytes:
        return self._checked().get(key)

    def check(self, keys: list[str]) -> bool:
        return self._checked().check(keys)

    def _checked(self) -> Store:
        if self.expired:
            raise ConnectionError("the two ends have met")
        return self._store


def _within(seconds: float, make: Callable[[], Any]) -> Any:
    """Return the group that `make` returns in time.

    NCCL waits for its peer without limit, on a thread that is then abandoned.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="nccl connects", daemon=True).start()
    done, _ = futures.wait([future], seconds)
    if not done:
        raise RuntimeError(f"NCCL: no answer within {seconds:.0f} s; {_REMEDY}")
    try:
        return future.result()
    except RuntimeError as error:
        raise RuntimeError(f"NCCL: {_reason(str(error))}; {_REMEDY}") from error


def _reason(text: str) -> str:
    """Return the first line of an NCCL error, and the line behind ``Last error``."""
    first, *more = text.splitlines() or [""]
    _, _, cause = "\n".join(more).partition("Last error:")
    return ": ".join([first, *cause.strip().splitlines()[:1]])
