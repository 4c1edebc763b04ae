"""Two devices that reach each other over the network by themselves: by NCCL, or AMD's RCCL.

A group is of two devices and one direction, on a stream of its own: what it is given is done in
turn, behind what the calling thread's current stream has been given by then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from pipeworker.worker.device.device import unit_of
from pipeworker.worker.device.visible import TorchAccelerators
from pipeworker.worker.internals import Store, nccl_group

# Whether a peer is gone or computes, and what then happens, is for the coordinator to say. Torch's
# own threads would end the process: for a peer that is silent or lost, and for an error of the
# user's kernels, whose message comes from the main thread. They would wait first, with what the
# main thread needs to send, and ask the store. Groups of two do one thing after the other, which
# torch finds worth a warning.
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
INTERFACE = "NCCL_SOCKET_IFNAME"


class Work(Protocol):
    """A send or receive that the device was given."""

    def wait(self) -> Any:
        """The current stream goes on when it is done."""


class Group(Protocol):
    """See the module. Rank 0 sends, rank 1 receives; both say the same number of bytes."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """One tensor of bytes, whose memory is kept until it has left."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """One tensor of bytes."""

    def abort(self) -> None:
        """Give up what is under way."""


class Communicators(Protocol):
    """What makes groups."""

    @property
    def unit(self) -> str:
        """Which device of its host it is: a group needs two."""

    def group(self, store: Store, rank: int, interface: str) -> Group:
        """A group, which is connected. It waits for the other end, however long that takes.

        Args:
            store: where the two meet.
            interface: what carries what they say to connect; empty to have it choose.

        Raises:
            RuntimeError: they cannot be connected.
        """


class Nccl:
    """By torch's own process groups."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.unit = unit_of(device, TorchAccelerators())

    def group(self, store: Store, rank: int, interface: str) -> Group:
        settings = dict(_SETTINGS)
        if interface and INTERFACE not in os.environ:
            settings[INTERFACE] = f"={interface}"  # NCCL reads it once
        with _set(settings):
            made: Group = nccl_group(store, rank, self._device)
            return made


@contextmanager
def _set(settings: dict[str, str]) -> Iterator[None]:
    """For groups that are made within; those that the user's code makes have its own."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
