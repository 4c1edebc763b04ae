"""The files that a job is made of: the job file, and what it imports from its folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

MOST = 1 << 10
"""Files that are looked at: a package of more is not what somebody forgot to copy."""
_DIGITS = 16


def digests(job_file: Path, modules: Iterable[ModuleType]) -> Iterator[tuple[str, str]]:
    """Of the job file, and of those modules that lie beside it: name in the folder, and digest."""
    folder = job_file.parent
    found = [job_file]
    for module in modules:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py"):
            path = Path(file)
            if path.is_relative_to(folder) and path != job_file:
                found.append(path)
    for path in found[:MOST]:
        try:
            data = path.read_bytes()
        except OSError:
            continue  # made by the program, or gone since
        yield str(path.relative_to(folder)), hashlib.sha256(data).hexdigest()[:_DIGITS]
