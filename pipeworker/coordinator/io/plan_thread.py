"""Makes plans in a thread, because the plan of a large network takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from threading import Thread

from pipeworker.coordinator.effects import MakePlan
from pipeworker.coordinator.events import PlanMade
from pipeworker.errors import UsageError
from pipeworker.job.planning import plan_job

log = logging.getLogger("pipeworker.coordinator")

_SOON = 0.1
"""Seconds for which a caller waits: most plans take less."""


class PlanThread:
    """The plans that are being made; a thread ends with its plan, or with the process."""

    def __init__(self) -> None:
        self._made: SimpleQueue[PlanMade] = SimpleQueue()

    def begin(self, request: MakePlan) -> None:
        """Begin to make a plan; wait for a short while until it is made."""
        thread = Thread(target=lambda: self._made.put(make(request)), daemon=True)
        thread.start()
        thread.join(_SOON)

    def made(self) -> Iterator[PlanMade]:
        """Yield the plans that have been made since the last call."""
        while True:
            try:
                yield self._made.get_nowait()
            except Empty:
                return


def make(request: MakePlan) -> PlanMade:
    """Return the plan that was requested, or why there is none."""
    try:
        return PlanMade(request.generation, plan_job(request.facts, request.options))
    except UsageError as error:
        return PlanMade(request.generation, None, str(error))
    except Exception:
        log.exception("the plan cannot be made")
        text = "the plan cannot be made: see logs/coordinator.log; give --balance and --recompute"
        return PlanMade(request.generation, None, text)
