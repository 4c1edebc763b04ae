"""A process that ends and removes what a killed agent's workers have started.

A worker leads a session. If its agent is killed, the kernel kills the worker, but not the processes
that the worker had started. The watcher then kills all that is left in these sessions, although
launcher and agent may have been killed together. A process that has started a session of its own
has detached itself, and stays. Last, the watcher removes the workers' sockets of
``multiprocessing`` and files in shared memory.
"""

from __future__ import annotations

import multiprocessing.util
import os
import secrets
import shutil
import signal
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from struct import Struct

from pipeworker.host.device_files import remove_device_files
from pipeworker.host.lifetime import kill_all, processes_with, start_survivor

_RECORD = Struct("=i")
"""The pid of a session's leader; negative once the session is no longer watched."""
_LAST = -100
"""The priority of the exit handler that removes a folder of sockets: after those of its users."""


class SessionWatcher:
    """The watcher of this process's workers, a child that outlives this process.

    If the system grants no process for it, nothing is watched: it grants none for a worker either.

    Args:
        folder: the folder of their sockets, which is made after the watcher, so that it does not
            stay whenever this process is killed; "" for none.

    Attributes:
        folder: the folder that the watcher removes; "" for none.
    """

    def __init__(self, folder: str = "") -> None:
        self._pid, self._writes = start_survivor("watcher", partial(_watch, folder))
        self.folder = folder if self._pid else ""

    def add(self, leader: int) -> None:
        """Watch the session of a worker."""
        self._write(leader)

    def remove(self, leader: int) -> None:
        """Stop watching a session before its number may be another's."""
        self._write(-leader)

    def close(self) -> None:
        """Close this process's end; a forked worker does so, because the watcher waits for it."""
        os.close(self._writes)

    def resume(self) -> None:
        """Let a watcher that is stopped end with this process."""
        if self._pid:
            os.kill(self._pid, signal.SIGCONT)

    def _write(self, record: int) -> None:
        with suppress(BrokenPipeError):  # there is no watcher
            os.write(self._writes, _RECORD.pack(record))


def choose_sockets_folder() -> str:
    """Return the path of a folder that no process has yet, for :func:`share_sockets_folder`.

    It is "" if no folder of temporary files can be written, which most jobs do not need.
    """
    temporary = temporary_place()
    return str(temporary / f"pymp-{secrets.token_hex(4)}") if temporary else ""


def temporary_place() -> Path | None:
    """Return the folder of temporary files; None if none can be written.

    ``tempfile.gettempdir()`` would write a file to try it, which stays if this process is killed.
    """
    named = (os.environ.get(variable) for variable in ("TMPDIR", "TEMP", "TMP"))
    # The places of tempfile.gettempdir(), in its order, without the current folder.
    places = [*filter(None, named), "/tmp", "/var/tmp", "/usr/tmp"]
    usable = (Path(place).absolute() for place in places if os.access(place, os.W_OK | os.X_OK))
    return next(usable, None)


def share_sockets_folder(folder: str) -> None:
    """Make the folder for the sockets of ``multiprocessing`` in this process and its descendants.

    This process removes it at its end. Otherwise each process of a data loader makes one of its
    own, which stays when the process is killed. Its parent becomes their folder of temporary files.
    """
    if folder:
        with suppress(OSError):
            Path(folder).mkdir(mode=0o700)
            tempfile.tempdir = str(Path(folder).parent)
            # What get_temp_dir() does, with a name that a watcher knew before.
            multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
            remove = (None, shutil.rmtree, (folder, True))
            multiprocessing.util.Finalize(*remove, exitpriority=_LAST)


def keep_sockets_folder(folder: str) -> None:
    """Make a folder of :func:`share_sockets_folder` new again, or restore it.

    Many systems remove what is old from the folder of temporary files, and a job may last longer.
    """
    if folder:
        with suppress(OSError):
            Path(folder).mkdir(mode=0o700, exist_ok=True)
            os.utime(folder)


def _watch(folder: str, reads: int) -> None:
    """Follow the sessions until no process can add another, then kill what is left in them."""
    leaders: set[int] = set()
    while record := os.read(reads, _RECORD.size):
        (leader,) = _RECORD.unpack(record)
        if leader > 0:
            leaders.add(leader)
        else:
            leaders.discard(-leader)
    if leaders:
        kill_all(lambda: processes_with(os.getsid, leaders))
    for leader in leaders:
        remove_device_files(leader)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)  # the agent does so too
