"""A job from its first process to its verdict: the loop between the coordinator and the hosts."""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from launcher.children import Agent, Child, meeting_place
from launcher.spec import Carried, kept_by, seats
from pipeworker.coordinator.job import SLOTS
from pipeworker.coordinator.restarts import Restarts
from pipeworker.coordinator.roster import JOIN_FACTOR
from pipeworker.environment import timings
from pipeworker.errors import RecordError
from pipeworker.host.awake import Awake
from pipeworker.job.options import Options
from pipeworker.plan.orders import placement
from pipeworker.record.rundir import RunDir, write_summary
from pipeworker.session.processes import coordinator
from pipeworker.session.show.screen import screen
from pipeworker.session.show.view import View
from pipeworker.wire.keys import new_token
from pipeworker.wire.lines import (
    Again,
    Beat,
    Bound,
    CannotStart,
    Configuration,
    Fork,
    Forked,
    FromCoordinator,
    Here,
    HostLost,
    Interrupt,
    Joined,
    Planned,
    SaveAsked,
    Snapshot,
    ToCoordinator,
    Verdict,
    Warned,
    WorkerExited,
    never,
)
from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.failure import Cause, Failure
from pipeworker.wire.messages.step import StepResult

_AT_ONCE = 8
"""Workers that may be starting on a host with fewer cores."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KILLED = "the coordinator was killed"
_NOTICE = signal.SIGUSR1
"""Of a cluster that is about to take this host: a checkpoint now, and the job goes on."""
_LOOPBACK = "127.0.0.1"


class Launch:
    """One job.

    Args:
        carried: the agents of its hosts.
        warnings: to be shown first.
        view: what is shown.
    """

    def __init__(
        self,
        options: Options,
        run_dir: RunDir,
        carried: Sequence[Carried],
        warnings: Sequence[str] = (),
        view: View | None = None,
    ) -> None:
        self._options = options
        self._warnings = warnings
        self._view = view or View()
        self._carried = carried
        self._placement = placement(options.schedule, options.stages, options.replicas)
        self._run_dir = run_dir
        self._token = new_token()
        self._started = time.monotonic()
        self._timings = timings()
        self._patience = self._timings.patience(options.worker_timeout)
        self._awake = Awake(self._timings.ping)
        self._agents: list[Agent] = []
        self._coordinator: Child[ToCoordinator, FromCoordinator] | None = None
        self._verdict: Verdict | None = None
        self._failure = _KILLED
        self._deadline: float | None = None
        self._interrupts = 0  # signals
        self._stops = False
        self._steps = options.resume_step
        self._endpoint = ""
        self._generation = 1
        self._slots = SLOTS if options.restarts else 1
        self._asked: set[int] = set()  # ranks of it
        self._joined = 0
        self._losses = Restarts(options.restarts)  # of coordinators
        self._causes: list[str] = []
        self._snapshot: Snapshot | None = None
        self._hosts: list[int] = []  # by rank
        self._mirrors = False  # whether hosts keep each other's copies
        self._holds: dict[Agent, set[int]] = {}  # of whom each has the last snapshot
        self._ring: dict[Agent, Agent] = {}  # who keeps it as well
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()

    def run(self) -> Verdict:
        """Run it to its end.

        Raises:
            PipeworkerError: a process cannot be started.
        """
        run_dir = str(self._run_dir.path)
        self._screen = screen(self._options, run_dir, self._view, starting=True)
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        taken = {*_SIGNALS, _NOTICE}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
            taken.remove(signal.SIGHUP)
        before = {number: signal.signal(number, lambda *_: None) for number in taken}
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        try:
            for carried in self._carried:
                log = self._run_dir.host_log(carried.host.name)
                importing = JOIN_FACTOR * self._patience
                agent = Agent(carried, log, self._patience, importing, self._awake.look)
                self._agents.append(agent)
            if not any(carried.line for carried in self._carried):
                self._direct(_LOOPBACK)
            for text in self._warnings:
                self._show(Warned(text))
            self._loop()
        except BaseException:
            self._screen.close()
            raise
        finally:
            self._end()
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._wake_in.close()
            self._wake_out.close()
        verdict = self._verdict or self._verdict_of_our_own()
        self._show(verdict)
        return verdict

    def _end(self) -> None:
        """Let all processes end, at the same time."""
        self._selector.close()
        for agent in self._agents:
            agent.close()
        if self._coordinator:
            self._coordinator.process.hang_up()
        for agent in self._agents:
            agent.finish(self._timings.leave)
        if self._coordinator:
            self._coordinator.process.finish(self._timings.leave)

    def _direct(self, host: str) -> None:
        """Start a coordinator, the first one or one that goes on where another was lost.

        Args:
            host: where it listens.

        Raises:
            PipeworkerError: it cannot be started.
        """
        self._host = host
        process = coordinator()
        patience, clock = self._patience, self._awake.look
        limits = patience, JOIN_FACTOR * patience
        self._coordinator = Child(process, "the coordinator", *limits, clock)
        self._selector.register(process, selectors.EVENT_READ, self._hear_coordinator)
        options, run_dir = self._options.to_json(), str(self._run_dir.path)
        where = self._token, host, self._generation, -1, self._slots
        snapshot, causes = self._snapshot, tuple(self._causes)
        process.say(Configuration(options, run_dir, *where, snapshot, causes))

    def _direct_again(self) -> bool:
        """Go on with another coordinator in the place of one that is gone; False when it is over.

        Its workers are ended as soon as the next ones are started.
        """
        if self._coordinator is None or self._verdict or self._interrupts > 1:
            return False
        if not self._endpoint and not self._losses.causes:  # none has ever come so far
            return False
        now = time.monotonic()
        if enough := self._losses.enough(Failure(Cause.LOST, self._failure), now):
            if self._causes:
                self._show(Warned(f"the job does not go on: {enough}"))
            return False
        failure, self._failure = self._failure, _KILLED
        self._losses.begin(failure, now)
        self._causes.append(failure)
        process = self._coordinator.process
        if process in self._selector.get_map():  # it is silent, not gone
            self._selector.unregister(process)
        process.hang_up()
        process.finish(0.0)
        self._begin_generation(self._generation + 1)
        self._endpoint = ""
        self._direct(self._host)
        if self._stops:  # what is in memory is saved before the job ends
            self._tell(Interrupt())
        return True

    def _begin_generation(self, number: int) -> None:
        self._generation = number
        self._asked.clear()
        self._joined = 0
        for agent in self._agents:
            agent.ranks.clear()
            agent.may_try = True

    def _tell(self, event: ToCoordinator) -> None:
        if self._coordinator:
            self._coordinator.process.say(event)

    def _loop(self) -> None:
        """Pass on what the processes say until the verdict is in and the workers are gone."""
        for agent in self._agents:
            self._listen(agent)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._on_signal)
        next_beat = time.monotonic()
        while self._verdict is None or any(agent.pids for agent in self._agents):
            now, seen = time.monotonic(), self._awake.look()
            if now >= next_beat:
                next_beat = now + self._timings.ping
                self._beat()
            until = next_beat if self._deadline is None else min(next_beat, self._deadline)
            for key, _ in self._selector.select(max(0.0, until - now)):
                if not key.data():
                    if self._is_coordinator(key.fileobj) and self._direct_again():
                        break
                    return
            else:
                if not self._are_alive(seen) and not self._direct_again():
                    return
            if self._deadline is not None and time.monotonic() >= self._deadline:
                return

    def _is_coordinator(self, process: Any) -> bool:
        return self._coordinator is not None and process is self._coordinator.process

    def _listen(self, agent: Agent) -> None:
        hear = partial(self._hear_agent, agent)
        self._selector.register(agent.process, selectors.EVENT_READ, hear)

    def _beat(self) -> None:
        """Say that this process lives; and look again for hosts that workers are waiting for."""
        beat = Beat(self._patience)
        for agent in self._agents:
            if not agent.lost:
                agent.process.say(beat)
        self._tell(beat)
        if self._endpoint and self._verdict is None:
            self._fork_more()

    def _are_alive(self, now: float) -> bool:
        """Give up who has been silent; False when that is the coordinator.

        Args:
            now: before what they have said was read: this process may have been stopped since.
        """
        for agent in self._agents:
            if not agent.lost and (said := agent.child.silence(now)):
                agent.give_up(said)
        coordinator = self._coordinator
        if self._verdict or coordinator is None:
            return True
        if silence := coordinator.silence(now):
            self._failure = silence
            coordinator.process.kill()
            return False
        return True

    def _hear_coordinator(self) -> bool:
        assert self._coordinator
        events, more = self._coordinator.hear()
        ended = any(isinstance(event, Verdict) for event in events)
        for event in events:
            match event:
                case Beat():
                    continue
                case Bound() if ended:  # all that while this process was stopped
                    continue
                case Bound():
                    self._endpoint = event.endpoint
                    if not self._reaches():
                        return False
                    self._fork_more()
                case Snapshot():
                    self._snapshot = event
                    self._holds = {self._agents[host]: set() for host in self._hosts}
                    for rank, host in enumerate(self._hosts):
                        self._holds[self._agents[host]].add(rank)
                    used = list(dict.fromkeys(self._hosts)) if self._mirrors else []
                    pairs = zip(used, [*used[1:], *used[:1]], strict=True)
                    self._ring = {self._agents[a]: self._agents[b] for a, b in pairs}
                case Joined():
                    self._joined += 1
                    self._fork_more()
                case Again():
                    self._show(event)
                    self._causes.append(event.cause)
                    options = self._options
                    self._placement = placement(options.schedule, event.stages, options.replicas)
                    self._begin_generation(event.generation)
                    self._fork_more()
                case Verdict():
                    self._verdict = event
                    self._deadline = time.monotonic() + self._timings.leave
                case StepResult():
                    self._steps = event.step
                    self._show(event)
                case Planned() | Evaluation() | Warned():
                    self._show(event)
                case _:
                    never(event)
        if not more:
            self._selector.unregister(self._coordinator.process)
        return more or self._verdict is not None

    def _reaches(self) -> bool:
        """Whether workers of this host will reach the coordinator; if not, the job has failed."""
        url = urlsplit(self._endpoint)
        address = url.hostname or "", url.port or 0
        try:
            socket.create_connection(address, self._timings.handshake).close()
        except OSError as error:
            where = f"{address[0]}:{address[1]} ({socket.gethostname()})"
            self._failure = f"the coordinator cannot be reached at {where}: {error.strerror}"
            self._endpoint = ""  # nor will another one be
            return False
        return True

    def _fork_more(self) -> None:
        """A few workers at a time, of many; the first shows whether there are layers for all."""
        ranks = self._placement.ranks
        if len(self._asked) == ranks or (self._room < ranks and not self._revived(ranks)):
            return
        hosts = seats([agent.places for agent in self._agents], ranks)
        self._mirrors = self._slots > 1 and len({*hosts}) > 1 and not self._options.redundant
        self._hosts = hosts
        few = max(_AT_ONCE, os.cpu_count() or 1) * len(self._agents)
        most = 1 if ranks > few and not self._joined else few
        for rank in range(ranks):
            if rank in self._asked:
                continue
            if len(self._asked) - self._joined >= most:
                return
            agent = self._agents[hosts[rank]]
            where = agent.endpoint(self._endpoint), self._token
            local_rank = rank - hosts.index(hosts[rank])
            keeps = () if local_rank or not self._mirrors else kept_by(hosts, hosts[rank])
            fork = Fork(rank, self._generation, *where, local_rank, self._slots, keeps)
            agent.process.say(dataclasses.replace(fork, kept=self._mirrors))
            agent.ranks.add(rank)
            self._asked.add(rank)

    @property
    def _room(self) -> int:
        return sum(agent.places for agent in self._agents)

    def _revived(self, ranks: int) -> bool:
        """Start agents in the place of lost ones; False while there is too little room."""
        for agent in self._agents:
            if agent.lost and (agent.may_try or agent.comes_back):
                agent.start()
                self._listen(agent)
        return self._room >= ranks

    def _hear_agent(self, agent: Agent) -> bool:
        events, more = agent.child.hear()
        for event in events:
            match event:
                case Here():
                    if not self._meets(agent, event):
                        return False
                case Forked():
                    agent.forked(event)
                case WorkerExited():
                    agent.pids.pop(event.rank, None)
                    self._tell(event)
                case CannotStart() | SaveAsked():
                    self._tell(event)
                case Interrupt():
                    self._stop(f"{agent.called} is to end: ")
                case Beat():
                    continue
                case _:
                    never(event)
        if more:
            return True
        self._selector.unregister(agent.process)
        worked, text = agent.ended(self._timings.leave)
        if self._coordinator is None:  # a job that has not begun does not begin without a host
            self._failure = text
            return False
        # What its memory held is gone too, also of workers that are not started again yet.
        ranks = tuple(sorted(agent.ranks | self._holds.pop(agent, set())))
        self._asked -= agent.ranks
        if worked:
            kept = bool(self._ring) and all(
                self._ring[each] in self._holds for each in self._ring if each not in self._holds
            )
            if not kept and not self._options.redundant:
                self._snapshot = None
            self._tell(HostLost(ranks, text, kept))
        elif not agent.comes_back:
            self._tell(CannotStart(min(ranks, default=0), self._generation, text, self._room))
        return True

    def _meets(self, agent: Agent, here: Here) -> bool:
        """Another host is there; once all are, the coordinator is started. False: it is no good."""
        problem = agent.meets(here, self._run_dir, self._options.job_file)
        if problem:
            self._failure = problem
            return False
        remote = [agent for agent in self._agents if agent.carried.line]
        if self._coordinator is None and all(agent.here for agent in remote):
            callers = [agent.here.caller for agent in remote if agent.here]
            self._direct(meeting_place(callers))
            for agent in self._agents:
                agent.sees(callers)
        return True

    def _on_signal(self) -> bool:
        numbers = self._wake_out.recv(4096)
        if _NOTICE in numbers:
            self._tell(SaveAsked())
        for _ in filter(_SIGNALS.__contains__, numbers):
            self._interrupts += 1
            if self._interrupts > 1 or self._coordinator is None:
                return False
            self._stop()
        return True

    def _stop(self, why: str = "") -> None:
        """At the end of the step; several hosts may be told so, and this process as well."""
        if self._stops:
            return
        self._stops = True
        self._tell(Interrupt())
        text = "stopping after this step, with a checkpoint; again to stop at once"
        self._show(Warned(why + text))

    def _show(self, event: FromCoordinator) -> None:
        """Show something; a terminal that is gone ends the job as an interrupt does."""
        try:
            self._screen.hear(event)
        except OSError:
            if not self._stops and self._verdict is None:
                self._wake_in.send(bytes([signal.SIGHUP]))

    def _verdict_of_our_own(self) -> Verdict:
        """The coordinator left without one: it was killed, or the user did not wait for it."""
        interrupted = bool(self._interrupts or self._stops)
        verdict = Verdict(
            status="interrupted" if interrupted else "failed",
            exit_status=130 if interrupted else 1,
            steps=self._steps,
            seconds=time.monotonic() - self._started,
            peak_memory=(0,) * self._placement.ranks,
            bubble=0.0,
            error=None if interrupted else self._failure,
            restarts=len(self._causes),
            causes=tuple(self._causes),
        )
        try:
            write_summary(self._run_dir, verdict, self._placement.stages)
        except OSError as error:
            self._show(Warned(str(RecordError(self._run_dir.summary, error))))
        return verdict
