"""Fault injection into a job, and the check that it recovers from each fault."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeworker.plan.actions import Action, parse_actions
from support.faults.failpoints import STATUS, Triggered
from support.faults.observed_job import ObservedJob
from support.faults.usage import Usage, check_flat, usage
from support.real_jobs.jobs import Record, until

KILLED = "SIGKILL of a worker"


@dataclass(frozen=True)
class Fault:
    """A fault: its kind for the report, how it is injected, and where."""

    kind: str
    how: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.how} at {self.where})"


@dataclass(frozen=True)
class Recovery:
    """A recovery of the job from a loss.

    Attributes:
        kind: the kind of the fault.
        seconds: from the fault, or from the last step before the loss, to the next step.
        repeated: steps that were repeated.
    """

    kind: str
    seconds: float
    repeated: int


TIMEOUT = 3.0
"""The worker timeout of the job, in seconds."""
_MIN_SAMPLES = 16
"""Faults that a process must have survived to check whether its memory grows."""
IN_COMMIT = ("before manifest.json", "after manifest.json", "committed", "removing")
"""Failpoints of the coordinator in a commit."""
IN_RECOVERY = ("send Restart", "sent Welcome", "send Joined", "sent Plan", "send Planned")
"""Failpoints of the coordinator in a recovery."""
AT_START = "send Bound"
_COMPUTES = re.compile(r"\d[FRBIW](\d)")


def _do_nothing() -> None:
    """Do nothing: the event occurs by itself."""


class FaultInjector:
    """Injects faults into one job.

    Args:
        job: the job.
        chance: the source of random choices.
        disk: a small disk for its checkpoints; None if there is none.
        pause: longest time between two faults, in seconds.

    Attributes:
        fired: the number of faults, by kind.
        recoveries: the recoveries so far.
        usage: the resources of each process after each fault.
        missed: faults that could not be injected.
    """

    def __init__(
        self, job: ObservedJob, chance: random.Random, disk: Path | None, pause: float
    ) -> None:
        self.job, self._chance, self._disk, self._pause = job, chance, disk, pause
        self._requested_at = 0.0
        self.fired: Counter[str] = Counter()
        self.recoveries: list[Recovery] = []
        self.usage: dict[tuple[str, int], list[Usage]] = {}
        self.missed: list[str] = []
        self._lines = self._logged = 0  # counts at the start of the fault
        self._methods: dict[str, Callable[[Fault], None]] = {
            **dict.fromkeys(("kill", "exit", "terminate", "stop", "raise"), self._worker),
            "kill again": self._twice,
            "stop again": self._twice,
            "cut control": self._cut_control,
            "cut data": self._worker,
            "orphan": self._orphan,
            "kill writer": self._kill_writer,
            "stop writer": self._stop_writer,
            "full": self._fill,
            "kill coordinator": self._coordinator,
            "stop coordinator": self._coordinator,
            "kill agent": self._agent,
            "stop agent": self._agent,
            "kill all": self._all,
            "suspend all": self._suspended,
            "kill to save": self._end,
        }

    def start(self) -> None:
        """Start the job and train some steps."""
        self.job.start("--worker-timeout", f"{TIMEOUT:g}")
        self.job.until(lambda: self.job.plan)
        if self._disk is not None:
            checkpoints = self.job.path / "checkpoints"  # a link is rejected
            checkpoints.mkdir(exist_ok=True)
            subprocess.run(["mount", "--bind", self._disk, checkpoints], check=True)
        self.job.until(lambda: self.job.step >= 3)

    @property
    def actions(self) -> list[Action]:
        """The actions of a step, of all workers."""
        lines = self.job.plan["actions"][1:]
        return [action for line in lines for action in parse_actions(line.partition(": ")[2])]

    @property
    def workers(self) -> int:
        """The number of workers in a replica."""
        return len(self.job.plan["actions"]) - 1

    def _stage(self, rank: int) -> str:
        """Return the first stage of a rank."""
        return f"{rank % self.workers}"

    def _name(self, rank: int) -> str:
        """Return the name of a rank in :attr:`ObservedJob.pids`."""
        replica = rank // self.workers
        return f"stage {self._stage(rank)}" + (f" of replica {replica}" if replica else "")

    def _at_stage(self, place: str) -> str:
        """Return a failpoint with the stage of its rank, if it names a rank."""
        where, at, rank = place.partition("@")
        return f"{where}@{self._stage(int(rank))}" if at and place[0].isalpha() else place

    def inject(self, fault: Fault) -> None:
        """Inject a fault and wait for the recovery; nothing of the lost processes may be left."""
        self._lines, self._logged = len(self.job.lines), len(self._log)
        try:
            self._methods[fault.how](fault)
            until(lambda: not self.job.leftovers())
        except AssertionError as error:
            text = "\n".join([*self._log[self._logged :], *self.job.leftovers()])
            raise AssertionError(f"{fault}: {error}\n{text}") from error
        self.fired[fault.kind] += 1
        self.job.failpoints.clear()
        for name, pid in self.job.pids.items():
            if not name.startswith("stage"):
                self.usage.setdefault((name, pid), []).append(usage(pid))
        time.sleep(self._chance.uniform(0, self._pause))

    @property
    def _log(self) -> list[str]:
        return (self.job.path / "logs" / "coordinator.log").read_text().splitlines()

    def _check_logged(self, pattern: str) -> None:
        """Check that the loss of such a worker is in the log."""
        lines = [line for line in self._log[self._logged :] if " INFO lost: " in line]
        assert any(re.search(pattern, line) for line in lines), (pattern, lines)

    def _poll(self, condition: Callable[[], Any], poke: Callable[[], None]) -> Any:
        """Wait for a condition, and call `poke` before each look."""

        def tried() -> Any:
            poke()
            return condition()

        return self.job.until(tried)

    def _wait_for(self, place: str, poke: Callable[[], None] = _do_nothing) -> float:
        """Wait until a failpoint triggers; return when, by the monotonic clock."""
        triggered: Triggered = self._poll(lambda: self.job.failpoints.triggered(place), poke)
        assert triggered.count, f"the fault at {place} had no effect"
        return triggered.when

    def _save(self, apart: float = 0.5) -> None:
        """Request a checkpoint repeatedly: one is skipped while another is written."""
        now = time.monotonic()
        if now - self._requested_at > apart:
            self._requested_at = now
            os.kill(self.job.process.pid, signal.SIGUSR1)

    def _recovered(self, kind: str, when: float, *parts: str, waited: float = 0.0) -> None:
        """Wait until the job has reported a recovery with these words and has run a step."""
        line = self.job.wait_for_line(self._lines, "warning: ", *parts)
        following = self.job.next_step(line)
        before = self.job.last_step(line)
        found = re.search(r"(\d+) steps? repeated", line.text)
        repeated = int(found[1]) if found else 0
        seconds = following.when - max(when, before.when)
        self.recoveries.append(Recovery(kind, seconds - waited, repeated))

    def _worker(self, fault: Fault) -> None:
        self.job.failpoints.set(fault.where, fault.how)
        when = self._wait_for(fault.where)
        self._recovered(fault.kind, when, "resumed after", waited=_waited(fault.how))
        self._check_logged(_expected(fault.how, self._at_stage(fault.where)))

    def _twice(self, fault: Fault) -> None:
        """Inject a second fault into the recovery from a first one."""
        first, how = str(self._chance.choice(self.actions)), fault.how.removesuffix(" again")
        self.job.failpoints.set(fault.where, how)
        self.job.failpoints.set(first, "kill")
        self._wait_for(first)
        when = self._wait_for(fault.where)
        self._recovered(fault.kind, when, "resumed after", waited=_waited(how))
        self._check_logged(_expected("kill", first))
        self._check_logged(_expected(how, self._at_stage(fault.where)))
        self.fired[KILLED] += 1

    def _cut_control(self, fault: Fault) -> None:
        self.job.failpoints.set(fault.where, fault.how)
        self._wait_for(fault.where)
        step = self.job.step
        self.job.until(lambda: self.job.step > step + 3)

    def _orphan(self, fault: Fault) -> None:
        self.job.failpoints.set(fault.where, "kill parent")
        when, rank = self._wait_for(fault.where, self._save), _rank(fault.where)
        self._recovered(fault.kind, when, "resumed after")
        self._check_logged(rf"the worker of {_worker(self._stage(rank))} was killed by SIGKILL")

    def _kill_writer(self, fault: Fault) -> None:
        """Another process writes the files if the one that was killed had written some before."""
        self.job.failpoints.set(fault.where, "kill")
        self._wait_for(fault.where, self._save)
        before, text = self.job.saved, ("warning: the checkpoint of step", "is gone")
        self.job.until(lambda: self.job.saved > before or self.job.find_line(self._lines, *text))
        self._checkpoint()

    def _checkpoint(self) -> None:
        """Wait for a new checkpoint."""
        before = self.job.saved
        self._poll(lambda: self.job.saved > before, self._save)

    def _stop_writer(self, fault: Fault) -> None:
        self.job.failpoints.set(fault.where, "stop")
        self._wait_for(fault.where, self._save)
        rank = _rank(fault.where)
        when = time.monotonic()
        os.kill(self.job.pids[self._name(rank)], signal.SIGKILL)
        self._recovered(fault.kind, when, "resumed after")
        self._check_logged(rf"the worker of {_worker(self._stage(rank))} was killed by SIGKILL")

    def _fill(self, fault: Fault) -> None:
        if self._disk is None:
            self.missed.append(str(fault))
            return
        ballast = self._disk / "ballast"
        with pytest.raises(OSError, match="No space left"):
            ballast.write_bytes(bytes(8 << 20))
        text = "warning: the checkpoint of step"
        # Only the periodic checkpoint may fail: two failures in a row end the job.
        self.job.until(lambda: self.job.find_line(self._lines, text))
        ballast.unlink()
        self.job.wait_for_line(self._lines, text, "No space left on device")
        self._checkpoint()

    def _coordinator(self, fault: Fault) -> None:
        how = fault.how.removesuffix(" coordinator")
        self.job.failpoints.set(fault.where, how)
        if first := self._prerequisite(fault.where):
            self.job.failpoints.set(first, "kill")
            self._wait_for(first)
        saves = fault.where in IN_COMMIT
        when = self._wait_for(fault.where, self._save if saves else _do_nothing)
        what = "the coordinator was killed" if how == "kill" else "has not answered"
        self._recovered(fault.kind, when, what, "resumed after", waited=_waited(how))

    def _prerequisite(self, place: str) -> str:
        """Return the failpoint of a first loss that makes the coordinator reach `place`, if any."""
        if place in IN_RECOVERY:
            return str(self._chance.choice(self.actions))
        return "sent Advance" if place == AT_START else ""

    def _agent(self, fault: Fault) -> None:
        """Lose the agent and the memory it holds: the job resumes from the disk."""
        job, pid = self.job, self.job.pids["agent"]
        text = "the agent of this host was killed"
        if fault.where.startswith("fork "):
            job.failpoints.set(fault.where, "kill")
            job.failpoints.set(first := str(self._chance.choice(self.actions)), "kill")
            self._wait_for(first)
            when = self._wait_for(fault.where)
        else:
            when = time.monotonic()
            stops = fault.how == "stop agent"
            os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
            if stops:
                text = rf"the agent of this host \(pid {pid}\) has not answered"
        self._recovered(fault.kind, when, "resumed after", waited=_waited(fault.how.split()[0]))
        self._check_logged(text)

    def _all(self, fault: Fault) -> None:
        """Kill everything except the launcher: the job resumes from the disk."""
        when = time.monotonic()
        for name, pid in self.job.pids.items():
            if name != "launcher":
                os.kill(pid, signal.SIGKILL)
        self._recovered(fault.kind, when, "resumed after")

    def _suspended(self, fault: Fault) -> None:
        """Suspend and continue all processes, then kill the agent and the coordinator at once."""
        pids = self.job.pids
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids.values():
                os.kill(pid, number)
        when = time.monotonic()
        for name in self._chance.sample(["agent", "coordinator"], 2):
            os.kill(pids[name], signal.SIGKILL)
        self._recovered(fault.kind, when, "resumed after")

    def _end(self, fault: Fault) -> None:
        """Kill a worker that saves before an interrupted job ends, then resume the job."""
        self.job.failpoints.set(fault.where, "kill")
        os.kill(self.job.process.pid, signal.SIGINT)
        self._wait_for(fault.where)
        assert self.job.end() == 130
        assert self.job.find_line(self._lines, "interrupted")
        self.resume()

    def resume(self, *words: str) -> None:
        """Resume the run with these options, and wait for a step."""
        number = len(self.job.lines)
        self.job.resume(*words)
        self.job.until(lambda: any(line.step for line in self.job.lines[number:]))

    def restart_with(self, *words: str) -> None:
        """Interrupt the job, and resume it with these options."""
        os.kill(self.job.process.pid, signal.SIGINT)
        assert self.job.end() == 130
        self.resume(*words)

    def finish(self) -> Record:
        """Kill the launcher, resume the run, let it finish, and return it."""
        os.kill(self.job.process.pid, signal.SIGKILL)
        assert self.job.end() == -signal.SIGKILL
        self.fired["launcher killed, --resume"] += 1
        self.job.resume("--steps", str(self.job.step + 5))
        self.succeed()
        return self.job.run

    def succeed(self) -> None:
        """Wait until the job has ended with success."""
        assert self.job.end() == 0, self.job.lines[-5:]

    def report(self) -> None:
        """Print the number of faults of each kind, and how long the recoveries took."""
        for kind, count in sorted(self.fired.items()):
            print(f"{count:6} {kind}")
        for kind in sorted({one.kind for one in self.recoveries}):
            found = [one for one in self.recoveries if one.kind == kind]
            print(f"{_quantiles([c.seconds for c in found])} {kind}", end=", ")
            print(f"{statistics.mean(c.repeated for c in found):.1f} steps repeated")
        print(f"{_quantiles([one.seconds for one in self.recoveries])} all")

    def check_flat(self) -> None:
        """Check that no process grows."""
        for (name, pid), rows in self.usage.items():
            if len(rows) >= _MIN_SAMPLES:
                check_flat(f"{name} ({pid})", rows, 1.05, 1 << 20)


def _quantiles(values: list[float]) -> str:
    """Return the count, the median and the 95th percentile as text."""
    values = sorted(values)
    late = values[min(len(values) - 1, int(0.95 * len(values)))]
    return f"{len(values):4} times, {statistics.median(values):5.2f} s, {late:5.2f} s:"


def _rank(name: str) -> int:
    """Return the rank of the worker that writes a file."""
    return int(name.split("-")[1]) - 1


def _waited(how: str) -> float:
    """Return the seconds until such a fault is noticed."""
    return TIMEOUT if how == "stop" else 0.0


def _expected(how: str, place: str) -> str:
    """Return the pattern by which the log names a lost worker.

    Args:
        how: the fault.
        place: its failpoint, which names a stage.
    """
    stage = place[-1] if "@" in place and place[0].isalpha() else place[0]
    if how == "raise":
        return (
            rf"layer \d+ \(.*\) raised ConnectionError: .* \(stage {stage}( of replica \d)?, layer"
        )
    if how == "cut data":
        return r"the channel .* closed"
    if how == "stop":
        return rf"{_worker(stage)} \(pid \d+ on .*\) has not answered for {TIMEOUT:g} s"
    text = {
        "kill": "was killed by SIGKILL",
        "exit": f"exited with status {STATUS}",
        "terminate": "was ended by SIGTERM",
    }[how]
    where = ""
    if place.startswith("layer"):
        where = r" \((stage \d, )?layer \d+ \(.*\), micro-batch \d, step \d+\)"
    elif (action := _COMPUTES.fullmatch(place)) and how != "terminate":
        where = rf" \((stage \d, )?(layer .*, )?micro-batch {action[1]}, step \d+\)"
    return f"the worker of {_worker(stage)} {text}{where}"


def _worker(stage: str) -> str:
    """Return the pattern by which the log names a worker that holds a stage."""
    return rf"stages?( \d,)* {stage}(, \d)*( of replica \d)?"
