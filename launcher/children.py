"""Processes of the launcher's own: the coordinator, and the agents of hosts, however reached."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Generic
from urllib.parse import urlsplit

from launcher.spec import Carried
from pipeworker.environment import facts
from pipeworker.host.lifetime import kill_group
from pipeworker.record.rundir import RunDir, digest
from pipeworker.session.processes import Heard, LineProcess, Said, fork_server
from pipeworker.wire import interfaces
from pipeworker.wire.lines import Forked, FromForkServer, Here, ToForkServer

Clock = Callable[[], float]
_LAST_WORDS = 2000
_LOOPBACK = "127.0.0.1"
_EVERYWHERE = ("0.0.0.0", "::")


class Child(Generic[Said, Heard]):
    """A process, and when it was last heard of.

    Args:
        name: what it is called when it does not answer.
        patience: seconds it may be silent; its first word may take `start` seconds.
        clock: by which it is.
    """

    def __init__(
        self,
        process: LineProcess[Said, Heard],
        name: str,
        patience: float,
        start: float,
        clock: Clock,
    ) -> None:
        self.process = process
        self._name = f"{name} (pid {process.pid})"
        self._patience = patience
        self._start = start
        self._clock = clock
        self._heard: float | None = None
        self._began = clock()

    def hear(self) -> tuple[list[Heard], bool]:
        self._heard = self._clock()
        return self.process.hear()

    def goes_on_starting(self) -> None:
        """What it has said, it said before it was ready: the next word may take as long again."""
        self._heard, self._began = None, self._clock()

    @property
    def has_spoken(self) -> bool:
        return self._heard is not None

    def silence(self, now: float) -> str:
        """What to say of it when by then it has not been heard of for too long, else nothing."""
        since, limit = self._heard, self._patience
        if since is None:
            since, limit = self._began, self._start
        if now - since <= limit:
            return ""
        return f"{self._name} has not answered for {limit:g} s"


class Agent:
    """The fork server of a host, which may be started again.

    Args:
        log: what a carrier says beside the lines goes there.
        patience: seconds that it may be silent, and is tried to be started again when it is lost.
        start: seconds that its first word may take.
        clock: by which it is silent.

    Attributes:
        called: what its host is called.
        ranks: that were given to it, of this generation; `pids`, of those that run.
        here: what it said of its host, if that is another one.
        lost: whether it is.
        may_try: whether it may be started again at once, even if it does not come back.
    """

    def __init__(
        self, carried: Carried, log: Path, patience: float, start: float, clock: Clock
    ) -> None:
        self.carried = carried
        self.called = f"host {carried.host.name}" if carried.line else "this host"
        self.name = f"the fork server of {self.called}"
        self.ranks: set[int] = set()
        self.pids: dict[int, int] = {}
        self.here: Here | None = None
        self.lost = False
        self.may_try = False
        self._address = _LOOPBACK
        self._log, self._patience, self._start, self._clock = log, patience, start, clock
        self._silence = ""
        self._errors: IO[bytes] | None = None
        self._said_before = 0
        self._worked = False
        self._since: float | None = None
        self.start()

    def start(self) -> None:
        """Start it, for the first time or in the place of one that was lost.

        Raises:
            PipeworkerError: it cannot be started.
            OSError: its log cannot be opened.
        """
        line = self.carried.line
        if line:
            self._errors = self._log.open("ab")
            self._said_before = self._errors.tell()
        process: LineProcess[ToForkServer, FromForkServer] = fork_server(line, self._errors)
        self.child = Child(process, self.name, self._patience, self._start, self._clock)
        self.lost = self.may_try = False
        self._silence, self._worked = "", False

    @property
    def process(self) -> LineProcess[ToForkServer, FromForkServer]:
        return self.child.process

    @property
    def places(self) -> int:
        """Workers that its host takes now."""
        return 0 if self.lost else self.carried.host.workers

    @property
    def comes_back(self) -> bool:
        """Whether it is so short a time since its host was at work that another try is worth it."""
        return self._since is not None and time.monotonic() - self._since < self._patience

    def endpoint(self, endpoint: str) -> str:
        """How its workers reach the coordinator, which listens there."""
        url = urlsplit(endpoint)
        if url.hostname not in _EVERYWHERE:
            return endpoint
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"{url.scheme}://{host}:{url.port}"

    def sees(self, callers: Sequence[str]) -> None:
        """By which address of the launcher's, of those that hosts see, its workers reach it."""
        caller = self.here.caller if self.here else ""
        self._address = caller if _crosses(caller) else next(filter(_crosses, callers), _LOOPBACK)

    def meets(self, here: Here, run_dir: RunDir, job_file: str) -> str:
        """Its host has answered; returns why it is no good, or nothing."""
        self.here = here
        self.child.goes_on_starting()  # it imports torch now
        name, ours = self.carried.host.name, facts()["versions"]
        theirs = {"pipeworker": here.pipeworker, "python": here.python, "torch": here.torch}
        for what, version in theirs.items():
            if version != ours[what]:
                has = f"{what} {version}" if version else f"no {what}"
                return f"host {name} has {has}, and this host {ours[what]}"
        if here.job != digest(Path(job_file)):
            there = "has another" if here.job else "has no"
            return f"host {name} {there} {job_file}: share its folder, or send it with --sync"
        if here.run != digest(run_dir.run):
            return (
                f"host {name} does not see the run directory {run_dir.path}: it must be on a file "
                "system that all hosts share (--run-dir)"
            )
        return ""

    def forked(self, event: Forked) -> None:
        """A worker runs."""
        self.pids[event.rank] = event.pid
        self._worked, self._since = True, None

    def give_up(self, silence: str) -> None:
        """It does not answer; its end shows in what is heard of it."""
        self._silence = silence
        self.process.kill()

    def ended(self, leave: float) -> tuple[bool, str]:
        """It has: returns whether it was at work, and what to say of it."""
        self.lost = True
        code = self.process.finish(leave)
        if not self.carried.line:
            # The kernel kills the workers when their server dies, but not what they started.
            for pid in self.pids.values():
                kill_group(pid)
        self.pids.clear()
        if self._worked:
            self._since = time.monotonic()
        why = self._silence or self._last_words()
        if not self.carried.line:
            return self._worked, why or f"{self.name} was killed"
        how = why or (f"it was ended by signal {-code}" if code < 0 else f"it exited with {code}")
        return self._worked, f"{self.called} is lost: {how}"

    def _last_words(self) -> str:
        """What its carrier said last, as ssh does of a host that it cannot reach."""
        if self._errors is None:
            return ""
        self._errors.close()
        self._errors = None
        with self._log.open("rb") as file:
            file.seek(self._said_before)
            said = file.read()[-_LAST_WORDS:].decode(errors="replace").strip().splitlines()
        return said[-1].strip() if said else ""

    def close(self) -> None:
        """Let it end its workers, and end."""
        if self.lost:
            return
        if not self.child.has_spoken:  # it imports torch: it has no workers, and hears nothing
            self.process.kill()
        self.process.hang_up()

    def finish(self, leave: float) -> None:
        """Wait until it has."""
        if not self.lost:
            self.process.finish(leave)
        if self._errors is not None:
            self._errors.close()


def meeting_place(callers: Sequence[str], is_ours: Callable[[str], bool] | None = None) -> str:
    """Where the coordinator listens: the address by which hosts see this one.

    That is everywhere when they see several, or one that another machine translates.

    Args:
        callers: by host, what each sees; empty or loopback where it is this one.
        is_ours: whether an address is of this host.
    """
    is_ours = is_ours or _is_ours
    seen = sorted({caller for caller in callers if _crosses(caller)})
    if not seen:
        return _LOOPBACK
    if len(seen) == 1 and is_ours(seen[0]):
        return seen[0]
    return "::" if any(":" in caller for caller in seen) else "0.0.0.0"


def _is_ours(address: str) -> bool:
    try:
        return bool(interfaces.ours(address))
    except OSError:
        return False


def _crosses(address: str) -> bool:
    """Whether it leads to a host from others."""
    return bool(address) and not ipaddress.ip_address(address).is_loopback
