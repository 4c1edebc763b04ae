"""``python -m pipeworker``: the command line of the installation this package is part of.

The current folder is first on the import path here, and may hold a ``cli.py`` or a ``launcher/`` of
the user's. Ours are imported with that folder out of the way.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])


def main() -> None:
    """Import our own ``cli`` and run it."""
    path = list(sys.path)
    sys.path[:] = [_ROOT, *path[1:]]
    import cli
    import launcher.local
    import launcher.torchrun

    del launcher
    sys.path[:] = path[1:]
    if _ROOT not in sys.path:
        sys.path.append(_ROOT)
    cli.entry()


if __name__ == "__main__":
    main()
