"""Every grace, limit and interval that depends on another, in one place.

The inequalities between them are checked when a set is made. Tests take a scaled set.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

VARIABLE = "PIPEWORKER_TIMINGS"
"""Of the environment, for tests: ``0.5`` scales all of them, ``stuck=0.2,verdict=20`` sets some."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds.

    Attributes:
        heartbeat: between two of a worker's.
        silent: without a heartbeat; a peer that is suspected is then taken for gone.
        ping: between two of the coordinator's, which find connections that have closed.
        tick: between two looks of the coordinator at what is overdue.
        burst: what arriving messages may keep the coordinator from all else.
        handshake: what a connection may take to prove itself.
        connect: what a worker gives its neighbours to build their parts and connect.
        reconnect: until a closed control connection is tried again, at most.
        echo: what a closed connection waits for the cause behind it, or to come back.
        coordinator: what a worker's lost connection to the coordinator may take to come back.
        reach: what a worker waits for the coordinator's first answer.
        interrupt: what an interrupted loop of the user's own may take to finish its step.
        linger: what the last messages get to leave.
        leave: what workers get to leave by themselves after the verdict.
        speak: what other ranks of a torchrun job give rank 0 to say a mistake that all see.
        yields: what a rank of a torchrun job that fails by another's fault waits before it ends, so
            that torchrun finds the other first.
        verdict: what rank 0 waits for the coordinator's verdict.
        stuck: what a rank that waits for another gets to notice that the job is over.
        look: between two looks at whether it has.
        meet: what the ranks of a job have to meet.
        grow: what a job with fewer stages than asked for waits until it tries with all again.
    """

    heartbeat: float = 0.5
    silent: float = 1.8
    ping: float = 1.0
    tick: float = 0.25
    burst: float = 0.2
    handshake: float = 5.0
    connect: float = 900.0
    reconnect: float = 1.0
    echo: float = 2.5
    coordinator: float = 4.0
    reach: float = 30.0
    interrupt: float = 4.0
    linger: float = 2.0
    leave: float = 3.0
    speak: float = 30.0
    yields: float = 0.5
    verdict: float = 8.0
    stuck: float = 2.0
    look: float = 0.1
    meet: float = 300.0
    grow: float = 60.0

    def __post_init__(self) -> None:
        for holds, why in (
            (self.silent > 3 * self.heartbeat, "three heartbeats may be late"),
            (self.burst < self.tick, "a flood may delay a tick, not swallow one"),
            (self.echo > 2 * self.ping, "a closed connection is found by pings"),
            (self.echo > self.silent + self.tick, "an echo knows who is silent when it ends"),
            (self.echo > 2 * self.reconnect, "a connection may come back"),
            (self.handshake > self.reconnect, "a slow handshake is not taken for a lost one"),
            (self.connect > 4 * self.handshake, "strangers leave time for the peer"),
            (self.coordinator > self.echo, "the coordinator speaks before it is given up"),
            (self.reach > self.coordinator, "a connection may come back before the first answer"),
            (self.leave > self.linger, "the last words leave before the process"),
            (self.verdict > self.interrupt + self.linger, "rank 0 hears the verdict"),
            (self.verdict > self.echo + self.linger, "rank 0 hears the cause"),
            (self.leave > self.yields, "who lets another end first leaves in time"),
            (self.stuck > self.look, "who is stuck is looked at"),
            (self.meet > self.verdict, "ranks that meet outlast an old job"),
            (self.meet > self.reach, "who does not reach the coordinator says so where ranks meet"),
            (self.meet > self.speak, "a mistake is said before who meets gives up"),
            (self.grow > self.tick, "a job with fewer stages runs before it tries with more"),
        ):
            if not holds:
                raise ValueError(f"timings contradict each other: {why}")

    def patience(self, worker_timeout: float) -> float:
        """What silence of who beats means its end, however impatient the user is: three pings."""
        return max(worker_timeout, 3 * self.ping)

    def scaled(self, factor: float) -> Timings:
        """All of them, by a factor."""
        return Timings(**{name: factor * value for name, value in dataclasses.asdict(self).items()})

    def changed(self, text: str) -> Timings:
        """As the variable of the environment asks: a factor, or names and seconds.

        Raises:
            ValueError: a name is unknown, a value is no positive number, or they contradict.
        """
        parts = [part.partition("=") for part in text.split(",")] if "=" in text else []
        values = {name: value for name, _, value in parts}
        seconds = {name: float(value) for name, value in values.items()} or {"": float(text)}
        if not all(value > 0 for value in seconds.values()):
            raise ValueError("a time must be greater than 0")
        if not values:
            return self.scaled(seconds[""])
        if unknown := seconds.keys() - dataclasses.asdict(self).keys():
            raise ValueError(f"there is no timing {', '.join(sorted(unknown))}")
        return dataclasses.replace(self, **seconds)


DEFAULT = Timings()
