"""Faults that are done to a job, and how it comes back from each."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeworker.plan.actions import Action, parse_actions
from support.besieged import Besieged, Held, held
from support.jobs import Run, until
from support.traps import STATUS, Sprung

KILLED = "SIGKILL of a worker"


@dataclass(frozen=True)
class Fault:
    """What is to happen: `how`, `where`, and what it counts as."""

    kind: str
    how: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.how} at {self.where})"


@dataclass(frozen=True)
class Came:
    """How the job came back from a loss.

    Attributes:
        seconds: from the fault, or the last step before the loss, to the next that is done.
        repeated: steps that were done again.
    """

    kind: str
    seconds: float
    repeated: int


TIMEOUT = 3.0
"""Seconds that a worker may be silent."""
_MANY = 16
"""Faults that a process must have outlived to say whether it grows."""
COMMITS = ("before manifest.json", "after manifest.json", "committed", "removing")
"""Where a coordinator is in a commit."""
RECOVERS = ("tell Again", "sent Welcome", "tell Joined", "sent Plan", "tell Planned")
"""Where it is on the way back from a loss."""
BEGINS = "tell Bound"
_COMPUTES = re.compile(r"\d[FRBIW](\d)")


def _nothing() -> None:
    """What comes by itself needs."""


class Siege:
    """One job, and what is done to it.

    Args:
        disk: a small one, for its checkpoints.
        pause: seconds between two faults, at most.
    """

    def __init__(
        self, job: Besieged, chance: random.Random, disk: Path | None, pause: float
    ) -> None:
        self.job, self._chance, self._disk, self._pause = job, chance, disk, pause
        self._asked = 0.0
        self.fired: Counter[str] = Counter()
        self.came: list[Came] = []
        self.held: dict[tuple[str, int], list[Held]] = {}
        self.missed: list[str] = []
        self._lines = self._logged = 0  # when the fault began
        self._ways: dict[str, Callable[[Fault], None]] = {
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
            "end": self._end,
        }

    def start(self) -> None:
        """Begin, and train some steps."""
        self.job.start("--worker-timeout", f"{TIMEOUT:g}")
        self.job.until(lambda: self.job.plan)
        if self._disk is not None:
            (self.job.path / "checkpoints").symlink_to(self._disk)
        self.job.until(lambda: self.job.step >= 3)

    @property
    def actions(self) -> list[Action]:
        """That workers do in a step."""
        lines = self.job.plan["actions"][1:]
        return [action for line in lines for action in parse_actions(line.partition(": ")[2])]

    def do(self, fault: Fault) -> None:
        """Have it happen, and the job come back; nothing of before may be left then."""
        self._lines, self._logged = len(self.job.lines), len(self._log)
        try:
            self._ways[fault.how](fault)
            until(lambda: not self.job.strays(), 10)
        except AssertionError as error:
            said = "\n".join([*self._log[self._logged :], *self.job.strays()])
            raise AssertionError(f"{fault}: {error}\n{said}") from error
        self.fired[fault.kind] += 1
        self.job.traps.clear()
        for who, pid in self.job.pids.items():
            if not who.startswith("stage"):
                self.held.setdefault((who, pid), []).append(held(pid))
        time.sleep(self._chance.uniform(0, self._pause))

    @property
    def _log(self) -> list[str]:
        return (self.job.path / "logs" / "coordinator.log").read_text().splitlines()

    def _lost(self, pattern: str) -> None:
        """That the loss of such a worker is on record."""
        lines = [line for line in self._log[self._logged :] if " INFO lost: " in line]
        assert any(re.search(pattern, line) for line in lines), (pattern, lines)

    def _poked(self, condition: Callable[[], Any], poke: Callable[[], None]) -> Any:
        """Wait for something that does not come by itself."""

        def tried() -> Any:
            poke()
            return condition()

        return self.job.until(tried)

    def _springs(self, place: str, poke: Callable[[], None] = _nothing) -> float:
        """Wait for somebody to come to a trap; returns when it was, of the monotonic clock."""
        sprung: Sprung = self._poked(lambda: self.job.traps.sprung(place), poke)
        assert sprung.count, f"nothing to do at {place}"
        return sprung.when

    def _save(self, apart: float = 0.5) -> None:
        """Ask for a checkpoint, again: one that is still being written leaves out the next."""
        now = time.monotonic()
        if now - self._asked > apart:
            self._asked = now
            os.kill(self.job.process.pid, signal.SIGUSR1)

    def _back(self, kind: str, when: float, *parts: str, waited: float = 0.0) -> None:
        """Wait until the job has said so of a loss, and has done a step."""
        line = self.job.said(self._lines, "warning: ", *parts)
        following = self.job.next_step(line)
        before = self.job.last_step(line)
        again = re.search(r"(\d+) steps? repeated", line.text)
        after = re.search(r"goes on after step (\d+)", line.text)
        repeated = before.step - int(after[1]) if after else int(again[1]) if again else 0
        seconds = following.when - max(when, before.when)
        self.came.append(Came(kind, seconds - waited, repeated))

    def _worker(self, fault: Fault) -> None:
        self.job.traps.set(fault.where, fault.how)
        when = self._springs(fault.where)
        self._back(fault.kind, when, "went on", waited=_waited(fault.how))
        self._lost(_expected(fault.how, fault.where))

    def _twice(self, fault: Fault) -> None:
        """A second fault, on the way back from a first one."""
        first, how = str(self._chance.choice(self.actions)), fault.how.removesuffix(" again")
        self.job.traps.set(fault.where, how)
        self.job.traps.set(first, "kill")
        self._springs(first)
        when = self._springs(fault.where)
        self._back(fault.kind, when, "went on", waited=_waited(how))
        self._lost(_expected("kill", first))
        self._lost(_expected(how, fault.where))
        self.fired[KILLED] += 1

    def _cut_control(self, fault: Fault) -> None:
        self.job.traps.set(fault.where, fault.how)
        self._springs(fault.where)
        step = self.job.step
        self.job.until(lambda: self.job.step > step + 3)

    def _orphan(self, fault: Fault) -> None:
        self.job.traps.set(fault.where, "kill parent")
        when = self._springs(fault.where, self._save)
        self._back(fault.kind, when, "went on")
        self._lost(rf"the worker of stage {_rank(fault.where)} was killed by signal 9")

    def _kill_writer(self, fault: Fault) -> None:
        self.job.traps.set(fault.where, "kill")
        self._springs(fault.where, self._save)
        self.job.said(self._lines, "warning: there is no checkpoint of step", "is gone")
        self._checkpoint()

    def _checkpoint(self) -> None:
        """There is a new one."""
        before = self.job.saved
        self._poked(lambda: self.job.saved > before, self._save)

    def _stop_writer(self, fault: Fault) -> None:
        self.job.traps.set(fault.where, "stop")
        self._springs(fault.where, self._save)
        rank = _rank(fault.where)
        when = time.monotonic()
        os.kill(self.job.pids[f"stage {rank}"], signal.SIGKILL)
        self._back(fault.kind, when, "went on")
        self._lost(rf"the worker of stage {rank} was killed by signal 9")

    def _fill(self, fault: Fault) -> None:
        if self._disk is None:
            self.missed.append(str(fault))
            return
        ballast = self._disk / "ballast"
        with pytest.raises(OSError, match="No space left"):
            ballast.write_bytes(bytes(8 << 20))
        said = "warning: there is no checkpoint of step"
        # The one that is due by itself, and no other: two that fail end the job.
        self.job.until(lambda: self.job.since(self._lines, said))
        ballast.unlink()
        self.job.said(self._lines, said, "No space left on device")
        self._checkpoint()

    def _coordinator(self, fault: Fault) -> None:
        how = fault.how.removesuffix(" coordinator")
        self.job.traps.set(fault.where, how)
        if first := self._first(fault.where):
            self.job.traps.set(first, "kill")
            self._springs(first)
        saves = fault.where in COMMITS
        when = self._springs(fault.where, self._save if saves else _nothing)
        what = "the coordinator was killed" if how == "kill" else "has not answered"
        self._back(fault.kind, when, what, "another one is started", waited=_waited(how))

    def _first(self, place: str) -> str:
        """Where somebody is to be lost, so that the coordinator comes to a place."""
        if place in RECOVERS:
            return str(self._chance.choice(self.actions))
        return "sent Advance" if place == BEGINS else ""

    def _agent(self, fault: Fault) -> None:
        """What was in memory goes with the fork server: the job goes back to what is on disk."""
        job, pid = self.job, self.job.pids["fork server"]
        said = "the fork server of this host was killed"
        if fault.where == "forking":
            job.traps.set("fork 2", "kill")
            job.traps.set(first := str(self._chance.choice(self.actions)), "kill")
            self._springs(first)
            when = self._springs("fork 2")
        else:
            when = time.monotonic()
            stops = fault.how == "stop agent"
            os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
            if stops:
                said = rf"the fork server of this host \(pid {pid}\) has not answered"
        self._back(fault.kind, when, "went on", waited=_waited(fault.how.split()[0]))
        self._lost(said)

    def _end(self, fault: Fault) -> None:
        """Whoever cannot be replaced."""
        job, pids, said, status = self.job, self.job.pids, "error: ", 1
        match fault.where:
            case "all but the launcher":
                for who in sorted(pids.keys() - {"launcher"}):
                    os.kill(pids[who], signal.SIGKILL)
            case "saving":
                place = "saving@1"
                job.traps.set(place, "kill")
                os.kill(pids["launcher"], signal.SIGINT)
                self._springs(place)
                said, status = "interrupted", 130
        assert job.end() == status
        assert job.since(self._lines, said)
        self.resume()

    def resume(self, *words: str) -> None:
        """Go on, with these options."""
        number = len(self.job.lines)
        self.job.resume(*words)
        self.job.until(lambda: any(line.step for line in self.job.lines[number:]))

    def go_over(self, *words: str) -> None:
        """Interrupt it, and go on with these options."""
        os.kill(self.job.process.pid, signal.SIGINT)
        assert self.job.end() == 130
        self.resume(*words)

    def finish(self) -> Run:
        """Kill the launcher, and let it come to an end then; returns the run."""
        os.kill(self.job.process.pid, signal.SIGKILL)
        assert self.job.end() == -signal.SIGKILL
        self.fired["launcher killed, --resume"] += 1
        self.job.resume("--steps", str(self.job.step + 5))
        assert self.job.end() == 0
        return self.job.run

    def report(self) -> None:
        """Print how often each fault was, and how long the job took to come back."""
        for kind, count in sorted(self.fired.items()):
            print(f"{count:6} {kind}")
        for kind in sorted({came.kind for came in self.came}):
            some = [came for came in self.came if came.kind == kind]
            print(f"{_quantiles([c.seconds for c in some])} {kind}", end=", ")
            print(f"{statistics.mean(c.repeated for c in some):.1f} steps repeated")
        print(f"{_quantiles([came.seconds for came in self.came])} all")

    def check_flat(self) -> None:
        """Of each process, the last quarter of its life holds what the second did."""
        for (who, pid), rows in self.held.items():
            if len(rows) < _MANY:
                continue
            quarter = len(rows) // 4
            early, late = (
                [statistics.median(values) for values in zip(*some, strict=True)]
                for some in (rows[quarter : 2 * quarter], rows[-quarter:])
            )
            print(f"{who} ({pid}), {len(rows)} faults: ", end="")
            print(f"{early[0] / 2**20:.1f} -> {late[0] / 2**20:.1f} MB", end=", ")
            print(f"{early[1]:g} -> {late[1]:g} descriptors, {early[2]:g} -> {late[2]:g} threads")
            assert late[0] <= 1.05 * early[0] + (1 << 20), who
            assert late[1] <= early[1] + 2, who
            assert late[2] <= early[2], who


def _quantiles(values: list[float]) -> str:
    """Median and 95th percentile."""
    values = sorted(values)
    late = values[min(len(values) - 1, int(0.95 * len(values)))]
    return f"{len(values):4} times, {statistics.median(values):5.2f} s, {late:5.2f} s:"


def _rank(name: str) -> int:
    """Of the worker whose file it is."""
    return int(name.split("-")[1]) - 1


def _waited(how: str) -> float:
    """Seconds until that is noticed."""
    return TIMEOUT if how == "stop" else 0.0


def _expected(how: str, place: str) -> str:
    """What is on record of a worker that is lost."""
    stage = place[-1] if "@" in place and place[0].isalpha() else place[0]
    if how == "raise":
        return rf"layer \d+ \(Dropout\) raised ConnectionError: .* \(stage {stage}, layer"
    if how == "cut data":
        return r"the channel .* closed"
    if how == "stop":
        return rf"stage {stage} \(pid \d+ on .*\) has not answered for {TIMEOUT:g} s"
    said = {
        "kill": "was killed by signal 9",
        "exit": f"exited with status {STATUS}",
        "terminate": "was ended by SIGTERM",
    }[how]
    where = rf" \(stage {stage}"
    if place.startswith("layer"):
        where += r", layer \d+ \(Dropout\), micro-batch \d, step \d+\)"
    elif (action := _COMPUTES.fullmatch(place)) and how != "terminate":
        where += rf", .*micro-batch {action[1]}, step \d+\)"
    return f"the worker of stage {stage} {said}{where}"
