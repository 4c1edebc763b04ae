"""This host: what is looked at before a process is started, and a job that has no other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from launcher.run import Launch
from launcher.spec import Carried, Host
from pipeworker.errors import UsageError
from pipeworker.plan.orders import placement
from pipeworker.session.begin import Begun
from pipeworker.session.show.view import View


def run(begun: Begun, view: View | None = None, carried: Sequence[Carried] = ()) -> int:
    """Run a job to its end; returns the exit status.

    Args:
        view: what is shown.
        carried: the agents of its hosts; none for this host alone.
    """
    options = begun.options
    view = replace(view or View(), origins=begun.origins)
    if not carried:
        ranks = placement(options.schedule, options.stages, options.replicas).ranks
        carried = (Carried(Host("", ranks)),)
    with closing(begun):
        verdict = Launch(options, begun.run_dir, carried, begun.warnings, view).run()
        begun.close(verdict)
    return verdict.exit_status


def check_job_file(path: Path) -> None:
    """Look at the job file without running it, so that a typing error starts no process.

    Raises:
        UsageError: it does not exist, cannot be read or is not Python.
    """
    try:
        compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise UsageError(f"job file {path}: {error.strerror}") from None
    except SyntaxError as error:
        marked = f"\n    {error.text.strip()}" if error.text else ""
        line = f", line {error.lineno}" if error.lineno else ""
        raise UsageError(f"job file {path}{line}: {error.msg}{marked}") from None
    except ValueError as error:
        raise UsageError(f"job file {path} is not Python source: {error}") from None


def accelerators() -> int:
    """How many accelerators this host has, as the default number of stages.

    Raises:
        UsageError: it has none.
    """
    code = "import torch; print(torch.accelerator.device_count())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    count = int(answer.stdout or 0)
    if not count:
        raise UsageError("this host has no accelerator: say how many stages with --stages")
    return count
