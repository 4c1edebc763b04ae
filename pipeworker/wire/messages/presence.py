"""Messages by which a worker joins, shows that it is alive, and leaves or is sent away early."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.facts.failure import Failure
from pipeworker.facts.limits import LONGEST_NAME, LONGEST_TEXT, MOST_VERSIONS, check, check_names
from pipeworker.facts.position import Position
from pipeworker.wire.messages.checkpoint import Restore


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a worker, with its versions of software, as ``torch 2.13.0``.

    Other versions of the protocol read the first two fields too, to name the sender in an error, so
    these must not change.
    """

    rank: int
    host: str
    pid: int
    versions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self.pid >= 0, f"the process number {self.pid}")
        check(len(self.host) <= LONGEST_NAME, f"a host name of {len(self.host)} characters")
        check_names(self.versions, "versions", MOST_VERSIONS)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker is alive.

    Attributes:
        sent: the number of messages it has sent (:mod:`pipeworker.wire.reliable_stream`).
        received: the number of messages it has received.
        resend: whether it requests the messages that it has not received.
        waiting: 1 if it waits for another worker or for a command, and 1 for each part of a
            long transfer that has arrived; else 0.
        memory: bytes that it uses, of its accelerator or of its process; 0 if unknown.
        held: micro-batches that wait on it for their backward, once for each stage.
        evaluated: mini-batches of an evaluation set that it has read in the present pass.
        evaluation_length: mini-batches of that set, 0 if unknown.
        time: when it was sent, by the worker's clock.
        stack: the user's frames, if it has computed at one position for ``--worker-timeout``.
    """

    rank: int
    position: Position
    sent: int = 0
    received: int = 0
    resend: bool = False
    waiting: int = 0
    memory: int = 0
    held: int = 0
    evaluated: int = 0
    evaluation_length: int = 0
    time: float = 0.0
    stack: str = ""

    def __post_init__(self) -> None:
        check(min(self.sent, self.received) >= 0, "a negative number of messages")
        check(self.waiting >= 0, "a negative number of arrived parts")
        check(min(self.memory, self.held) >= 0, f"{self.memory} bytes, {self.held} micro-batches")
        least = min(self.evaluated, self.evaluation_length)
        check(least >= 0, "a negative number of mini-batches")
        check(len(self.stack) <= LONGEST_TEXT, f"a stack of {len(self.stack)} characters")


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator's answer to a Hello: the job.

    Attributes:
        options: as JSON.
        stages: the placement: by worker of a replica, its stages.
        restore: the state to begin with; None for the initial weights.
    """

    options: str
    run_dir: str
    stages: tuple[tuple[int, ...], ...]
    replicas: int
    restore: Restore | None = None


@dataclass(frozen=True, slots=True)
class Ping:
    """The coordinator is alive; the fields are those of Heartbeat, for the other direction.

    Attributes:
        quiet: whether the worker's heartbeats have not arrived for a while.
        beat: the time that the worker's last heartbeat had; 0 for none.
        held: seconds from its arrival to this ping.
        time: when this was sent, by the coordinator's clock.
    """

    sent: int = 0
    received: int = 0
    resend: bool = False
    quiet: bool = False
    beat: float = 0.0
    held: float = 0.0
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker has failed; `stays` says whether it can still save its last whole step."""

    rank: int
    failure: Failure
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Signalled:
    """A worker received a signal from outside; it continues until the coordinator decides."""

    rank: int
    signal: str

    def __post_init__(self) -> None:
        check_names((self.signal,), "names of signals")


@dataclass(frozen=True, slots=True)
class Abort:
    """A command: exit with this status, because the job has ended early for this reason."""

    reason: str
    exit_status: int
