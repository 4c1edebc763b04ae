"""The clocks of hosts: how far each is from the coordinator's, and how exactly that is known.

A heartbeat carries the worker's time, and the next ping brings it back with the coordinator's time
and with how long the coordinator held it. Half of the time that was spent on the way is the error
bound, as in NTP (RFC 5905, section 8): whatever part of it each direction took, the two clocks
differ by no more. Clocks drift, so the difference is measured again and again.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from pipeworker.trace.timeline import ActionSpan, ClockSample, Command, Span, WorkerLife

_INTERVAL = 30.0
"""Seconds of which the most exact measurement is recorded."""


def measure(beat: float, held: float, sent: float, now: float) -> ClockSample | None:
    """Return what a ping shows of a worker's clock; None if the times contradict each other.

    Args:
        beat: when the worker sent its heartbeat, by its own clock.
        held: the seconds from the arrival of the heartbeat to the ping.
        sent: when the ping was sent, by the coordinator's clock.
        now: when it arrived, by the worker's clock.
    """
    way = now - beat - held
    if not beat or way < -1e-6:
        return None
    way = max(0.0, way)
    return ClockSample(now, sent + way / 2 - now, way / 2)


class BestSamples:
    """The most exact measurement of each interval."""

    def __init__(self) -> None:
        self._best: ClockSample | None = None
        self._began = float("-inf")
        self._taken = False

    def add(self, sample: ClockSample) -> None:
        """Add a measurement, made later than those before."""
        if sample.at - self._began > _INTERVAL:
            self._best, self._began, self._taken = None, sample.at, False
        if self._best is None or sample.error < 0.7 * self._best.error:
            self._best, self._taken = sample, False

    def take(self) -> ClockSample | None:
        """Return the best measurement of the interval, unless it was returned before."""
        if self._taken:
            return None
        self._taken = True
        return self._best


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks of a run: the measurements of each, in order of time, by its identity."""

    samples: dict[str, tuple[ClockSample, ...]]

    @staticmethod
    def of(lives: Sequence[WorkerLife]) -> Clocks:
        """Return the clocks of all processes; those of one host are measured together."""
        found: dict[str, list[ClockSample]] = defaultdict(list)
        for life in lives:
            found[life.clock] += life.samples
        return Clocks({clock: _exact(samples) for clock, samples in found.items()})

    def offset(self, clock: str, at: float) -> tuple[float, float]:
        """Return how far a clock is behind the coordinator's at a time, and the error bound."""
        samples = self.samples.get(clock, ())
        if not samples:
            return 0.0, float("inf")
        place = bisect(samples, at, key=attrgetter("at"))
        if place in (0, len(samples)):
            nearest = samples[max(0, place - 1)]
            return nearest.offset, nearest.error
        before, after = samples[place - 1], samples[place]
        share = (at - before.at) / (after.at - before.at)
        offset = before.offset + share * (after.offset - before.offset)
        return offset, max(before.error, after.error)


def _exact(samples: Sequence[ClockSample]) -> tuple[ClockSample, ...]:
    """Return the most exact measurement of each interval, in order of time."""
    best: dict[int, ClockSample] = {}
    for sample in samples:
        number = int(sample.at // _INTERVAL)
        if number not in best or sample.error < best[number].error:
            best[number] = sample
    return tuple(best[number] for number in sorted(best))


def aligned(lives: Sequence[WorkerLife]) -> tuple[WorkerLife, ...]:
    """Return the lives with all times by the coordinator's clock, if their clocks differ."""
    if len({life.clock for life in lives}) < 2:
        return tuple(lives)
    clocks = Clocks.of(lives)
    return tuple(
        replace(
            life,
            commands=tuple(_moved(c, clocks, life.clock) for c in life.commands),
            began=life.began + clocks.offset(life.clock, life.began)[0],
        )
        for life in lives
    )


def _moved(command: Command, clocks: Clocks, clock: str) -> Command:
    by, _ = clocks.offset(clock, command.received)
    return replace(
        command,
        received=command.received + by,
        answered=None if command.answered is None else command.answered + by,
        spans=tuple(Span(s.name, s.begin + by, s.end + by) for s in command.spans),
        actions=tuple(
            ActionSpan(a.action, a.begin + by, None if a.end is None else a.end + by)
            for a in command.actions
        ),
    )
