"""What is next."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.wire.messages.calls import Wait
from pipeworker.wire.messages.checkpoint import Copy, Save
from pipeworker.wire.messages.evaluation import Evaluate, Evaluated
from pipeworker.wire.messages.step import RunStep, Update


@dataclass(frozen=True, slots=True)
class Finish:
    """All is done: leave."""


Next = RunStep | Evaluate | Save | Wait | Finish


@dataclass(frozen=True, slots=True)
class Advance:
    """What is next; before it, what is due of the last step or pass, and what is copied then."""

    next: Next
    update: Update | Evaluated | None = None
    copy: Copy | None = None
