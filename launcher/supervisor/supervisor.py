"""The supervisor of a job: events of its processes in, effects out. Pure; time is an argument.

The supervisor decides when workers are forked, what the loss of a host or of the coordinator means,
when either is started again, what an interrupt does, and how a job without a verdict has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import assert_never

from launcher.spec import RemoteAgent
from launcher.supervisor import effects, events
from launcher.supervisor.agents import AgentState, SilenceTimer, listen_address
from launcher.supervisor.effects import Effect
from launcher.supervisor.events import Event
from launcher.supervisor.forks import Forks
from launcher.supervisor.stop_notice import stop_notice
from pipeworker.coordinator.restart_policy import RestartPolicy
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.job.options import Options
from pipeworker.timings import Timings
from pipeworker.wire import lines
from pipeworker.wire.lines import FromCoordinator, Interrupt, KeepAlive, ToCoordinator, Warned

_KILLED = "the coordinator was killed"
_SAME_INTERRUPT = 0.25
"""Seconds within which a second signal is the same interrupt: the launcher receives two where a
terminal is closed (of the shell and of the kernel), and where the program ``timeout`` ends it."""


class Supervisor:
    """The state of a job's processes.

    Attributes:
        stopping: whether the job was asked to stop after its step.
        verdict: how the job ended, as the coordinator reports; None before it does.
    """

    def __init__(
        self,
        options: Options,
        run_dir: str,
        token: str,
        agents: Sequence[RemoteAgent],
        timings: Timings,
        cores: int = 1,
    ) -> None:
        self._options, self._run_dir, self._token = options, run_dir, token
        self._timings = timings
        self._patience = timings.patience(options.worker_timeout)
        self._network_patience = timings.network_patience(options.worker_timeout)
        self._has_forked = False
        self._trains = False  # whether all workers of the generation have joined
        self._agents = [AgentState.of(agent, self._patience, now=0.0) for agent in agents]
        self._forks = Forks(options, token, cores)
        self._coordinator: SilenceTimer | None = None
        self._began: float | None = None  # when the first coordinator was started
        self._endpoint = ""  # of the coordinator, once this host has reached it
        self._restarts = RestartPolicy(options.max_restarts)  # of the coordinator
        self._causes: list[str] = []  # of all restarts
        self._failure = _KILLED
        self._loop_error: str | None = None
        self._steps = options.resume_step
        self._snapshot: lines.Snapshot | None = None
        self._interrupts = 0
        self._interrupted_at = float("-inf")
        self._stops_early = False  # before the first step, as the warning states
        self._ended = False
        self._lost_hosts: list[str] = []  # reasons, since the generation began
        self._problems: list[str] = []  # of hosts, before the job begins
        self._next_beat = 0.0
        self._deadline = float("inf")
        self._effects: list[Effect] = []
        self.stopping = False
        self.verdict: lines.Verdict | None = None

    @property
    def over(self) -> bool:
        """Whether there is nothing left to wait for."""
        running = any(agent.workers for agent in self._agents)
        return self._ended or (self.verdict is not None and not running)

    @property
    def wakes_at(self) -> float:
        """The time at which the next `Ticked` is due."""
        return min(self._next_beat, self._deadline)

    @property
    def stages(self) -> int:
        """The number of stages of the present generation."""
        return self._forks.placement.stages

    def start(self, now: float) -> list[Effect]:
        """Start the job; `now` is of a clock that stands still while the launcher is suspended."""
        self._next_beat = now
        for number, agent in enumerate(self._agents):
            self._start_agent(number, now)
            agent.may_retry = True  # its host may be too busy at first
        if not any(agent.remote.command for agent in self._agents):
            self._start_coordinator(now)
        return self._flush_effects()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Return what is to be done about an event that was read at `now`."""
        match event:
            case events.Started():
                coordinator, agent = self._coordinator, event.agent
                timer = coordinator if agent is None else self._agents[agent].timer
                assert timer
                timer.pid = event.pid
            case events.AgentLines():
                for line in event.lines:
                    self._handle_agent_line(event.agent, line, now)
            case events.AgentEnded():
                self._handle_agent_end(event, now)
            case events.CoordinatorLines():
                self._handle_coordinator_lines(event.lines, now)
            case events.CoordinatorEnded():
                if self.verdict is None:
                    self._restart_coordinator(now)
            case events.EndpointProbed():
                if event.error:
                    self._failure, self._endpoint = event.error, ""
                    self._restart_coordinator(now)
                else:
                    self._fork(now)
            case lines.Interrupt():
                if now - self._interrupted_at >= _SAME_INTERRUPT:
                    self._interrupt(now)
            case events.TerminalLost():
                if not self.stopping and self.verdict is None:
                    self._interrupt(now)
            case lines.SaveRequest():
                self._send(event)
            case events.Ticked():
                self._tick(now)
            case _:
                assert_never(event)
        return self._flush_effects()

    def fail(self, error: str) -> None:
        """End the job for an error of the loop."""
        self._failure, self._loop_error, self._ended = error, error, True

    def shutdown(self) -> list[Effect]:
        """Return what precedes the end of all processes.

        An agent that still imports torch has no workers and does not read its input: it is killed.
        """
        return [
            effects.KillAgent(number)
            for number, agent in enumerate(self._agents)
            if not agent.is_lost and not agent.timer.has_sent
        ]

    @property
    def has_begun(self) -> bool:
        """Whether a coordinator was started, and an agent that could fork a worker of it."""
        lost = all(agent.is_lost for agent in self._agents)
        return self._began is not None and (self._has_forked or not lost)

    def own_verdict(self, seconds: float) -> lines.Verdict:
        """Return how the job ended, if the coordinator was lost or the user did not wait for it."""
        interrupted = bool(self._interrupts or self.stopping)
        return lines.Verdict(
            status="interrupted" if interrupted else "failed",
            exit_status=130 if interrupted else 1,
            steps=self._steps,
            seconds=seconds,
            peak_memory=(0,) * self._forks.placement.ranks,
            bubble=0.0,
            error=self._loop_error if interrupted else self._failure,
            causes=tuple(self._causes),
        )

    # The coordinator.

    def _start_coordinator(self, now: float) -> None:
        self._coordinator = SilenceTimer("the coordinator", self._patience, now)
        self._began = now if self._began is None else self._began
        configuration = lines.Configuration(
            self._options.to_json(),
            self._run_dir,
            self._token,
            listen_address(self._callers),
            self._forks.generation,
            slots=self._forks.slots,
            snapshot=self._snapshot,
            causes=tuple(self._causes),
            elapsed=now - self._began,
            stages=self._forks.placement.workers,
        )
        self._effects.append(effects.StartCoordinator(configuration))

    def _restart_coordinator(self, now: float) -> None:
        """Start another coordinator in place of a lost one, or end the job.

        Its workers are ended as soon as the next ones are forked.
        """
        if not self._endpoint and not self._restarts.causes:  # it cannot start
            self._ended = True
            return
        if reason := self._restarts.refusal(Failure(Cause.LOST, self._failure), now):
            if self._causes:
                self._show(Warned(f"the job is not restarted: {reason}"))
            self._ended = True
            return
        failure, self._failure = self._failure, _KILLED
        self._restarts.record(failure, now)
        self._causes.append(failure)
        self._effects.append(effects.EndCoordinator())
        self._begin_generation(self._forks.generation + 1)
        self._show(lines.Restart(self._forks.generation, failure, self._forks.placement.workers))
        self._endpoint = ""
        self._start_coordinator(now)
        if self.stopping:  # the last snapshot is saved before the job ends
            self._send(Interrupt())

    def _handle_coordinator_lines(self, received: Sequence[FromCoordinator], now: float) -> None:
        assert self._coordinator
        self._coordinator.receive(None, now)
        # The launcher was suspended, and reads at once where the coordinator listened and its end.
        has_ended = any(isinstance(line, lines.Verdict) for line in received)
        for line in received:
            match line:
                case lines.KeepAlive():
                    continue
                case lines.Bound():
                    if not has_ended:
                        self._endpoint = line.endpoint
                        self._effects.append(effects.ProbeEndpoint(line.endpoint))
                case lines.Snapshot():
                    self._snapshot = line if self._forks.copies.complete() else None
                case lines.Joined():
                    self._forks.join()
                    self._fork(now)
                case lines.Restart():
                    self._show(line)
                    if line.recovers:
                        self._causes.append(line.cause)
                    self._begin_generation(line.generation, line.stages)
                    self._fork(now)
                case lines.Verdict():
                    self.verdict = line
                    self._deadline = now + self._timings.exit
                case StepResult():
                    self._steps = line.step
                    self._show(line)
                case lines.Planned():
                    self._trains = True
                    self._show(line)
                    if self._stops_early and self._options.trains:  # a step begins all the same
                        self._show(stop_notice(self._options, early=False))
                    self._stops_early = False
                case Evaluation() | lines.Warned() | lines.Activity():
                    self._show(line)
                case _:
                    assert_never(line)

    # Agents.

    @property
    def _callers(self) -> dict[str, bool]:
        """The launcher's addresses that hosts see, and whether each belongs to this host."""
        hellos = [agent.hello for agent in self._agents if agent.hello]
        return {hello.caller: hello.is_local for hello in hellos}

    def _start_agent(self, number: int, now: float) -> None:
        self._agents[number].restart(now)
        self._effects.append(effects.StartAgent(number))

    def _handle_agent_line(self, number: int, line: events.AgentLine, now: float) -> None:
        agent = self._agents[number]
        agent.timer.receive(line, now)
        match line:
            case events.CheckedHello():
                self._handle_hello(number, line, now)
            case lines.Forked():
                agent.forked(line)
                self._has_forked = True
            case lines.WorkerExited():
                agent.exited(line)
                self._send(line)
            case lines.CannotStart() | lines.SaveRequest() | lines.Starting():
                self._send(line)
            case lines.Waiting():
                self._send(line)
                if line.reason not in ("", agent.waits_for):
                    agent.waits_for = line.reason
                    self._show(Warned(f"{agent.remote.name} waits: {line.reason}", note=True))
            case lines.Interrupt():
                self._stop(f"{agent.remote.name} was asked to end: ")
            case lines.KeepAlive():
                pass
            case _:
                assert_never(line)

    def _handle_hello(self, number: int, line: events.CheckedHello, now: float) -> None:
        """Record another host; once all have answered, start the coordinator.

        A host that comes back into a job, as without its file system, is given up if it has a
        problem now.
        """
        agent = self._agents[number]
        agent.hello = line
        agent.timer.restart(now)  # the agent has introduced itself but is still importing torch
        if self._coordinator is None:
            self._problems += [line.problem] if line.problem else []
            self._begin_with_all(now)
        elif line.problem:
            agent.silence = line.problem.removeprefix(f"{agent.remote.name}: ")
            self._effects.append(effects.KillAgent(number))

    def _begin_with_all(self, now: float) -> None:
        """Once all hosts have answered, start the coordinator, or name those that cannot be used.

        A job does not begin with a host less.
        """
        if not all(agent.hello or agent.is_lost for agent in self._agents):
            return
        if not self._problems:
            self._start_coordinator(now)
            return
        several = len(self._problems) > 1
        head = [f"{len(self._problems)} hosts cannot be used"] if several else []
        self.fail("\n  ".join([*head, *self._problems]))

    def _handle_agent_end(self, event: events.AgentEnded, now: float) -> None:
        agent = self._agents[event.agent]
        if not agent.remote.command:
            # The kernel kills the workers when their agent ends, but not the workers' children.
            self._effects += [effects.KillGroup(worker.pid) for worker in agent.workers.values()]
        had_workers, text = agent.lose(event.code, event.last_line, now)
        if self._coordinator is None:
            if not (agent.hello and agent.hello.problem):  # which is why it has been ended
                self._problems.append(text)
            self._begin_with_all(now)
            return
        is_used = self._forks.uses(event.agent) or self._places < self._forks.placement.ranks
        # The host's memory is gone too, with copies of workers that were not forked again.
        ranks, survives = self._forks.lose(event.agent, had_workers=had_workers)
        if not ranks and not is_used:
            self._show(Warned(f"{text}; the job has no worker there, and continues"))
        elif had_workers or ((agent.silence or agent.hello) and agent.may_retry):
            if not survives:
                self._snapshot = None
            self._send(lines.HostLost(ranks, text, survives))
            self._lost_hosts.append(text)
        elif self.stopping or not agent.may_return(now):
            agent.may_retry = False  # the coordinator decides
            number = self._forks.generation
            self._send(lines.CannotStart(min(ranks, default=0), number, text, self._places))
        else:
            agent.may_retry = True  # the last attempt is after that time, and is reported

    # Workers.

    def _begin_generation(self, number: int, stages: int | None = None) -> None:
        for text in self._lost_hosts:  # the terminal would be silent until the job has resumed
            self._show(Warned(f"{text}; the job's workers are started again"))
        self._lost_hosts.clear()
        self._trains = False
        self._forks.begin(number, stages)
        for agent in self._agents:
            agent.may_retry = True

    def _fork(self, now: float) -> None:
        """Fork the next workers, once the hosts have places for all."""
        if self._forks.complete:
            return
        if self._places < self._forks.placement.ranks:
            for number, agent in enumerate(self._agents):
                if agent.is_lost and (agent.may_retry or agent.may_return(now)):
                    self._start_agent(number, now)
            if self._places < self._forks.placement.ranks:
                return
        places = [agent.places for agent in self._agents]
        endpoints = [agent.endpoint(self._endpoint, self._callers) for agent in self._agents]
        forks = self._forks.next_forks(places, endpoints)
        self._effects += [effects.SendAgent(host, fork) for host, fork in forks]

    @property
    def _places(self) -> int:
        """The number of workers that all hosts take now."""
        return sum(agent.places for agent in self._agents)

    # The user, and time.

    def _interrupt(self, now: float) -> None:
        """Stop after the step; on a second interrupt, or before the job has begun, at once."""
        self._interrupts, self._interrupted_at = self._interrupts + 1, now
        if self._interrupts > 1 or self._coordinator is None:
            self._ended = True
        else:
            self._stop()

    def _stop(self, reason: str = "") -> None:
        """Stop after the step: several hosts may ask for it, and the user as well."""
        if self.stopping:
            return
        self.stopping = True
        self._send(Interrupt())
        self._stops_early = not self._trains and self._steps == self._options.resume_step
        self._show(stop_notice(self._options, reason, early=self._stops_early))

    def _tick(self, now: float) -> None:
        self._check_silence(now)
        if now >= self._deadline:
            self._ended = True
        if now >= self._next_beat:
            self._next_beat = now + self._timings.ping
            self._beat(now)

    def _beat(self, now: float) -> None:
        """Send keep-alives, and try again the hosts that workers wait for."""
        for number, agent in enumerate(self._agents):
            if not agent.is_lost:
                limit = self._network_patience if agent.remote.command else self._patience
                self._effects.append(effects.SendAgent(number, KeepAlive(limit)))
        self._send(KeepAlive(self._patience))
        if self._endpoint and self.verdict is None:
            self._fork(now)

    def _check_silence(self, now: float) -> None:
        """Give up processes that are silent for too long.

        While its workers train, another host is reachable: only the connection to its agent waits
        for TCP. Otherwise the coordinator notices the workers' silence, and begins a generation.
        """
        for number, agent in enumerate(self._agents):
            limit = self._network_patience if agent.remote.command and self._trains else 0.0
            if not agent.is_lost and (silence := agent.timer.expired(now, limit)):
                agent.silence = silence
                self._effects.append(effects.KillAgent(number))
        if self.verdict or self._coordinator is None:
            return
        if silence := self._coordinator.expired(now):
            self._failure = silence
            self._restart_coordinator(now)
            if self._ended:
                self._effects.append(effects.EndCoordinator())

    def _send(self, line: ToCoordinator) -> None:
        if self._coordinator:
            self._effects.append(effects.SendCoordinator(line))

    def _show(self, line: FromCoordinator) -> None:
        self._effects.append(effects.Show(line))

    def _flush_effects(self) -> list[Effect]:
        taken, self._effects = self._effects, []
        return taken
