"""Every grace period, limit and interval that depends on another one.

The inequalities between them are checked whenever a set is made. Tests use a scaled set.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

VARIABLE = "PIPEWORKER_TIMINGS"
"""The environment variable by which tests change them: ``0.5`` scales all of them,
``stuck=0.2,verdict=20`` sets some."""
STALL_FACTOR = 30
"""Worker timeouts that a layer, ``model()`` or ``data()`` may take before it counts as hung."""


@dataclass(frozen=True, slots=True)
class Timings:
    """A consistent set of durations, in seconds."""

    heartbeat: float = 0.5  # interval between two heartbeats of a worker
    silence: float = 1.8  # time without a heartbeat after which a suspected worker counts as lost
    ping: float = 1.0  # interval between two pings of the coordinator: they find closed connections
    tick: float = 0.25  # interval between two checks of the coordinator for expired timeouts
    burst: float = 0.2  # for this long, messages may keep the coordinator from other work
    handshake: float = 5.0  # limit for authenticating a connection
    connect: float = 900.0  # least limit for neighbours to build their stages and connect
    reconnect: float = 1.0  # longest interval between two attempts to reopen a control connection
    redial: float = 1.7  # silence of a control connection after which a second one is opened
    dial: float = 0.25  # limit for one attempt to open it, while the first one may still recover
    # Time to wait for the cause behind a secondary failure, or for a closed connection to reopen.
    grace: float = 2.5
    coordinator: float = 4.0  # time a worker waits for a lost coordinator connection to reopen
    reach: float = 30.0  # limit for the first answer of the coordinator or of a peer
    interrupt: float = 4.0  # limit for an interrupted user's loop to finish its step
    linger: float = 2.0  # time to deliver the last messages
    exit: float = 3.0  # time for workers to exit on their own after the verdict
    # Time the other ranks of a torchrun job give rank 0 to report a mistake that all of them see.
    report: float = 30.0
    # Time a torchrun rank that fails because of another rank waits before it exits, so that
    # torchrun finds the other rank first.
    exit_delay: float = 0.5
    verdict: float = 8.0  # time rank 0 waits for the coordinator's verdict
    stuck: float = 2.0  # time a rank that waits for another one has to notice the end of the job
    poll: float = 0.1  # interval between two attempts, or checks whether the job has ended
    rendezvous: float = 300.0  # limit for the ranks of a job to meet
    # Longest interval between two attempts of TCP to send a lost packet (Linux: TCP_RTO_MAX).
    tcp: float = 120.0
    hooks: float = 60.0  # time for the job's hooks to be called with the last records
    grow: float = 60.0  # time a job with fewer workers than specified runs before it tries all

    def __post_init__(self) -> None:
        for holds, why in (
            (self.silence > 3 * self.heartbeat, "three heartbeats may be late"),
            (self.burst < self.tick, "a flood of messages may delay a tick but not skip it"),
            (self.grace > 2 * self.ping, "pings find a closed connection"),
            (self.grace > self.silence + self.tick, "the grace period covers a silence"),
            (self.grace > 2 * self.reconnect, "a connection may be reopened"),
            (self.redial > self.ping + 2 * self.tick, "a ping may be late"),
            (self.reconnect > 2 * self.dial, "attempts at a second connection are more frequent"),
            (self.tcp > self.redial, "a second connection is opened before TCP tries again"),
            (self.handshake > self.reconnect, "a slow handshake is not a lost connection"),
            (self.connect > 4 * self.handshake, "pending connections leave time for the peer"),
            (self.coordinator > self.grace, "the coordinator reports before workers abort"),
            (self.reach > self.coordinator, "a connection may be reopened before the first answer"),
            (self.exit > self.linger, "the last messages are delivered before the process exits"),
            (self.verdict > self.interrupt + self.linger, "rank 0 receives the verdict"),
            (self.verdict > self.grace + self.linger, "rank 0 receives the cause"),
            (self.exit > self.exit_delay, "a rank that delays its exit still exits in time"),
            (self.stuck > self.poll, "a stuck rank is polled"),
            (self.rendezvous > self.verdict, "the rendezvous outlasts the end of an earlier job"),
            (self.rendezvous > self.reach, "an unreachable coordinator is reported in time"),
            (self.rendezvous > self.report, "a mistake is reported before the rendezvous fails"),
            (self.hooks > self.poll, "an interrupt ends the wait for the hooks"),
            (self.grow > self.tick, "a job with fewer workers runs before it tries more"),
        ):
            if not holds:
                raise ValueError(f"the timings contradict each other: {why}")

    def patience(self, worker_timeout: float) -> float:
        """Return the silence timeout: `worker_timeout`, but at least three ping intervals."""
        return max(worker_timeout, 3 * self.ping)

    def connect_limit(self, worker_timeout: float) -> float:
        """Return the limit in seconds for a worker's neighbours to build their stages and connect.

        The coordinator reports a neighbour that hangs before that.
        """
        return max(self.connect, (STALL_FACTOR + 1) * worker_timeout)

    def network_patience(self, worker_timeout: float) -> float:
        """Return the silence timeout in seconds of a TCP connection that cannot be replaced.

        After an outage shorter than `worker_timeout`, TCP may wait before it sends again.
        """
        return self.patience(worker_timeout) + self.tcp

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
