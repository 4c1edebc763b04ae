"""``python -m pipeworker``: the command line of the installation this package is part of.

The current folder is first on the import path here, and may hold a ``cli.py`` or a ``launcher/`` of
the user's. Ours are imported with that folder out of the way.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipeworker.host import streams

_ROOT = str(Path(__file__).parents[1])


def main(name: str, *, rank: bool) -> None:
    """Import our own ``cli`` and run it: as a rank of a torchrun job, or the command line."""
    sys.path[0] = _ROOT
    import cli
    import launcher.local
    import launcher.torchrun  # noqa: F401

    sys.path[:] = [*sys.path[1:], *([] if _ROOT in sys.path[1:] else [_ROOT])]
    command = cli.worker if rank else cli.main
    command(prog_name=name)


def script() -> None:
    """The ``pipeworker`` command."""
    _run("pipeworker", rank=False)


def _run(name: str, *, rank: bool) -> None:
    streams.stand_in()
    try:
        main(name, rank=rank)
    except KeyboardInterrupt:  # before the command line could take it
        sys.exit(130)
    finally:
        streams.let_go()


if __name__ == "__main__":
    _run("python -m pipeworker", rank="TORCHELASTIC_RUN_ID" in os.environ)
