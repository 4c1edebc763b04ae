"""Every grace period, limit and interval that depends on another one.

The inequalities between them are checked whenever a set is made. Tests use a scaled set.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

VARIABLE = "PIPEWORKER_TIMINGS"
"""The environment variable by which tests change them: ``0.5`` scales all of them,
``stuck=0.2,verdict=20`` sets some."""


@dataclass(frozen=True, slots=True)
class Timings:
    """A consistent set of durations, in seconds.

    Attributes:
        heartbeat: interval between two heartbeats of a worker.
        silence: time without a heartbeat after which a suspected worker is considered lost.
        ping: interval between two pings of the coordinator, which find closed connections.
        tick: interval between two checks of the coordinator for expired timeouts.
        burst: longest time for which arriving messages may keep the coordinator from other work.
        handshake: limit for authenticating a connection.
        connect: limit for a worker's neighbours to build their stages and connect.
        reconnect: longest interval between two attempts to reopen a control connection.
        grace: time to wait for the cause behind a secondary failure, or for a closed connection
            to be reopened.
        coordinator: time a worker waits for a lost coordinator connection to be reopened.
        reach: limit for the first answer of the coordinator or of a peer.
        interrupt: limit for an interrupted user's loop to finish its step.
        linger: time to deliver the last messages.
        exit: time for workers to exit on their own after the verdict.
        report: time the other ranks of a torchrun job give rank 0 to report a mistake that all of
            them see.
        exit_delay: time a torchrun rank that fails because of another rank waits before it exits,
            so that torchrun finds the other rank first.
        verdict: time rank 0 waits for the coordinator's verdict.
        stuck: time a rank that waits for another rank has to notice that the job has ended.
        poll: interval between two checks whether the job has ended, or between two attempts.
        rendezvous: limit for the ranks of a job to meet.
        grow: time a job with fewer workers than specified runs before it tries all of them.
    """

    heartbeat: float = 0.5
    silence: float = 1.8
    ping: float = 1.0
    tick: float = 0.25
    burst: float = 0.2
    handshake: float = 5.0
    connect: float = 900.0
    reconnect: float = 1.0
    grace: float = 2.5
    coordinator: float = 4.0
    reach: float = 30.0
    interrupt: float = 4.0
    linger: float = 2.0
    exit: float = 3.0
    report: float = 30.0
    exit_delay: float = 0.5
    verdict: float = 8.0
    stuck: float = 2.0
    poll: float = 0.1
    rendezvous: float = 300.0
    grow: float = 60.0

    def __post_init__(self) -> None:
        for holds, why in (
            (self.silence > 3 * self.heartbeat, "three heartbeats may be late"),
            (self.burst < self.tick, "a flood of messages may delay a tick but not skip it"),
            (self.grace > 2 * self.ping, "pings find a closed connection"),
            (
                self.grace > self.silence + self.tick,
                "the silent rank is known when the grace period ends",
            ),
            (self.grace > 2 * self.reconnect, "a connection may be reopened"),
            (self.handshake > self.reconnect, "a slow handshake is not a lost connection"),
            (
                self.connect > 4 * self.handshake,
                "unauthenticated connections leave time for the peer",
            ),
            (self.coordinator > self.grace, "the coordinator reports before workers give up"),
            (self.reach > self.coordinator, "a connection may be reopened before the first answer"),
            (self.exit > self.linger, "the last messages are delivered before the process exits"),
            (self.verdict > self.interrupt + self.linger, "rank 0 receives the verdict"),
            (self.verdict > self.grace + self.linger, "rank 0 receives the cause"),
            (self.exit > self.exit_delay, "a rank that delays its exit still exits in time"),
            (self.stuck > self.poll, "a stuck rank is polled"),
            (self.rendezvous > self.verdict, "the rendezvous outlasts the end of an earlier job"),
            (
                self.rendezvous > self.reach,
                "a rank that cannot reach the coordinator reports it in the rendezvous",
            ),
            (self.rendezvous > self.report, "a mistake is reported before the rendezvous fails"),
            (self.grow > self.tick, "a job with fewer workers runs before it tries more"),
        ):
            if not holds:
                raise ValueError(f"the timings contradict each other: {why}")

    def patience(self, worker_timeout: float) -> float:
        """Return the silence timeout: `worker_timeout`, but at least three ping intervals."""
        return max(worker_timeout, 3 * self.ping)

    def scaled(self, factor: float) -> Timings:
        return Timings(**{name: factor * value for name, value in dataclasses.asdict(self).items()})

    def changed(self, text: str) -> Timings:
        """Return the set changed by the variable's text: a factor, or ``name=seconds`` pairs.

        Raises:
            ValueError: the text is wrong, or the result is inconsistent.
        """
        parts = [part.partition("=") for part in text.split(",")] if "=" in text else []
        values = {name: value for name, _, value in parts}
        seconds = {name: float(value) for name, value in values.items()} or {"": float(text)}
        if not all(value > 0 for value in seconds.values()):
            raise ValueError("a duration must be greater than 0")
        if not values:
            return self.scaled(seconds[""])
        if unknown := seconds.keys() - dataclasses.asdict(self).keys():
            raise ValueError(f"unknown timing {', '.join(sorted(unknown))}")
        return dataclasses.replace(self, **seconds)


DEFAULT = Timings()
"""The timings of a job that does not change them."""
