"""The effects that the supervisor returns for the loop to perform, as frozen facts."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.wire.lines import Configuration, FromCoordinator, ToAgent, ToCoordinator


@dataclass(frozen=True, slots=True)
class StartAgent:
    """Start the process of an agent; agents are numbered in the order of the hosts.

    ``Started`` answers it.
    """

    agent: int


@dataclass(frozen=True, slots=True)
class KillAgent:
    """Kill the process of an agent. ``AgentEnded`` follows."""

    agent: int


@dataclass(frozen=True, slots=True)
class SendAgent:
    """Send a line to an agent."""

    agent: int
    line: ToAgent


@dataclass(frozen=True, slots=True)
class StartCoordinator:
    """Start a coordinator. ``Started`` answers it."""

    configuration: Configuration


@dataclass(frozen=True, slots=True)
class EndCoordinator:
    """Kill the coordinator and forget it: no event about it follows."""


@dataclass(frozen=True, slots=True)
class SendCoordinator:
    """Send a line to the coordinator."""

    line: ToCoordinator


@dataclass(frozen=True, slots=True)
class ProbeEndpoint:
    """Try to connect to the coordinator from this host. ``EndpointProbed`` answers it."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class KillGroup:
    """Kill what is left of the process group of a worker of this host."""

    pid: int


@dataclass(frozen=True, slots=True)
class Show:
    """Show a line to the user. ``TerminalLost`` answers it if that fails."""

    line: FromCoordinator


_OnAgents = StartAgent | KillAgent | SendAgent | KillGroup
_OnCoordinator = StartCoordinator | EndCoordinator | SendCoordinator | ProbeEndpoint
Effect = _OnAgents | _OnCoordinator | Show
