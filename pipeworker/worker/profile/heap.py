"""The memory that the CPU's allocator takes for tensors: more than their bytes.

The allocator of the C library cannot use each hole that a freed tensor leaves between others. The
bytes that it loses depend on the sizes of all tensors that a forward makes, and are lost as long as
the graph exists. They are measured: results are kept, and the resident memory grows.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_STATM = Path("/proc/self/statm")
_LEAST = 1 << 16
"""Bytes of a result below which nothing is measured: pages are too coarse for less."""
_ALL = 64 << 20
_FEWEST, _MOST = 2, 8
"""As many results are kept as have `_ALL` bytes, but no fewer and no more than these."""


def lost_bytes(run: Callable[[], Any], size: int, *, once: bool) -> int:
    """Return the bytes that the allocator loses for each result of `run` that is kept.

    A result has `size` bytes; the allocator loses no more than as many. With `once` a single
    result is made, and what `run` takes for a time counts too. The result is 0 where the allocator
    cannot be asked to return its free memory: other systems than Linux with glibc.
    """
    if size < _LEAST or not _trim():
        return 0
    count = 1 if once else max(_FEWEST, min(_MOST, _ALL // size))
    sizes, kept = [_resident()], []
    for _ in range(count):
        kept.append(run())
        sizes.append(_resident())
    del kept
    half = count // 2  # the first ones also take what later ones use again
    grown = (sizes[-1] - sizes[half]) // (count - half)
    return min(size, max(0, grown - size))


def _trim() -> bool:
    """Return the allocator's free memory to the system; return whether that was possible."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        return _STATM.exists()
    return False


def _resident() -> int:
    """Return the resident bytes of this process that it shares with no other."""
    _, resident, shared, *_ = map(int, _STATM.read_bytes().split())
    return (resident - shared) * resource.getpagesize()
