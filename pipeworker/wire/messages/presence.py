"""A worker joins, and each end says that it is alive."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.wire.messages.checkpoint import Restore
from pipeworker.wire.messages.limits import LONGEST_NAME, MOST_VERSIONS, check, check_names
from pipeworker.wire.messages.position import Position


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker is there.

    The first two fields are read by other versions of the protocol too, to name who speaks it: they
    stay as they are.

    Attributes:
        versions: what it runs, as ``torch 2.13.0``.
    """

    rank: int
    host: str
    pid: int
    versions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self.pid >= 0 and len(self.host) <= LONGEST_NAME, "a host or pid that cannot be")
        check_names(self.versions, "versions", MOST_VERSIONS)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker is alive, and where it is.

    Attributes:
        sent: how many numbered messages it has sent (:mod:`pipeworker.wire.exchange`).
        received: how many it has.
        again: it lacks some that were sent to it.
        waits: for another worker, or to be told what is next.
    """

    rank: int
    position: Position
    sent: int = 0
    received: int = 0
    again: bool = False
    waits: bool = False

    def __post_init__(self) -> None:
        check(min(self.sent, self.received) >= 0, "a negative number of messages")


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the job is.

    Attributes:
        options: as JSON.
        held: the placement: by worker of a replica, its stages.
        restore: what to begin with; None for the initial weights.
    """

    options: str
    run_dir: str
    held: tuple[tuple[int, ...], ...]
    replicas: int
    restore: Restore | None = None


@dataclass(frozen=True, slots=True)
class Ping:
    """The coordinator is alive; the counts are those of Heartbeat, the other way."""

    sent: int = 0
    received: int = 0
    again: bool = False
