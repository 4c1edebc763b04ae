"""A job in a temporary directory, which leaves nothing, also if this process is killed."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from launcher import local
from launcher.spec import Host, RemoteAgent
from pipeworker.display.style import Style
from pipeworker.host.lifetime import start_survivor
from pipeworker.host.session_watcher import temporary_place
from pipeworker.job.options import Options
from pipeworker.record.lock import RunLock
from pipeworker.record.rundir import RunDir
from pipeworker.runs.begin import PreparedRun

_SECONDS = 60.0
"""How long the processes of a job may take to end once its launcher is killed."""


@contextmanager
def temporary_run() -> Iterator[RunDir]:
    """Make a run directory in a folder of its own, which is removed at the end.

    If this process is killed, a child removes the folder as soon as the job's coordinator has
    ended.

    Raises:
        OSError: the folder cannot be made.
    """
    place = temporary_place() or Path(tempfile.gettempdir())  # it raises, or is the current folder
    folder = place / f"pipeworker-{secrets.token_hex(4)}"
    run_dir = RunDir(folder / "run")
    child, writes = start_survivor("remover", partial(_remove, folder, run_dir.lock))
    try:
        folder.mkdir(mode=0o700)
        run_dir.path.mkdir()
        yield run_dir
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(writes)
        if child:
            os.waitpid(child, 0)


def _remove(folder: Path, lock: Path, reads: int) -> None:
    """Remove the folder of a run once its launcher and its coordinator have ended."""
    os.read(reads, 1)
    with suppress(OSError), RunLock(lock, exclusive=True, timeout=_SECONDS):
        pass
    shutil.rmtree(folder, ignore_errors=True)


def run_aside(options: Options, run_dir: RunDir) -> None:
    """Run a job on this host in the directory of :func:`temporary_run`, and show errors alone.

    Raises:
        SystemExit: the job failed, and has said why.
    """
    for made in (run_dir.checkpoints.path, run_dir.logs):
        made.mkdir(parents=True, exist_ok=True)
    lock = RunLock(run_dir.lock, exclusive=False)
    prepared = PreparedRun(options, RunDir.open(run_dir.path), lock, ExitStack())
    agents = (RemoteAgent(Host("", options.workers)),)
    if status := local.run(prepared, Style(quiet=True), agents):
        sys.exit(status)
