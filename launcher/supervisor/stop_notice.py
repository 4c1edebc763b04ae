"""The warning that a job stops, which says whether there will be a checkpoint."""

from __future__ import annotations

from pipeworker.job.options import Options
from pipeworker.wire.lines import Warned

_AGAIN = "interrupt again to stop at once"
_STEP = f"stopping after this step, with a checkpoint; {_AGAIN}"
_EARLY = f"stopping before the first step, so without a checkpoint; {_AGAIN}"


class StopNotice:
    """The warning to the user of one job, from the time at which it is asked to stop."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._early = False

    def stopping(self, reason: str, steps: int, *, trains: bool) -> Warned:
        """Return the warning after `steps`; `trains` says whether all workers have joined."""
        if self._options.plan_only or self._options.evaluate_only:
            return Warned(f"{reason}stopping; {_AGAIN}")
        self._early = not trains and steps == self._options.resume_step
        return Warned(reason + (_EARLY if self._early else _STEP))

    def training(self) -> list[Warned]:
        """Return a correction if the first step had begun before the coordinator was to stop."""
        early, self._early = self._early, False
        return [Warned(_STEP)] if early else []
