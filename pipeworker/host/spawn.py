"""How a process of our own installation is started, whatever the current folder holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pipeworker

_ROOT = str(Path(pipeworker.__file__).parents[1])
# A module of the user's in the current folder must not be taken for one of ours, so the folder that
# `-c` puts first on the path goes, and where pipeworker was found comes last.
# An interrupt that comes before anybody can take it ends the process without a traceback.
_BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "import sys; sys.path.pop(0); root, name = sys.argv[1:3]; "
    "root in sys.path or sys.path.append(root); "
    "import importlib; sys.exit(importlib.import_module(name).main())"
)


def command(module: str, python: str = "", *words: str) -> list[str]:
    """The command that runs ``main()`` of one of our modules.

    Args:
        python: another interpreter than the one that runs here.
        words: behind the module in ``sys.argv``.
    """
    return [python or sys.executable, "-c", _BOOT, _ROOT, module, *words]
