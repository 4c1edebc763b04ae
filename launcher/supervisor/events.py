"""What happens to a job's processes: the events that the supervisor handles. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.wire.lines import (
    CannotStart,
    Forked,
    FromCoordinator,
    Interrupt,
    KeepAlive,
    SaveRequest,
    WorkerExited,
)


@dataclass(frozen=True, slots=True)
class CheckedHello:
    """An agent's hello, after the loop has compared its host with this one.

    Attributes:
        caller: the launcher's address that its host sees; empty on the launcher's own host.
        is_local: whether that address belongs to the launcher's host.
        problem: why the host cannot take part; empty if it can.
    """

    caller: str = ""
    is_local: bool = True
    problem: str = ""


AgentLine = CheckedHello | Forked | WorkerExited | CannotStart | Interrupt | SaveRequest | KeepAlive


@dataclass(frozen=True, slots=True)
class AgentStarted:
    """The process of an agent, or the command that carries its lines, was started."""

    agent: int
    pid: int


@dataclass(frozen=True, slots=True)
class AgentLines:
    """An agent has sent data; `lines` are those that are complete."""

    agent: int
    lines: tuple[AgentLine, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """The process of an agent ended.

    Attributes:
        code: negative for a signal.
        last_line: the last line of its standard error; empty for an agent of this host.
    """

    agent: int
    code: int
    last_line: str = ""


@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """The process of the coordinator was started."""

    pid: int


@dataclass(frozen=True, slots=True)
class CoordinatorLines:
    """The coordinator has sent data; `lines` are those that are complete."""

    lines: tuple[FromCoordinator, ...] = ()


@dataclass(frozen=True, slots=True)
class CoordinatorEnded:
    """The process of the coordinator ended."""


@dataclass(frozen=True, slots=True)
class EndpointProbed:
    """This host has connected to the coordinator, or could not: `error` says why."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class TerminalLost:
    """The terminal that shows the job is gone."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed, up to a moment before the events handled last were read.

    The launcher itself may have been suspended since that moment.
    """


Event = (
    AgentStarted
    | AgentLines
    | AgentEnded
    | CoordinatorStarted
    | CoordinatorLines
    | CoordinatorEnded
    | EndpointProbed
    | TerminalLost
    | Interrupt
    | SaveRequest
    | Ticked
)
