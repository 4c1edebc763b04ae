"""What of a job its user wants to see, and how they would go on from it.

None of it changes a number, so it is no option of the job and is not recorded.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeworker.errors import UsageError

OUTPUTS = ("stage", "all", "none")
"""Whose output is shown: that of the first and the last stage, of all workers, or nobody's."""


@dataclass(frozen=True, slots=True)
class Ways:
    """How a user gets on from a run: the commands, as they are typed here.

    Attributes:
        program: what runs the command line.
        begin: what the command that started the job begins with, up to its options; empty where
            nobody knows it.
        files: behind the options; none where a script is the job.
    """

    program: tuple[str, ...] = ("pipeworker",)
    begin: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def export(self, run_dir: str) -> str:
        """Its weights as one file."""
        return shlex.join([*self.program, "export", run_dir, "weights.safetensors"])

    def resume(self, run_dir: str, further: tuple[str, int] | None = None) -> str:
        """The job goes on, to its end or `further`: to so many steps or epochs."""
        name, count = further or ("", 0)
        more = [f"--{name}", str(count)] if name else []
        options = ["--resume", "--run-dir", run_dir, *more]
        if self.begin:
            return shlex.join([*self.begin, *options, *self.files])
        if self.files:
            return f"the same command, with {shlex.join(options)}"
        said = f", {name}={count}" if name else ""
        return f"the same script, with resume=True, run_dir={run_dir!r}{said}"


@dataclass(frozen=True, slots=True)
class View:
    """What is shown.

    Attributes:
        quiet: warnings and errors alone.
        verbose: more figures of a step, and what pipeworker says in the logs of workers.
        log_every: steps between lines; None for at most one a second, and for none beside a bar.
        output: one of OUTPUTS; None is ``stage``, or ``none`` when quiet.
        origins: of the options that nobody typed, by name.

    Raises:
        UsageError: it makes no sense.
    """

    quiet: bool = False
    verbose: bool = False
    log_every: int | None = None
    output: str | None = None
    ways: Ways = field(default_factory=Ways)
    origins: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise UsageError("--quiet and --verbose: choose one")
        every = self.log_every  # as a script gave it
        if every is not None and type(every) is not int:
            raise UsageError(f"--log-every {every!r}: a {type(every).__name__}")
        if every is not None and every < 1:
            raise UsageError(f"--log-every {every}: must be 1 or more")

    @property
    def shows(self) -> str:
        """Whose output is shown."""
        return self.output or ("none" if self.quiet else "stage")


def typed(path: str) -> str:
    """As it is typed in the current folder."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    return path if relative.startswith(os.pardir) else relative
