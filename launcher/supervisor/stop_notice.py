"""The warning that a job stops, which says whether there will be a checkpoint."""

from __future__ import annotations

from pipeworker.job.options import Options
from pipeworker.wire.lines import Warned

_AGAIN = "interrupt again to stop at once"


def stop_notice(options: Options, reason: str = "", *, early: bool) -> Warned:
    """Return the warning to the user; `early` says that no step has begun."""
    text = "stopping after this step, with a checkpoint"
    if options.plan_only or options.evaluate_only:
        text = "stopping"
    elif early:
        text = "stopping before the first step, so without a checkpoint"
    return Warned(f"{reason}{text}; {_AGAIN}")
