"""Files in shared memory by which processes share the memory of a CUDA device."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")
_FIRST_PID_NAMESPACE, _FIRST_IPC_NAMESPACE = 0xEFFFFFFC, 0xEFFFFFFF
"""The inodes of a Linux host's own namespaces."""


def remove_device_files(pid: int) -> None:
    """Remove the files of a worker that has ended.

    In one of them torch counts the processes that use the memory that a process shares, and the
    driver has one for events. Both remove them only if the process calls the exit handlers of its
    libraries.
    """
    with suppress(OSError):
        if _has_own_numbers():
            return
    for pattern in (f"torch_{pid}_*", f"cuda.shm.{os.getuid()}.{pid:x}.*"):
        for path in _FOLDER.glob(pattern):
            with suppress(OSError):  # another user's
                path.unlink()


def _has_own_numbers() -> bool:
    """Return whether the same pids may name other processes that use the folder.

    This is so in a container that shares its host's memory, but not its processes.
    """
    pids, memory = (Path("/proc/self/ns", name).stat().st_ino for name in ("pid", "ipc"))
    return pids != _FIRST_PID_NAMESPACE and memory == _FIRST_IPC_NAMESPACE
