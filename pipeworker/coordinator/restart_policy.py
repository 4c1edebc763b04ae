"""Whether a job restarts after a loss, and with how many workers. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position

WINDOW = 3600.0
"""Seconds within which losses count towards the limit: a long job has some."""
_EARLY_LOSSES = 2
"""Losses in a row before any step, after which this number of workers counts as unavailable."""
_WITHOUT_LAYER = (Phase.LOADING, Phase.BUILDING, Phase.READING, Phase.SURVEY)
"""Phases in which the user's code may hang outside of any layer."""


@dataclass(slots=True)
class RestartPolicy:
    """The limit on the restarts of a job within an hour, and the causes of all so far."""

    limit: int
    causes: list[str] = field(default_factory=list)
    _times: list[float] = field(default_factory=list)
    _last: tuple[Cause, int, Position] | None = None
    _lost: set[int] = field(default_factory=set)
    """Ranks of the hosts that were lost since a restart, before a step."""

    def is_same_incident(self, ranks: Collection[int], *, early: bool) -> bool:
        """Return whether a host is lost by what has lost a worker before, and note its loss.

        A cable that is out ends the agents of several hosts, one after another: each of them while
        the job waits for the workers of the restart before, so no step has run (`early`). A host
        that is lost twice counts again.

        Args:
            ranks: the ranks of the host's workers; none if no host is lost.
            early: whether the generation was lost before it ran a step.
        """
        if not early:
            self._lost = set()
        is_known = not self._lost.isdisjoint(ranks)
        self._lost |= {*ranks}
        return early and bool(self._times) and bool(ranks) and not is_known

    def refusal(self, failure: Failure, now: float) -> str:
        """Return why the job does not restart after `failure`, or an empty string if it does."""
        where = failure.cause, failure.rank, failure.position
        place = failure.position.layer >= 0 or (
            failure.cause is Cause.HUNG and failure.position.phase in _WITHOUT_LAYER
        )
        repeated = where == self._last and place
        self._last = where
        self._times = [time for time in self._times if now - time < WINDOW]
        if not self.limit:
            return "--max-restarts 0"
        if repeated:
            return "it failed again at the same place"
        if len(self._times) >= self.limit:
            all_used = f"all {self.limit} restarts within an hour are used"
            if self.limit == 1:
                all_used = "the one restart within an hour is used"
            return f"{all_used} (--max-restarts)"
        return ""

    def record(self, cause: str, now: float, *, counts: bool = True) -> None:
        """Keep the cause of a restart at `now`, which `counts` towards the limit or not."""
        if counts:
            self._times.append(now)
        self.causes.append(cause)


@dataclass(slots=True)
class ElasticPolicy:
    """The number of workers of a replica, where a lost worker may not be replaceable.

    Args:
        target: workers that the job is to have.
        minimum: workers with which it may continue.
        wait: seconds until all are tried again, twice as many for each attempt that has failed.
        workers: the present number.
    """

    target: int
    minimum: int
    wait: float
    workers: int
    _since: float = 0.0
    _early_losses: int = 0
    _tried: bool = False
    _failed: int = 0  # attempts since all workers have run a step

    def shrink(self, now: float, *, cannot_start: bool, early: bool, room: int = -1) -> bool:
        """Reduce the number after the loss of a worker, if that is necessary and allowed.

        Args:
            now: the time of the loss, in seconds.
            cannot_start: whether the system cannot start a replacement.
            early: whether the generation was lost before it ran a step.
            room: workers that can be started in all; -1 if unknown.

        Returns:
            Whether the number was reduced.
        """
        self._early_losses = self._early_losses + 1 if early else 0
        if not cannot_start and self._early_losses < _EARLY_LOSSES:
            return False
        left = self.workers - 1 if room < 0 else min(self.workers - 1, room)
        if left < self.minimum:
            return False
        self._failed += self._tried
        self._tried, self.workers = False, left
        self._since, self._early_losses = now, 0
        return True

    def shrink_to_save(self, room: int) -> bool:
        """Reduce the number to what there is room for, below the minimum, only to save the state.

        Returns:
            Whether there is room for any.
        """
        if room > 0:
            self.workers = min(self.workers, room)
        return room > 0

    def steps_run(self, now: float) -> None:
        """Restart the wait until all workers are tried again: the current ones run steps."""
        self._since = now
        if self.workers == self.target:
            self._tried, self._failed = False, 0

    def may_grow(self, now: float) -> bool:
        """Return whether it is time to try all workers again."""
        return self.workers < self.target and now - self._since >= self.wait * 2**self._failed

    def grow(self) -> None:
        """Set the number to the target."""
        self.workers, self._tried = self.target, True
