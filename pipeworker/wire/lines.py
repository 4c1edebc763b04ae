"""Events that processes send each other over pipes: lines with a JSON array, ``[name, fields]``.

========================  =====================  ================================================
sender                    receiver               events
========================  =====================  ================================================
launcher, or rank 0       coordinator            Configuration first, WorkerExited, CannotStart,
                                                 HostLost, Interrupt, SaveRequest, Starting,
                                                 Waiting, KeepAlive (rank 0 sends only
                                                 Configuration and Interrupt)
coordinator               launcher, or rank 0    Bound, Joined, Restart, Snapshot, Planned,
                                                 StepResult, Evaluation, Activity, Warned,
                                                 KeepAlive, Verdict last
launcher                  agent                  Fork, KeepAlive
agent                     launcher               AgentHello first, Starting, Forked,
                                                 WorkerExited, CannotStart, Interrupt,
                                                 SaveRequest, KeepAlive; before it exists,
                                                 Waiting from what carries its lines
launcher, or rank 0       process of the hooks   HookSetup first, JobOver
process of the hooks      launcher, or rank 0    Warned
========================  =====================  ================================================

A pipe closes when a process ends, but not when it is suspended, so each process also sends a
KeepAlive about once a second. A receiver matches on the event and ends with ``assert_never``, so
the type checker rejects one that lacks a case.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, get_args

from pipeworker.errors import ProtocolError, UsageError
from pipeworker.facts.position import Position
from pipeworker.facts.speed import Speed
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.wire.codec import Codec


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot of the state after `step`, in the memory slot `slot` of `ranks` workers.

    `scale` and `good_steps` are those of the loss scale, 0 if there is none.
    """

    step: int
    slot: int
    ranks: int
    scale: float = 0.0
    good_steps: int = 0


@dataclass(frozen=True, slots=True)
class Configuration:
    """The configuration of a coordinator.

    Attributes:
        options: as JSON.
        token: the job's secret; it travels in this pipe and nowhere else.
        parent_rank: the rank of the worker that is the coordinator's parent; -1 for a launcher.
        slots: snapshot memories per worker; more than one if lost workers are replaced.
        snapshot: the one that the job resumes from after its coordinator was lost.
        causes: the causes of the losses so far.
        elapsed: seconds since the first coordinator of the job was started.
        stages: the present number, fewer than the options' after losses; 0 for that of the options.
    """

    options: str
    run_dir: str
    token: str = field(repr=False)
    host: str
    generation: int = 1
    parent_rank: int = -1
    slots: int = 1
    snapshot: Snapshot | None = None
    causes: tuple[str, ...] = ()
    elapsed: float = 0.0
    stages: int = 0


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker process ended at `position`, with an exit status, or a negative signal as `code`.

    `unreachable` is an error message, if the coordinator has not answered the worker;
    `lacks_memory`, whether the kernel killed a process of its host for memory when this one was.
    """

    rank: int
    generation: int
    code: int
    position: Position
    unreachable: str = ""
    lacks_memory: bool = False


@dataclass(frozen=True, slots=True)
class CannotStart:
    """A worker cannot be started; all hosts can start `capacity` workers, -1 if unknown."""

    rank: int
    generation: int
    text: str
    capacity: int = -1


@dataclass(frozen=True, slots=True)
class HostLost:
    """A host is lost, with its workers and the snapshots in its memory.

    `survives` means that the other hosts hold all of the last snapshot.
    """

    ranks: tuple[int, ...]
    text: str
    survives: bool = False


@dataclass(frozen=True, slots=True)
class Interrupt:
    """A request to stop the job."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A request to write a checkpoint and continue."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The sender is alive; after `timeout` seconds of silence it is considered lost."""

    timeout: float


@dataclass(frozen=True, slots=True)
class Starting:
    """An agent imports torch, and has used so many seconds of CPU time since its start."""

    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """An agent is not started yet, because its cluster has no host for it.

    `reason` is for the user; it is empty while the host starts it.
    """

    reason: str = ""


JobEvent = WorkerExited | CannotStart | HostLost | Starting | Waiting | Interrupt | SaveRequest
ToCoordinator = Configuration | JobEvent | KeepAlive


@dataclass(frozen=True, slots=True)
class Bound:
    """The coordinator listens at an endpoint."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker of a rank has described its model: others may be started."""

    rank: int


@dataclass(frozen=True, slots=True)
class Restart:
    """A request to end the remaining workers and to start a new generation of `stages` stages.

    Attributes:
        recovers: whether something was lost, and the job continues.
    """

    generation: int
    cause: str
    stages: int
    recovers: bool = True


@dataclass(frozen=True, slots=True)
class Planned:
    """All stages are built; all replicas are alike.

    Attributes:
        microbatches: of the first mini-batch, over all replicas.
        balance: layers, by stage.
        held: by worker of a replica, the stages it holds.
        bubble: the idle share of the schedule itself, 0 to 1.
        steps: the number of steps of the job, 0 if unknown.
        hooks: the names of the job file's functions that are called with what is recorded.
        step_seconds: the predicted duration of a step; 0 if unknown.
        busy_seconds: by worker of a replica, the part of it in which it computes.
        why: sentences that say what decided the plan.
    """

    schedule: str
    microbatches: int
    balance: tuple[int, ...]
    held: tuple[tuple[int, ...], ...]
    bubble: float
    replicas: int = 1
    steps: int = 0
    device: str = "cpu"
    hosts: int = 1
    hooks: tuple[str, ...] = ()
    step_seconds: float = 0.0
    busy_seconds: tuple[float, ...] = ()
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Activity:
    """The present activity of the workers; only the last such line counts.

    Attributes:
        memory: bytes by rank, 0 where unknown; empty if all are.
        evaluated: mini-batches of an evaluation set that have been read; -1 outside of a pass.
        evaluation_length: mini-batches of that set, 0 if unknown.
    """

    memory: tuple[int, ...] = ()
    evaluated: int = -1
    evaluation_length: int = 0


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning that the user should see at once; a `note` is about what may be intended."""

    text: str
    note: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the job.

    Attributes:
        status: ``done``, ``failed``, ``interrupted`` or ``lost``.
        peak_memory: bytes, by rank; 0 if unknown.
        bubble: the measured idle share, 0 to 1.
        causes: the causes of the restarts.
        busy: by worker of a replica, the share of the steps' time that it computed.
        stopped_early: why a job is done before all of its steps; empty if it has done them.
        job_exited: whether the job file ended its process; `error` is the text that it printed.
        speed: None if no step was done, or if it is unknown.
    """

    status: str
    exit_status: int
    steps: int
    seconds: float
    peak_memory: tuple[int, ...]
    bubble: float
    error: str | None
    causes: tuple[str, ...] = ()
    busy: tuple[float, ...] = ()
    job_exited: bool = False
    stopped_early: str = ""
    speed: Speed | None = None

    @property
    def is_usage_error(self) -> bool:
        """Whether the job ended before its first step because of the command or the job file."""
        return self.job_exited or self.exit_status == UsageError.exit_status


_Progress = Joined | Planned | Snapshot | StepResult | Evaluation
JobLine = _Progress | Restart | Activity | Warned | Verdict
FromCoordinator = Bound | JobLine | KeepAlive


@dataclass(frozen=True, slots=True)
class Fork:
    """A request to start a worker; workers of earlier generations are killed first.

    Attributes:
        token: the job's secret.
        slots: the number of snapshot memories, which outlive the worker.
        mirrors: ranks of other hosts whose snapshots this host holds as well.
        mirrored: whether another host holds this worker's snapshots.
        tasks: processes and threads that all workers of the host need at least, with the first one
            of a job; otherwise 0.
    """

    rank: int
    generation: int
    endpoint: str
    token: str = field(repr=False)
    local_rank: int
    slots: int = 0
    mirrors: tuple[int, ...] = ()
    mirrored: bool = False
    tasks: int = 0


ToAgent = Fork | KeepAlive


@dataclass(frozen=True, slots=True)
class AgentHello:
    """The introduction of an agent, which may be on another host than the launcher.

    Attributes:
        torch: its version, empty if it is not installed.
        caller: the address under which the host sees the launcher's; empty for the same host.
        job: a digest of the job file, empty if it is not there.
        run: a digest of ``run.json``, empty if it is not there.
    """

    pipeworker: str
    python: str
    torch: str
    caller: str = ""
    job: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class Forked:
    """A worker runs."""

    rank: int
    generation: int
    pid: int


_OfWorkers = Forked | WorkerExited | CannotStart
FromAgent = AgentHello | Starting | Waiting | _OfWorkers | Interrupt | SaveRequest | KeepAlive


@dataclass(frozen=True, slots=True)
class HookSetup:
    """The job whose hooks a process calls: its options, as JSON, and its run directory."""

    options: str
    run_dir: str


@dataclass(frozen=True, slots=True)
class JobOver:
    """The job is over: nothing more is recorded."""


ToHooks = HookSetup | JobOver
FromHooks = Warned

Line = ToCoordinator | FromCoordinator | ToAgent | FromAgent | ToHooks
_LINES: Codec[Line] = Codec(get_args(Line))


def encode(event: Line) -> bytes:
    """Return the line of an event, with its newline."""
    name = type(event).__name__
    return (json.dumps([name, _LINES.fields(event)], default=_LINES.to_builtin) + "\n").encode()


def decode(line: bytes) -> Line:
    """Return the event of a line, or raise ProtocolError if it is none."""
    try:
        name, fields = json.loads(line.decode())  # of bytes, json guesses the encoding
    except (ValueError, TypeError, RecursionError) as error:
        # Not the line itself, which may contain a token.
        raise ProtocolError(f"a line of {len(line)} bytes is not an event") from error
    return _LINES.read(name, fields)


E = TypeVar("E")
_MOST_SKIPPED = 1 << 16
"""Characters before the first event: a program that prints more is none of ours."""
_LONGEST_FIRST = 1 << 20
"""Bytes of the line of the first event."""


class Buffer(Generic[E]):
    """A buffer that splits received bytes into events of a union: ``Buffer[Line](Line)``.

    With `skips`, lines before the first event of a process may be anything, such as what the shell
    of a host prints, or Python's own startup.

    Attributes:
        skipped: those lines, without empty ones.
    """

    def __init__(self, direction: Any, *, skips: bool = False) -> None:
        self._accepted = get_args(direction) or (direction,)
        self._rest = b""
        self._skips, self._room = skips, _MOST_SKIPPED
        self.skipped: list[str] = []

    def feed(self, data: bytes) -> list[E]:
        """Return the events that are complete now, or raise ProtocolError if one may not arrive."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events: list[Any] = []
        for line in lines:
            try:
                events.append(decode(line))
            except ProtocolError:
                if not self._skips or self._room < 0:
                    raise
                self._room -= len(line) + 1  # with its newline: an empty one counts too
                self.skipped += [line.decode(errors="replace")] if line.strip() else []
            else:
                self._skips = self._skips and isinstance(events[-1], Waiting)
        if self._skips and len(self._rest) > _LONGEST_FIRST:
            raise ProtocolError(f"a line of more than {_LONGEST_FIRST} bytes is not an event")
        for event in events:
            if not isinstance(event, self._accepted):
                raise ProtocolError(f"{type(event).__name__} is not an event of this direction")
        return events
