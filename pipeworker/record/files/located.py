"""Paths through a descriptor of a folder, which stay valid when the folder is renamed."""

from __future__ import annotations

import re
from pathlib import Path

_BY_DESCRIPTOR = re.compile(r"/proc/self/fd/\d+")


def located(text: object) -> str:
    """Return a text in which each path through a descriptor is replaced by the present one."""

    def present(found: re.Match[str]) -> str:
        try:
            # The system marks the path of a folder that was removed.
            return str(Path(found[0]).readlink()).removesuffix(" (deleted)")
        except OSError:  # of another process
            return found[0]

    return _BY_DESCRIPTOR.sub(present, str(text))
