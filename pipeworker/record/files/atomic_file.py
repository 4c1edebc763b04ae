"""Files that appear whole or not at all. Imports no torch."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_PARTIAL = re.compile(r"\.[0-9a-f]{16}\.partial")


@contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` at which the caller creates what it then renames to `path`.

    The name is random: several processes may write at once, and nobody can prepare a link there. A
    file or folder that still has the temporary path on exit is removed;
    :func:`remove_partial_files` removes those of killed processes.

    Raises:
        IsADirectoryError: the path is that of a folder without a name: ``.`` or ``/``.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        yield temporary
    finally:
        with suppress(OSError):
            remove(temporary)


def remove(path: Path) -> None:
    """Remove a file, a folder with its content or a link, but not what the link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_partial_file(path: Path) -> bool:
    """Return whether a path is a temporary one, of a process that writes or was killed."""
    return _PARTIAL.fullmatch(path.name) is not None


def remove_partial_files(folder: Path) -> None:
    """Remove what killed processes left at temporary paths in a folder where none writes now."""
    for path in filter(is_partial_file, folder.iterdir()):
        remove(path)


def open_file(path: Path, mode: str, **arguments: Any) -> IO[Any]:
    """Open a file as ``open`` does, but follow no link. The umask is taken from a new file's mode.

    A run directory may come from a stranger: a link in it could lead to any file of the user's.
    """
    return open(path, mode, opener=no_link, **arguments)


def no_link(path: str | Path, flags: int) -> int:
    """Return a descriptor of a regular file, without following a link; see :func:`open_file`.

    Raises:
        OSError: the file cannot be opened; or it is a pipe or a device, which could block the job.
    """
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def write_bytes(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file; it is on disk when this returns. The umask is taken from the `mode`.

    Raises:
        OSError: the file cannot be written; what `path` held before is unchanged.
    """
    with temporary_path(path) as temporary:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            sync_file(file)
        temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON; raises as :func:`write_bytes`."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def replace_json(path: Path, value: Any) -> None:
    """Write `value` as JSON in place of a file; readers see either one, and the disk may lag.

    Raises:
        OSError: the file cannot be written; what `path` held before is unchanged.
    """
    with temporary_path(path) as temporary:
        with temporary.open("xb") as file:
            file.write(json.dumps(value).encode())
        temporary.replace(path)


def sync_file(file: IO[str] | IO[bytes]) -> None:
    """Flush an open file to disk."""
    with named(file.name):
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names of a folder's files to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with named(folder):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def named(path: Path | str) -> Iterator[None]:
    """Have an OSError of a descriptor inside the context name its file, as the system does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
