"""Weights that no update changes: on disk a file of their own, which checkpoints share.

A snapshot has all weights of a worker in one file, the frozen ones first. On disk it becomes two
files, and the one of the frozen weights is a second name of the file in the checkpoint before, as
long as that has the same content. Imports no torch: the process that writes needs none.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.record.files.atomic_file import open_file

FROZEN, NAMES, COMPLEX = "frozen", "names", "complex128"
"""Metadata: how many bytes the frozen weights take; the order of all names, which the format loses;
and the names of complex tensors."""
ALIGNMENT = 8
"""The bytes of the widest number: the weights behind the frozen ones begin at a multiple of it."""
Part = tuple[bytes, int, int]
"""A file's header, and the range of bytes of the whole file that follow it."""
_WORD = 8
_ENDING = ".safetensors"


def frozen_name(name: str) -> str:
    """Return the name of the file of frozen weights, by that of the other weights' file."""
    return f"{name.removesuffix(_ENDING)}-frozen{_ENDING}"


def header_of(entries: dict[str, Any]) -> bytes:
    """Return the beginning of a safetensors file with these entries and metadata."""
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(_WORD, "little") + text


def split(handle: int) -> tuple[Part, Part] | None:
    """Return the files of other and of frozen weights that an open file is to become.

    It is None if the file has no frozen weights, or nothing else.
    """
    size = int.from_bytes(os.pread(handle, _WORD, 0), "little")
    entries = json.loads(os.pread(handle, size, _WORD) or b"{}")
    metadata = entries.pop("__metadata__", {})
    start, end = _WORD + size, os.fstat(handle).st_size
    middle = start + int(metadata.pop(FROZEN, 0))
    if middle in (start, end):
        return None
    parts = []
    for first, last in ((middle, end), (start, middle)):
        own = {
            name: {**entry, "data_offsets": [at + start - first for at in entry["data_offsets"]]}
            for name, entry in entries.items()
            if first <= entry["data_offsets"][0] + start < last
            or (first == middle and entry["data_offsets"][0] + start >= last)
        }
        lists = {
            key: json.dumps([name for name in json.loads(metadata[key]) if name in own])
            for key in (NAMES, COMPLEX)
            if key in metadata
        }
        parts.append((header_of({"__metadata__": {**metadata, **lists}, **own}), first, last))
    others, frozen = parts
    return others, frozen


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


def ranges(handle: int, part: Part, size: int) -> Iterator[memoryview]:
    """Yield a header and a range of an open file, through one buffer of `size` bytes.

    Raises:
        OSError: the file ends before the range does.
    """
    header, start, end = part
    yield memoryview(header)
    buffer = memoryview(bytearray(size))
    while start < end:
        count = os.preadv(handle, [buffer[: min(size, end - start)]], start)
        if not count:
            raise OSError(f"the file has no byte {start}: it was shortened while it was copied")
        yield buffer[:count]
        start += count
