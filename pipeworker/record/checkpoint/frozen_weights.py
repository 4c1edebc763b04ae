"""Weights that no update changes: on disk a file of their own, which checkpoints share.

It is a second name of the file in the checkpoint before, as long as that has the same content.
Imports no torch: the process that writes needs none.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.record.files.atomic_file import open_file

NAMES, COMPLEX = "names", "complex128"
"""Metadata: the order of all names, which the format loses; and the names of complex tensors."""
_WORD = 8
"""The bytes of the widest number: the tensors begin at a multiple of it."""
_ENDING = ".safetensors"


def frozen_name(name: str) -> str:
    """Return the name of the file of frozen weights, by that of the other weights' file."""
    return f"{name.removesuffix(_ENDING)}-frozen{_ENDING}"


def header_of(entries: dict[str, Any]) -> bytes:
    """Return the beginning of a safetensors file with these entries and metadata."""
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _WORD)
    return len(text).to_bytes(_WORD, "little") + text


def link_same(chunks: Iterable[memoryview], path: Path) -> CheckpointFile | None:
    """Give a file of the newest other checkpoint the second name `path`, if it has this content.

    Neither checkpoint need be complete: the parts of other workers may still be missing.
    """
    others = (one for one in path.parent.parent.glob("*step-*") if one != path.parent)
    earlier = max(others, key=lambda one: "".join(filter(str.isdecimal, one.name)), default=None)
    if earlier is None:
        return None
    checksum = written = 0
    with suppress(OSError), open_file(earlier / path.name, "rb", buffering=0) as file:
        for chunk in chunks:
            if not _reads(file.fileno(), chunk):
                return None
            checksum = zlib.crc32(chunk, checksum)
            written += len(chunk)
        known = os.fstat(file.fileno())
        if known.st_size != written:
            return None
        os.fsync(file.fileno())  # a writer that was killed may not have done it
        os.link(earlier / path.name, path, follow_symlinks=False)
        if os.path.samestat(known, path.lstat()):
            return CheckpointFile(path.name, written, checksum)
        path.unlink()  # somebody has just replaced it
    return None


def _reads(handle: int, chunk: memoryview) -> bool:
    """Return whether the next bytes of an open file are these."""
    done = 0
    while done < len(chunk):
        found = os.read(handle, len(chunk) - done)
        if not found or found != chunk[done : done + len(found)]:
            return False
        done += len(found)
    return True
