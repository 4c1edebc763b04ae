"""Files that any program may have written: only regular ones are read, up to a bound.

Imports no torch.
"""

from __future__ import annotations

import errno
import json
import os
import reprlib
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from pipeworker.errors import UnreadableFile

MAX_BYTES = 16 << 20
"""The bound of a file of which nothing else is known."""
ABSENT = (FileNotFoundError, NotADirectoryError)
"""Errors that there is no file."""
LACKS_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Numbers of errors that say nothing of a file."""
_MAX_DEPTH = 32
_MAX_DIGITS = 100  # any such integer can be computed with, converted to a float and shown


def open_bounded(path: Path, most: int | None = MAX_BYTES) -> IO[bytes]:
    """Open a regular file of at most `most` bytes, or of any size, for reading.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no file.
        OSError: no file descriptor is free, which says nothing of the file: a later try may do.
        UnreadableFile: the file cannot be opened, it is larger, or it is a pipe or a device, which
            may have no end.
    """
    try:
        file = _open(path)
    except ABSENT:
        raise
    except OSError as error:
        if error.errno in LACKS_DESCRIPTORS:
            raise
        raise UnreadableFile(path, error) from None
    found = os.fstat(file.fileno())
    reason = ""
    if not stat.S_ISREG(found.st_mode):
        reason = "it is not a regular file"
    elif most is not None and found.st_size > most:
        reason = f"it has {found.st_size} bytes, and at most {most} are read"
    if reason:
        file.close()
        raise UnreadableFile(path, reason)
    return file


def _open(path: Path) -> IO[bytes]:
    """Open a file, without waiting for a writer if it is a pipe."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_json(
    path: Path,
    kind: Any,
    reason: str,
    remedy: str = "",
    versions: Sequence[int] = (),
    most: int = MAX_BYTES,
    depth: int = _MAX_DEPTH,
    digits: int = _MAX_DIGITS,
) -> dict[str, Any]:
    """Return the JSON object in a file, as it is there.

    It must be of a `kind`, a type that msgspec checks, or else is rejected for the `reason`. Its
    version must be one of `versions`, if there are any. See :func:`load_json` for the bounds.

    Raises:
        OSError, UnreadableFile: as :func:`open_bounded`, or the object is of another kind or
            version.
    """
    with open_bounded(path, most) as file:
        data = file.read(most)
    try:
        content = msgspec.convert(load_json(data, depth, digits), dict[str, Any])
        if versions and "version" not in content:  # another program's file
            raise UnreadableFile(path, reason, remedy)
        version = content.get("version")
        if versions and (type(version) is not int or version not in versions):
            raise UnreadableFile(
                path,
                f"it has version {reprlib.repr(version)}, and this pipeworker reads version "
                f"{' or '.join(map(str, versions))}",
                "use the pipeworker that wrote it",
            )
        msgspec.convert(content, kind)
    except msgspec.ValidationError as error:  # it has the place
        raise UnreadableFile(path, f"{reason} ({error!s:.200})", remedy) from None
    except (ValueError, RecursionError):
        raise UnreadableFile(path, reason, remedy) from None
    return content


def load_json(data: bytes, depth: int = _MAX_DEPTH, digits: int = _MAX_DIGITS) -> Any:
    """Parse JSON that is nested at most `depth` times, with integers of at most so many digits.

    Raises:
        ValueError: it is not such JSON.
        RecursionError: it is nested far too deeply.
    """

    def parse_int(text: str) -> int:
        if len(text) > digits:
            raise ValueError("too many digits")
        return int(text)

    value = json.loads(data.decode(), parse_int=parse_int)
    level = [value]
    for _ in range(depth):
        level = [
            item
            for one in level
            if isinstance(one, (dict, list))
            for item in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return value
    raise ValueError("nested too deeply")
