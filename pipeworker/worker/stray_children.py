"""Children that the user's code forks, and that return to pipeworker instead of ending.

Such a child would do the work of its parent a second time, over the same connections: mini-batches
would be missing, and other workers would receive tensors twice. It ends instead, once it has left
the user's code.
"""

from __future__ import annotations

import os
from functools import cache

from pipeworker.host import streams

stray: list[int] = []
"""In a child of a process that watches its forks: the pid of that process; else nothing."""


def watch() -> None:
    """Make later forks of this process strays, and this process none."""
    stray.clear()
    _follow_forks()


def end_stray_child() -> None:
    """End this process if it is a stray. Call this where the user's code returns."""
    if stray:
        streams.note(
            f"a child that the job file forked from process {stray[0]} returned to pipeworker, and "
            "ends; call os._exit() in the child, or use multiprocessing"
        )
        os._exit(1)


@cache
def _follow_forks() -> None:
    os.register_at_fork(after_in_child=lambda: stray.append(os.getppid()))
