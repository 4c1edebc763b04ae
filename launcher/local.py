"""The run of a job by this process, and what is checked on this host before."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from typing_extensions import assert_never

from launcher.spec import RemoteAgent
from launcher.supervisor import effects, events
from launcher.supervisor.agents import host_problem
from launcher.supervisor.effects import Effect
from launcher.supervisor.events import AgentLine, CheckedHello, Event
from launcher.supervisor.supervisor import Supervisor
from pipeworker.display.style import Style
from pipeworker.display.thread import start_display
from pipeworker.environment import timings, versions
from pipeworker.errors import PipeworkerError, ProtocolError, RecordError, UsageError
from pipeworker.facts.failure import describe_exit
from pipeworker.host.hook_process import HookProcess
from pipeworker.host.lifetime import kill_group
from pipeworker.host.line_process import LineProcess, start_agent, start_coordinator
from pipeworker.host.signals import ENDS, SignalSocket, deferred_interrupt
from pipeworker.host.suspend_clock import SuspendAwareClock
from pipeworker.record.files.atomic_file import open_file
from pipeworker.record.files.located import located
from pipeworker.record.run_record import summary_problem
from pipeworker.record.rundir import file_digest
from pipeworker.runs.begin import PreparedRun
from pipeworker.wire import interfaces, lines
from pipeworker.wire.keys import new_token

_NOTICE = signal.SIGUSR1
"""Sent by a cluster that is about to take this host: the job saves a checkpoint and continues."""
_TAIL = 2000  # bytes of a log that are searched for its last line

Coordinator = LineProcess[lines.ToCoordinator, lines.FromCoordinator]
Readable = SignalSocket | LineProcess[Any, Any]
Source = Callable[[], Iterable[Event]]
"""Reads what has become readable, and returns the events that it means."""


class AgentProcess:
    """The process of an agent, or of the command that carries its lines.

    `log` receives the standard error of that command.
    """

    def __init__(self, remote: RemoteAgent, log: Path) -> None:
        """Start the process.

        Raises:
            PipeworkerError: it cannot be started, or the log cannot be written.
        """
        try:
            self._errors: IO[bytes] | None = open_file(log, "a+b") if remote.command else None
        except OSError as error:
            raise RecordError(located(log), error) from None
        self._logged = self._errors.tell() if self._errors else 0
        self.process: LineProcess[lines.ToAgent, lines.FromAgent] = start_agent(
            remote.command, self._errors
        )

    def introduced(self) -> None:
        """Note that the agent runs: a banner that ssh has printed before is not why it ends."""
        if self._errors is not None:
            self._logged = os.fstat(self._errors.fileno()).st_size

    def finish(self, seconds: float) -> tuple[int, str]:
        """Wait for its end, and kill it when that takes longer.

        Returns:
            The exit code, and the last line of its standard error, such as ssh's reason: once the
            agent has introduced itself, of what was printed since.
        """
        code = self.process.wait(seconds)
        if self._errors is None:
            return code, ""
        with self._errors as log:
            log.seek(self._logged)
            text = log.read()[-_TAIL:].decode(errors="replace").strip()
        return code, text.rpartition("\n")[2].strip()


class Launch:
    """A job from its first process to its verdict, shown to the user."""

    def __init__(self, prepared: PreparedRun, agents: Sequence[RemoteAgent], view: Style) -> None:
        self._options, self._run_dir, self._remote = prepared.options, prepared.run_dir, agents
        self._warnings = prepared.warnings
        self._timings = timings()
        self._clock = SuspendAwareClock(self._timings.ping)
        options, path = prepared.options, str(prepared.run_dir.path)
        self._first_path = path
        self._supervisor = Supervisor(
            options, path, new_token(), agents, self._timings, len(os.sched_getaffinity(0))
        )
        self._agents: dict[int, AgentProcess] = {}
        self._coordinator: Coordinator | None = None
        self._hooks = HookProcess(options, prepared.run_dir)
        self._selector = selectors.DefaultSelector()
        view = replace(view, origins=prepared.origins)
        self._screen = start_display(options, prepared.run_dir, view, starting=True)

    def run(self) -> lines.Verdict:
        """Run the job to its end; return how it ended, for :meth:`finish`."""
        started = time.monotonic()
        caught = {*ENDS, _NOTICE}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
            caught.remove(signal.SIGHUP)
        try:
            with closing(SignalSocket(caught)) as signals:
                try:
                    self._perform(self._supervisor.start(self._clock.now()))
                    self._perform([effects.Show(lines.Warned(text)) for text in self._warnings])
                    self._listen(signals, lambda: _read_signals(signals))
                    self._loop()
                except PipeworkerError as error:  # a process or its log
                    self._supervisor.fail(str(error))
                finally:
                    self._end()
                verdict = self._supervisor.verdict
                self._hooks.finish(self._show, verdict, partial(_is_interrupted, signals))
        except BaseException:
            self._hooks.kill()
            self._screen.close()
            raise
        return verdict or self._supervisor.own_verdict(time.monotonic() - started)

    def finish(self, verdict: lines.Verdict) -> None:
        """Show how the job ended; write the summary if its coordinator has not."""
        if self._supervisor.verdict is None:
            stages = self._supervisor.stages
            if problem := summary_problem(self._run_dir, verdict, stages, self._options.best):
                self._show(lines.Warned(problem))
        self._show(verdict)

    @property
    def has_begun(self) -> bool:
        """Whether a coordinator was started, and an agent that could fork a worker of it."""
        return self._supervisor.has_begun

    def _loop(self) -> None:
        supervisor = self._supervisor
        while not supervisor.over:
            before = self._clock.now()
            for key, _ in self._selector.select(max(0.0, supervisor.wakes_at - before)):
                for event in key.data():
                    self._perform(supervisor.handle(event, self._clock.now()))
                if supervisor.over:
                    return
            self._perform([effects.Show(warning) for warning in self._hooks.warnings()])
            # What was sent until `before` has been read: only now is silence known to be silence.
            self._perform(supervisor.handle(events.Ticked(), before))

    def _listen(self, source: Readable, read: Source) -> None:
        self._selector.register(source, selectors.EVENT_READ, read)

    def _perform(self, requested: Sequence[Effect]) -> None:
        """Carry out effects, and those of the events that answer them."""
        waiting = deque(requested)
        while waiting:
            answer = self._carry_out(waiting.popleft())
            if answer is not None:
                waiting.extend(self._supervisor.handle(answer, self._clock.now()))

    def _carry_out(self, effect: Effect) -> Event | None:
        match effect:
            case effects.StartAgent():
                return self._start_agent(effect.agent)
            case effects.KillAgent():
                if effect.agent in self._agents:
                    self._agents[effect.agent].process.kill()
            case effects.SendAgent():
                if effect.agent in self._agents:
                    self._agents[effect.agent].process.send(effect.line)
            case effects.StartCoordinator():
                return self._start_coordinator(effect.configuration)
            case effects.EndCoordinator():
                self._end_coordinator()
            case effects.SendCoordinator():
                if self._coordinator:
                    self._coordinator.send(effect.line)
            case effects.ProbeEndpoint():
                return events.EndpointProbed(self._probe(effect.endpoint))
            case effects.KillGroup():
                kill_group(effect.pid)
            case effects.Show():
                return self._show(effect.line)
            case _:
                assert_never(effect)
        return None

    # Agents.

    def _start_agent(self, number: int) -> Event:
        remote = self._remote[number]
        agent = AgentProcess(remote, self._run_dir.host_log(remote.host.name))
        self._agents[number] = agent
        self._listen(agent.process, lambda: self._read_agent(number, agent))
        return events.Started(agent.process.pid, number)

    def _read_agent(self, number: int, agent: AgentProcess) -> Iterator[Event]:
        remote = self._remote[number]
        try:
            received, more = agent.process.receive()
        except ProtocolError as error:
            text = f"{remote.name}: its agent sent an invalid message: {error}"
            raise ProtocolError(text) from None
        for text in agent.process.skipped():
            self._show(lines.Warned(f"{remote.name} prints before pipeworker begins there: {text}"))
        if any(isinstance(line, lines.AgentHello) for line in received):
            agent.introduced()
        yield events.AgentLines(number, tuple(self._checked(remote, line) for line in received))
        if not more:
            self._selector.unregister(agent.process)
            del self._agents[number]
            yield events.AgentEnded(number, *agent.finish(self._timings.exit))

    def _checked(self, remote: RemoteAgent, line: lines.FromAgent) -> AgentLine:
        """Compare the host of an agent that introduces itself with this one."""
        if not isinstance(line, lines.AgentHello):
            return line
        job_file, run_dir = self._options.job_file, self._run_dir
        found = {name: version or "" for name, version in versions().items()}
        digests = {"job": file_digest(Path(job_file)), "run": file_digest(run_dir.run)}
        own = lines.AgentHello(**found, **digests)
        if str(run_dir.path) != self._first_path:  # the agent looked where it was at the start
            line = replace(line, run=own.run)
        problem = host_problem(remote, line, own, job_file, str(run_dir.path))
        return CheckedHello(line.caller, _is_local(line.caller), problem)

    # The coordinator.

    def _start_coordinator(self, configuration: lines.Configuration) -> Event:
        process = self._coordinator = start_coordinator()
        self._listen(process, lambda: self._read_coordinator(process))
        process.send(replace(configuration, run_dir=str(self._run_dir.path)))
        return events.Started(process.pid)

    def _read_coordinator(self, process: Coordinator) -> Iterator[Event]:
        received, more = process.receive()
        if not more:
            self._selector.unregister(process)
        yield events.CoordinatorLines(tuple(received))
        if not more and process is self._coordinator:  # these lines may have ended it
            yield events.CoordinatorEnded()

    def _end_coordinator(self) -> None:
        process, self._coordinator = self._coordinator, None
        if process is None:
            return
        if process in self._selector.get_map():  # it is silent, or cannot be reached
            self._selector.unregister(process)
        process.close_input()
        process.wait(0.0)

    def _probe(self, endpoint: str) -> str:
        """Return why this host, and thus its workers, cannot reach the coordinator, else ""."""
        error = interfaces.connection_error(endpoint, self._timings.handshake)
        url = urlsplit(endpoint)
        where = f"{url.netloc} ({socket.gethostname()})"
        if error == os.strerror(errno.ENETUNREACH) and interfaces.is_loopback(url.hostname or ""):
            error += "; bring up the loopback interface: ip link set lo up"
        return error and f"the coordinator cannot be reached at {where}: {error}"

    # The user.

    def _show(self, line: lines.FromCoordinator) -> events.TerminalLost | None:
        if isinstance(line, lines.Planned):
            self._hooks.start(line.hooks)
        try:
            self._screen.show(line)
        except OSError:
            return events.TerminalLost()
        return None

    def _end(self) -> None:
        """End all processes at the same time."""
        self._selector.close()
        self._perform(self._supervisor.shutdown())
        for agent in self._agents.values():
            agent.process.close_input()
        if self._coordinator:
            self._coordinator.close_input()
        for agent in self._agents.values():
            agent.finish(self._timings.exit)
        if self._coordinator:
            self._coordinator.wait(self._timings.exit)


def _read_signals(source: SignalSocket) -> Iterator[Event]:
    numbers = source.read()
    if _NOTICE in numbers:
        yield lines.SaveRequest()
    for _ in filter(ENDS.__contains__, numbers):
        yield lines.Interrupt()


def _is_interrupted(source: SignalSocket) -> bool:
    """Return whether a signal to stop has been received since the last reading."""
    try:
        return bool({*source.read()} & {*ENDS})
    except BlockingIOError:
        return False


def _is_local(address: str) -> bool:
    """Return whether an address belongs to this host."""
    try:
        return bool(address and interfaces.resolve_local(address))
    except OSError:
        return False


def run(prepared: PreparedRun, view: Style, agents: Sequence[RemoteAgent]) -> int:
    """Run a job to its end; return the exit status."""
    try:
        launch = Launch(prepared, agents, view)
    except BaseException:
        prepared.undo.close()
        raise
    verdict = launch.run()
    # The job has ended: an interrupt changes nothing. A second one ends a wait for the terminal.
    with suppress(KeyboardInterrupt), deferred_interrupt(ENDS):
        launch.finish(verdict)
        with suppress(OSError):  # no process completes them any more, and they may be large
            prepared.run_dir.checkpoints.remove_leftovers()
            prepared.run_dir.remove_partial_files()
        prepared.close(verdict, began=launch.has_begun)
    return verdict.exit_status


def check_current_folder() -> None:
    """Raise UsageError if the current folder was removed: math libraries of torch abort there."""
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(
            f"the current folder is gone: {error.strerror}; change to another one"
        ) from None


def check_surroundings(job_file: Path) -> None:
    """Reject a job without a current folder, or whose file is a pipe, before paths are resolved.

    A pipe that a shell makes, as for ``<(…)``, has no path.
    """
    check_current_folder()
    with suppress(OSError):  # check_job_file() reports it
        if job_file.is_fifo():  # it might have no writer, and each process reads the file
            raise UsageError(f"job file {job_file}: it is a pipe; give the path of a Python file")


def check_job_file(path: Path) -> None:
    """Compile the job file without running it, so that a mistake starts no process."""
    check_surroundings(path)
    try:
        source = path.read_bytes()
        if path.suffix != ".py":
            raise UsageError(f"job file {path}: not a Python file; its name must end in .py")
        compile(source, str(path), "exec")
    except OSError as error:
        raise UsageError(
            f"job file {path}: {error.strerror}; give the path of a Python file"
        ) from None
    except SyntaxError as error:
        marked = f"\n    {error.text.strip()}" if error.text else ""
        line = f", line {error.lineno}" if error.lineno else ""
        raise UsageError(f"job file {path}{line}: {error.msg}{marked}") from None
    except ValueError as error:
        raise UsageError(f"job file {path}: not Python source: {error}") from None


def default_stages(replicas: int) -> int:
    """Return the number of stages for this host's accelerators.

    Raises:
        UsageError: it has none.
        PipeworkerError: torch cannot be imported.
    """
    # A user's module in the current folder must not be imported in place of torch's.
    code = "import sys; sys.path[:1] == [''] and sys.path.pop(0); import torch; "
    code += "print(f'\\n{torch.accelerator.device_count()}')"
    line = [sys.executable, "-c", code]
    answer = subprocess.run(line, capture_output=True, text=True, errors="replace")
    if answer.returncode:
        reason = [describe_exit(answer.returncode), *answer.stderr.splitlines()][-1]
        raise PipeworkerError(
            f"--stages: torch cannot be imported to count accelerators: {reason}; "
            f"{sys.executable} -c 'import torch' shows where"
        )
    # A sitecustomize or an extension of torch may print other text.
    count = next((int(n) for n in reversed(answer.stdout.splitlines()) if n.isdecimal()), 0)
    if not count:
        raise UsageError("--stages: this host has no accelerator; specify the number of stages")
    return max(1, count // max(1, replicas))
