"""The supervisor's view of the processes it watches: silence, losses, addresses. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from launcher.spec import RemoteAgent
from launcher.supervisor.events import AgentLine, CheckedHello
from pipeworker.coordinator.roster import JOIN_FACTOR
from pipeworker.facts.failure import describe_exit
from pipeworker.wire.lines import AgentHello, Forked, Starting, Waiting, WorkerExited

LOOPBACK = "127.0.0.1"
_EVERYWHERE = ("0.0.0.0", "::")
_START_FACTOR = 2 * JOIN_FACTOR
"""Workers that do not join are restarted once before the agent of a busy host is given up."""


@dataclass(slots=True)
class SilenceTimer:
    """The silence timeout of a process.

    Attributes:
        limit: seconds without a message after which the process is given up; `_START_FACTOR` times
            as long until its first message. In its start, an agent may use as much CPU time.
        since: when it was last received from, or started.
        pid: 0 until it is known.
        has_sent: whether it has sent anything since its start, except how it progresses.
        cpu_seconds: the CPU time that it has used in its start; 0 until it is reported.
    """

    name: str
    limit: float
    since: float
    pid: int = 0
    has_sent: bool = False
    cpu_seconds: float = 0.0

    def receive(self, line: AgentLine | None, now: float) -> None:
        """Record a message; a process that only reports that it stands still is silent."""
        if isinstance(line, Waiting):
            self.restart(now)
        elif not isinstance(line, Starting):
            self.since, self.has_sent = now, True
        elif self.cpu_seconds < line.cpu_seconds < _START_FACTOR * self.limit:
            self.since, self.cpu_seconds = now, line.cpu_seconds

    def restart(self, now: float) -> None:
        """Allow the time of a start until the next message."""
        self.since, self.has_sent, self.cpu_seconds = now, False, 0.0

    def expired(self, now: float, limit: float = 0.0) -> str:
        """Return an error message if the process has been silent for too long at `now`, else "".

        After its first message, `limit` is used instead of its own limit if it is longer.
        """
        if not self.has_sent:
            limit = 0.0 if self.cpu_seconds else _START_FACTOR * self.limit
        limit = max(limit, self.limit)
        if now - self.since <= limit:
            return ""
        if self.cpu_seconds and not self.has_sent:
            used = f"after {self.cpu_seconds:g} s of CPU time"
            return f"{self.name} (pid {self.pid}) stands still in its start {used} for {limit:g} s"
        return f"{self.name} (pid {self.pid}) has not answered for {limit:g} s"


@dataclass(slots=True)
class AgentState:
    """The agent of a host, which may be started again after a loss.

    Attributes:
        workers: its newest workers that have not ended, by rank.
        is_lost: whether its process has ended.
        may_retry: whether it is worth one attempt to start it again in this generation.
        silence: why it was given up: its silence, or a problem of its host; empty if it was not.
        waits_for: what its cluster waits for before it starts, as shown to the user.
    """

    remote: RemoteAgent
    timer: SilenceTimer
    workers: dict[int, Forked] = field(default_factory=dict)
    hello: CheckedHello | None = None
    is_lost: bool = False
    may_retry: bool = True
    silence: str = ""
    waits_for: str = ""
    _forked: bool = False  # a worker, since it was started
    _lost_at: float = float("-inf")  # after it had forked workers

    @staticmethod
    def of(remote: RemoteAgent, limit: float, now: float) -> AgentState:
        """Return the state of an agent that is being started."""
        return AgentState(remote, SilenceTimer(f"the agent of {remote.name}", limit, now))

    @property
    def places(self) -> int:
        """The number of workers its host takes now."""
        return 0 if self.is_lost else self.remote.host.workers

    def may_return(self, now: float) -> bool:
        """Return whether its host was lost so recently that further attempts are worth it."""
        return now - self._lost_at < self.timer.limit

    def restart(self, now: float) -> None:
        """Record that its process is being started again."""
        self.timer.restart(now)
        self.is_lost = self.may_retry = self._forked = False
        self.silence = self.waits_for = ""

    def forked(self, line: Forked) -> None:
        self.workers[line.rank] = line
        self._forked, self._lost_at = True, float("-inf")

    def exited(self, line: WorkerExited) -> None:
        """Record that a worker has ended, which is after its successor began if it was held."""
        worker = self.workers.get(line.rank)
        if worker is not None and worker.generation == line.generation:
            del self.workers[line.rank]

    def lose(self, code: int, last_line: str, now: float) -> tuple[bool, str]:
        """Record that its process has ended; return whether workers were lost, and the error."""
        self.is_lost = True
        self.workers.clear()
        if self._forked:
            self._lost_at = now
        if not self.remote.command:
            return self._forked, self.silence or f"{self.timer.name} {describe_exit(code)}"
        reason = self.silence or last_line or f"it {describe_exit(code)}"
        what = "is lost" if self.hello else "cannot be used"
        return self._forked, f"{self.remote.name} {what}: {reason}{self._hint(reason)}"

    def _hint(self, reason: str) -> str:
        """Return what to do about the words of a host's shell or interpreter, if it is known."""
        if "No module named" in reason:
            return "; install it there, or specify an interpreter that has it"
        if reason.startswith("env: "):  # ssh starts the interpreter by it
            return "; specify the Python of that host in --hosts-file"
        if "No such file or directory" in reason:
            return f"; {self.remote.remedy}"
        return ""

    def endpoint(self, endpoint: str, callers: Iterable[str]) -> str:
        """Return the endpoint to which its workers connect; the coordinator listens at `endpoint`.

        `callers` are the launcher's addresses that remote hosts see.
        """
        url = urlsplit(endpoint)
        if url.hostname not in _EVERYWHERE:
            return endpoint
        own = self.hello.caller if self.hello else ""
        address = next(filter(_is_reachable, [own, *callers]), LOOPBACK)
        host = f"[{address}]" if ":" in address else address
        return f"{url.scheme}://{host}:{url.port}"


def host_problem(
    remote: RemoteAgent, hello: AgentHello, own: AgentHello, job_file: str, run_dir: str
) -> str:
    """Return why a host whose versions or files are not this host's own cannot take part, or "".

    Two releases of Python that differ in the last number alone are taken for equal.
    """
    it = f"{remote.name}: it"
    for name in ("pipeworker", "python", "torch"):
        version, ours = getattr(hello, name), getattr(own, name)
        release = 2 if name == "python" else None
        if version.split(".")[:release] != ours.split(".")[:release] or not version:
            found = f"{name} {version}" if version else f"no {name}"
            return f"{it} has {found}, this host has {ours or 'none'}; install the same"
    if hello.job != own.job:
        found = "another" if hello.job else "no"
        return f"{it} has {found} {job_file}; {remote.remedy}"
    if hello.run != own.run:
        return (
            f"{it} does not see the run directory {run_dir}; specify one on a file system that all "
            "hosts share, with --run-dir"
        )
    return ""


def listen_address(callers: Mapping[str, bool]) -> str:
    """Return the address where the coordinator listens: the one that all hosts see.

    It is every address if hosts see several, or one that a router between them translates.
    `callers` are the launcher's addresses that hosts see, and whether each belongs to this host.
    """
    seen = sorted(filter(_is_reachable, callers))
    if not seen:
        return LOOPBACK
    if len(seen) == 1 and callers[seen[0]]:
        return seen[0]
    return "::" if any(":" in caller for caller in seen) else "0.0.0.0"


def _is_reachable(address: str) -> bool:
    """Return whether other hosts can connect to an address.

    It is empty, or UNKNOWN, if a host's connection is not over TCP (``ProxyCommand``).
    """
    try:
        return not ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
