"""Entry point: ``python -m pipeworker`` and the ``pipeworker`` command.

The current folder is first on the import path here and may hold a ``cli.py`` or a ``launcher/`` of
the user's, so the command line of this installation is imported with that folder off the path.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from pipeworker.host import signals, streams

_PACKAGE = Path(__file__).parent
_ROOT = str(_PACKAGE.parent)
_INSTALLED = _PACKAGE / "_command"
"""Holds ``cli.py`` and ``launcher/`` in an installation; in a checkout they are beside the package
(``setup.py``)."""
_START_JOBS = {"launch", "evaluate", "plan"}
"""The commands that start a job."""


def script() -> None:
    """Run the ``pipeworker`` command."""
    _run("pipeworker", rank=False)


def _run(name: str, *, rank: bool) -> None:
    """Import and run the command line of this installation, as a rank of torchrun or not."""
    try:
        # What started this process may ignore the end of its children, and block signals.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if _START_JOBS.intersection(sys.argv[1:2]):
            signals.handle_before_job()
        streams.open_missing()
        streams.accept_any_text()
        sys.path[0] = str(_INSTALLED) if _INSTALLED.is_dir() else _ROOT
        with signals.exit_at_interrupt():
            import cli
            import launcher.local
            import launcher.torchrun  # noqa: F401

        sys.path[:] = [*sys.path[1:], *([] if _ROOT in sys.path[1:] else [_ROOT])]
        command = cli.worker if rank else cli.main
        command(prog_name=name)
    except KeyboardInterrupt:  # before the command line handled it
        sys.exit(130)
    finally:
        streams.discard_unwritten()


if __name__ == "__main__":
    _run("python -m pipeworker", rank="TORCHELASTIC_RUN_ID" in os.environ)
