"""A supervisor whose processes a test plays: events in, effects out, no process and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from launcher.spec import Host, RemoteAgent
from launcher.supervisor import effects, events
from launcher.supervisor.effects import Effect
from launcher.supervisor.events import Event
from launcher.supervisor.supervisor import Supervisor
from pipeworker.job.options import Options
from pipeworker.timings import DEFAULT
from pipeworker.wire.lines import (
    Bound,
    Fork,
    Forked,
    FromCoordinator,
    Joined,
    KeepAlive,
    ToCoordinator,
    Warned,
)

ENDPOINT = "tcp://127.0.0.1:5"
E = TypeVar("E")


def remote(*workers: int) -> tuple[RemoteAgent, ...]:
    """Return the agents of hosts a, b, ... that ssh reaches."""
    names = "abcd"[: len(workers)]
    return tuple(
        RemoteAgent(Host(name, count), ("ssh", name))
        for name, count in zip(names, workers, strict=True)
    )


@dataclass
class Scripted:
    """A supervisor, the time, and all of its found."""

    stages: int = 2
    agents: tuple[RemoteAgent, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    now: float = 100.0
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = Options("job.py", self.stages, 4, **self.options)
        self.agents = self.agents or (RemoteAgent(Host("", self.stages)),)
        self.supervisor = Supervisor(options, "/run", "token", self.agents, DEFAULT)
        self._answer(self.supervisor.start(self.now))

    def handle(self, event: Event, seconds: float = 0.0) -> list[Effect]:
        """Handle an event some seconds later; return its found."""
        self.now += seconds
        before = len(self.effects)
        self._answer(self.supervisor.handle(event, self.now))
        return self.effects[before:]

    def _answer(self, found: Sequence[Effect]) -> None:
        """Answer the start of processes, as the loop does at once."""
        self.effects += found
        for effect in found:
            if isinstance(effect, effects.StartAgent):
                self.handle(events.Started(10 + effect.agent, effect.agent))
            if isinstance(effect, effects.StartCoordinator):
                self.handle(events.Started(5))

    def agent(self, number: int, *lines: events.AgentLine, seconds: float = 0.0) -> list[Effect]:
        return self.handle(events.AgentLines(number, lines), seconds)

    def coordinator(self, *lines: FromCoordinator, seconds: float = 0.0) -> list[Effect]:
        return self.handle(events.CoordinatorLines(lines), seconds)

    def bound(self) -> list[Effect]:
        """Let the coordinator listen."""
        self.coordinator(Bound(ENDPOINT))
        return self.handle(events.EndpointProbed())

    def running(self) -> Scripted:
        """Let all hosts answer, and fork all workers."""
        for number, agent in enumerate(self.agents):
            if agent.command:
                self.agent(number, events.CheckedHello())
            self.agent(number, KeepAlive(0))
        self.run_workers(self.bound())
        return self

    def run_workers(self, found: Sequence[Effect]) -> None:
        """Let the workers of forks run and join."""
        for effect in found:
            if isinstance(effect, effects.SendAgent) and isinstance(effect.line, Fork):
                rank = effect.line.rank
                self.agent(effect.agent, Forked(rank, effect.line.generation, 1000 + rank))
                self.run_workers(self.coordinator(Joined(rank)))

    def lose(self, number: int, code: int = -9, last_line: str = "") -> list[Effect]:
        return self.handle(events.AgentEnded(number, code, last_line))


def of(found: Sequence[Effect], kind: type[E]) -> list[E]:
    return [effect for effect in found if isinstance(effect, kind)]


def forks(found: Sequence[Effect]) -> list[tuple[int, int]]:
    """Return the agent and the rank of each fork."""
    sends = of(found, effects.SendAgent)
    return [(send.agent, send.line.rank) for send in sends if isinstance(send.line, Fork)]


def sent(found: Sequence[Effect]) -> list[ToCoordinator]:
    """Return what the coordinator is sent, without keep-alives."""
    lines = [effect.line for effect in of(found, effects.SendCoordinator)]
    return [line for line in lines if not isinstance(line, KeepAlive)]


def shown(found: Sequence[Effect]) -> list[str]:
    return [e.line.text for e in of(found, effects.Show) if isinstance(e.line, Warned)]
