"""``python -m pipeworker``: the command line of the installation this package is part of.

The current folder is first on the import path here, and may hold a ``cli.py`` or a ``launcher/`` of
the user's. Ours are imported with that folder out of the way.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])


def main() -> None:
    """Import our own ``cli`` and run it: a stage of a torchrun job, or the command line."""
    sys.path[0] = _ROOT
    import cli
    import launcher.local
    import launcher.torchrun  # noqa: F401

    sys.path[:] = [*sys.path[1:], *([] if _ROOT in sys.path[1:] else [_ROOT])]
    command = cli.worker if "TORCHELASTIC_RUN_ID" in os.environ else cli.main
    command(prog_name="python -m pipeworker")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before the command line could take it
        sys.exit(130)
