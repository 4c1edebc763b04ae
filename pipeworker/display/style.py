"""The user's choices for the display of a job. None changes a number, and none is recorded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeworker.display.commands import Commands
from pipeworker.errors import UsageError

OUTPUTS = ("stage", "all", "none")
"""Which workers' output is shown: the ones with the first and the last stage, all, or none."""


def is_dumb() -> bool:
    """Return whether the terminal, by its own name, draws neither bars nor colours."""
    return os.environ.get("TERM") in ("dumb", "unknown")


@dataclass(frozen=True, slots=True)
class Style:
    """The style in which a job is displayed.

    Attributes:
        json: events for programs, in place of lines.
        log_every: steps between lines; None for at most one line a second, or none beside a bar.
        output: one of OUTPUTS; None is ``stage``, or ``none`` if quiet.
        origins: the sources of options that are not on the command line, by name.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    log_every: int | None = None
    output: str | None = None
    commands: Commands = field(default_factory=Commands)
    origins: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise UsageError("--quiet and --verbose: they exclude each other; choose one")
        every = self.log_every  # a script may pass anything
        if every is not None and (type(every) is not int or every < 1):
            raise UsageError(f"--log-every {every!r}: must be an integer of 1 or more")

    @property
    def shown_output(self) -> str:
        """The one of OUTPUTS that applies."""
        return self.output or ("none" if self.quiet else "stage")
