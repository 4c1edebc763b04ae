"""What processes say to each other over pipes: one JSON array a line, ``[name, [field, ...]]``.

Pipes end when a process ends, which is what they are there for. Who speaks to whom:

========================  =====================  ================================================
from                      to                     events
========================  =====================  ================================================
launcher, or rank 0       coordinator            Configuration first, WorkerExited, CannotStart,
                                                 HostLost, Interrupt, SaveAsked, Beat
                                                 (all but Interrupt from the launcher alone)
coordinator               launcher, or rank 0    Bound, Joined, Again, Snapshot, Planned,
                                                 StepResult, Evaluation, Warned, Beat, Verdict last
launcher                  fork server            Fork, Beat
fork server               launcher               Here first, Forked, WorkerExited, CannotStart,
                                                 Interrupt, SaveAsked, Beat
========================  =====================  ================================================

A pipe does not end when a process is stopped, so each says Beat about once a second; who hears
nothing for as long as a worker may be silent gives the other up.

A reader matches on the event and ends with :func:`never`, so that one which lacks a case does not
pass the type checker.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar, get_args

from pipeworker.errors import ProtocolError, UsageError
from pipeworker.wire.codec import Codec
from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.position import Position
from pipeworker.wire.messages.step import StepResult


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after `step` is in the memories `slot` of so many workers.

    Attributes:
        scale, good_steps: the loss scale, 0 where there is none.
    """

    step: int
    slot: int
    ranks: int
    scale: float = 0.0
    good_steps: int = 0


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the coordinator is started with. `token` travels in the pipe and nowhere else.

    Attributes:
        options: as JSON.
        host: where it listens.
        starter: the rank of the worker that is its parent; -1 for a launcher.
        slots: memories for copies of the state of each worker; more than one where workers that
            are lost are started again.
        snapshot: where the job goes on whose coordinator was lost.
        causes: of the losses so far.
    """

    options: str
    run_dir: str
    token: str
    host: str
    generation: int = 1
    starter: int = -1
    slots: int = 1
    snapshot: Snapshot | None = None
    causes: tuple[str, ...] = ()

    def __repr__(self) -> str:  # never the token
        return f"Configuration(run_dir={self.run_dir!r}, host={self.host!r})"


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker process ended, as its parent saw. `code` is negative for a signal."""

    rank: int
    generation: int
    code: int
    position: Position


@dataclass(frozen=True, slots=True)
class CannotStart:
    """The worker of a rank cannot be started.

    Attributes:
        room: workers that can be, on all hosts; -1 where nobody knows.
    """

    rank: int
    generation: int
    text: str
    room: int = -1


@dataclass(frozen=True, slots=True)
class HostLost:
    """A host is gone, with the workers of these ranks and what its memory held of their state.

    Attributes:
        kept: whether other hosts have all of the last snapshot.
    """

    ranks: tuple[int, ...]
    text: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The job is asked to stop."""


@dataclass(frozen=True, slots=True)
class SaveAsked:
    """Somebody asks for a checkpoint, and the job to go on."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Its sender is alive; `patience` seconds without a word would mean that it is not."""

    patience: float


ToCoordinator = Configuration | WorkerExited | CannotStart | HostLost | Interrupt | SaveAsked | Beat


@dataclass(frozen=True, slots=True)
class Bound:
    """The coordinator listens."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker of a rank has described its model: others may be started."""

    rank: int


@dataclass(frozen=True, slots=True)
class Again:
    """What is left of the workers is to end; those of this generation are to be started.

    So many that there are `stages`.
    """

    generation: int
    cause: str
    stages: int


@dataclass(frozen=True, slots=True)
class Planned:
    """All stages are built; all replicas are alike.

    Attributes:
        microbatches: of the first mini-batch, over all replicas.
        balance: layers, by stage.
        bubble: the schedule's own, 0..1.
        steps: that the job has, as far as that is known; 0 where it is not.
        device: as ``cpu``.
        hosts: how many there are.
    """

    schedule: str
    microbatches: int
    balance: tuple[int, ...]
    bubble: float
    replicas: int = 1
    steps: int = 0
    device: str = "cpu"
    hosts: int = 1


@dataclass(frozen=True, slots=True)
class Warned:
    """Something the user should see at once, though the job goes on.

    Attributes:
        note: it may well be meant so.
    """

    text: str
    note: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the job ended; `status` is ``done``, ``failed`` or ``interrupted``.

    Attributes:
        peak_memory: bytes, by rank; 0 where it is not known.
        busy: the share of the time of its steps that each worker of a replica computed.
        own: the job file ended itself when it was run; `error` is what it said.
    """

    status: str
    exit_status: int
    steps: int
    seconds: float
    peak_memory: tuple[int, ...]
    bubble: float
    error: str | None
    restarts: int = 0
    causes: tuple[str, ...] = ()
    busy: tuple[float, ...] = ()
    own: bool = False

    @property
    def mistake(self) -> bool:
        """Whether the job never came to its first step because of something the user wrote."""
        return self.own or (self.exit_status == UsageError.exit_status and not self.steps)


FromCoordinator = (
    Beat | Bound | Joined | Again | Snapshot | Planned | StepResult | Evaluation | Warned | Verdict
)


@dataclass(frozen=True, slots=True)
class Fork:
    """Start a worker; `local_rank` is its number on this host.

    Workers of earlier generations are killed first. `slots` memories for copies of its state stay
    when it ends.

    Attributes:
        keeps: ranks of other hosts whose copies this host keeps as well.
        kept: whether another host keeps this worker's.
    """

    rank: int
    generation: int
    endpoint: str
    token: str
    local_rank: int
    slots: int = 0
    keeps: tuple[int, ...] = ()
    kept: bool = False

    def __repr__(self) -> str:  # never the token
        return f"Fork(rank={self.rank}, generation={self.generation})"


ToForkServer = Fork | Beat


@dataclass(frozen=True, slots=True)
class Here:
    """A fork server runs, on a host that may be another one.

    Attributes:
        pipeworker, python, torch: versions; empty where it is not installed.
        host: its name, as it says itself.
        caller: the address under which it sees the launcher's host; empty where that is its own.
        job, run: digests of the job file and of ``run.json``; empty where it does not see them.
    """

    pipeworker: str
    python: str
    torch: str
    host: str
    caller: str = ""
    job: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class Forked:
    """A worker runs."""

    rank: int
    generation: int
    pid: int


FromForkServer = Here | Forked | WorkerExited | CannotStart | Interrupt | SaveAsked | Beat

Line = ToCoordinator | FromCoordinator | ToForkServer | FromForkServer
_LINES: Codec[Line] = Codec(get_args(Line))


def encode(event: Line) -> bytes:
    """One line."""
    name = type(event).__name__
    return (json.dumps([name, _LINES.fields(event)], default=_LINES.plain) + "\n").encode()


def decode(line: bytes) -> Line:
    """Read a line.

    Raises:
        ProtocolError: it is not an event.
    """
    try:
        name, fields = json.loads(line.decode())  # of bytes, json guesses
    except (ValueError, TypeError, RecursionError) as error:
        # Without what it holds, which may be a token.
        raise ProtocolError(f"a line of {len(line)} bytes is not an event") from error
    return _LINES.read(name, fields)


E = TypeVar("E")


class Buffer(Generic[E]):
    """Cuts what arrives into events.

    Args:
        kinds: those that may arrive: ``Buffer[FromForkServer](FromForkServer)``.
    """

    def __init__(self, kinds: Any) -> None:
        self._kinds = get_args(kinds) or (kinds,)
        self._rest = b""

    def feed(self, data: bytes) -> list[E]:
        """The events that are complete now.

        Raises:
            ProtocolError: a line is not an event, or not one that may arrive here.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        events: list[Any] = [decode(line) for line in lines]
        for event in events:
            if not isinstance(event, self._kinds):
                raise ProtocolError(f"{type(event).__name__} is not said here")
        return events


def never(value: NoReturn) -> NoReturn:
    """The end of a match that has a case for everything: the type checker sees to it."""
    shown: Any = value
    raise AssertionError(f"no case for {shown!r}")
