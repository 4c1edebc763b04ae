"""The commands that continue from a run, as its user would type them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pipeworker.display.text import shell_join

DEFAULT_PROGRAM = ("pipeworker",)


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands with which a user exports the weights of a run, and resumes it.

    Attributes:
        program: words that run pipeworker's command line.
        start: words that started the job, up to its options; empty if they are unknown.
        job_file: empty where a script, `script`, is the job.
        own_loop: the script uses ``Pipeline``, not ``train``.
    """

    program: tuple[str, ...] = DEFAULT_PROGRAM
    start: tuple[str, ...] = ()
    job_file: str = ""
    script: str = ""
    own_loop: bool = False

    def export(self, run_dir: str) -> str:
        """Return the command that writes the run's weights to one file."""
        return shell_join([*self.program, "export", run_dir, "weights.safetensors"])

    def export_best(self, run_dir: str) -> str:
        """Return the command that writes the weights of the best evaluation to one file."""
        return shell_join([*self.program, "export", "--best", run_dir, "best.safetensors"])

    def save(self, run_dir: str) -> str:
        """Return the command that has a running job write a checkpoint."""
        return shell_join([*self.program, "checkpoint", run_dir])

    def resume(self, run_dir: str, further: tuple[str, int] | None = None) -> str:
        """Return the command, or the call in a script, that resumes the run up to `further`."""
        name, count = further or ("", 0)
        options = ["--resume", "--run-dir", run_dir, *([f"--{name}", str(count)] if name else [])]
        if not self.job_file:
            call = f"pipeworker.train(..., resume=True, run_dir={run_dir!r}"
            call += f", {name}={count})" if name else ")"
            if self.own_loop:
                call = f"pipeworker.Pipeline(..., resume=True, run_dir={run_dir!r})"
            return f"in {self.script or 'the script'}: {call}"
        if not self.start:
            return f"the same command, with {shell_join(options)}"
        return shell_join([*self.start, *options, self.job_file])


def further(steps: int, epochs: int | None, patience: int | None = None) -> tuple[str, int]:
    """Return the option that doubles what ended a run: its `patience` if given, else its length."""
    if patience is not None:
        return "patience", 2 * patience
    return ("epochs", 2 * epochs) if epochs else ("steps", 2 * steps)


def relative(path: str) -> str:
    """Shorten a path that is below the current folder; the result is no option of a command."""
    try:
        found = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    return path if found.startswith((os.pardir, "-")) else found
