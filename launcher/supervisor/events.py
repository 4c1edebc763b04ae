"""The events of a job's processes that the supervisor handles, as frozen facts."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.wire import lines
from pipeworker.wire.lines import FromCoordinator, Interrupt, KeepAlive, SaveRequest, Starting


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


_Report = lines.Forked | lines.WorkerExited | lines.CannotStart
AgentLine = CheckedHello | _Report | Interrupt | SaveRequest | Starting | lines.Waiting | KeepAlive


@dataclass(frozen=True, slots=True)
class Started:
    """The process of an agent, or the command that carries its lines, or the coordinator started.

    `agent` is None for the coordinator.
    """

    pid: int
    agent: int | None = None


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


_OfCoordinator = CoordinatorLines | CoordinatorEnded | EndpointProbed
_OfUser = Interrupt | SaveRequest | TerminalLost
Event = Started | AgentLines | AgentEnded | _OfCoordinator | _OfUser | Ticked
