"""NCCL (or AMD's RCCL) between two devices on different hosts.

A group has two devices and one direction, and a stream of its own. Its transfers are done in order,
each after the work submitted to the calling thread's current stream by then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pipeworker.worker.device.device import unit_of
from pipeworker.worker.internals import Store, nccl_group

# The coordinator decides whether a peer is lost or computes, and what follows. Torch's own watchdog
# threads would end the process: for a silent or lost peer, and for an error of the user's kernels,
# whose message comes from the main thread. They would first wait, with locks that the main thread
# needs to send, and query the store. The last setting silences a warning about groups of two, which
# do one transfer after the other.
SETTINGS = {
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


class Nccl:
    """A factory of groups of a CUDA device, as torch's process groups.

    Attributes:
        unit: identifier of the device on its host: a group needs two different ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.unit = unit_of(device)

    def group(self, store: Store, rank: int, interface: str) -> Any:
        """Connect a process group: rank 0 sends, rank 1 receives. Wait for the other end for ever.

        `interface` is the network interface for connecting; "" lets NCCL choose.

        Raises:
            RuntimeError: the ends cannot be connected.
        """
        settings = dict(SETTINGS)
        if interface and INTERFACE not in os.environ:
            settings[INTERFACE] = f"={interface}"  # NCCL reads the variable once
        with _set(settings):
            return nccl_group(store, rank, self._device)


@contextmanager
def _set(settings: dict[str, str]) -> Iterator[None]:
    """Set variables for groups created inside the context; the user's own groups are unaffected."""
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
