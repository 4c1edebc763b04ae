"""Real jobs: the command, its processes, sockets and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pipeworker.record.checkpoint.checkpoint import Checkpoint
from support.in_process.checkpoints import optimizer_state
from support.processes.forked import MODULE, Forked, Server
from support.processes.interpreter import SERVER, take_terminal
from support.real_jobs.sources import JOB

_STARTUP = Path(__file__).with_name("startup")
_MODULES = {
    "coordinator.service": "coordinator",
    "host.agent": "agent",
    "worker.hooks": "hooks",
}
COMMAND = [sys.executable, "-m", "pipeworker"]

Process = subprocess.Popen[str] | Forked


@dataclass(frozen=True)
class Record:
    """A run directory; each of its files is read once, as it is then."""

    path: Path

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").open()]

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "evaluation.jsonl").open()]

    @cached_property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return loaded

    @cached_property
    def plan(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / "plan.json").read_text())
        return loaded

    def log(self, name: str) -> str:
        return (self.path / "logs" / f"{name}.log").read_text()

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The last checkpoint."""
        *_, path = sorted((self.path / "checkpoints").glob("step-*"))
        return Checkpoint(path)

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.checkpoint.weights()

    @cached_property
    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        return optimizer_state(self.checkpoint.path)


@dataclass(frozen=True)
class Run(Record):
    """A finished job."""

    status: int
    stdout: str
    stderr: str


class Jobs:
    """A folder of the test's own, into which it writes job files and where it runs them.

    Processes are forked by a server that has imported torch; *cold* ones are interpreters of their
    own, for what is about the start of one, its command line or its environment as others see it.
    """

    def __init__(self, folder: Path, server: Server | None) -> None:
        self.folder = folder
        self.server = server
        self._started: list[Process] = []
        self._count = 0

    def write(self, source: str, name: str = "job.py") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    @property
    def forking(self) -> dict[str, str]:
        """The environment of an interpreter that has its coordinator and agent forked."""
        if self.server is None:
            return dict(os.environ)
        path = [str(_STARTUP), str(_STARTUP.parents[2]), os.environ.get("PYTHONPATH", "")]
        name = self.server.address.decode().removeprefix("\0")
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), SERVER: name}

    def python(
        self,
        *words: str,
        folder: Path | None = None,
        env: Mapping[str, str] | None = None,
        cold: bool = False,
        namespace: str = "",
        terminal: int | None = None,
        stdin: int = subprocess.DEVNULL,
        prefix: Sequence[str] = (),
    ) -> Process:
        """Start an interpreter with these words.

        Args:
            namespace: of the network.
            prefix: words of a command that starts a cold interpreter, such as ``unshare --fork``.
            terminal: to be its controlling terminal and all its streams.
        """
        line = [*prefix, sys.executable, *words]
        streams: dict[str, Any] = {
            "stdin": stdin,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        if terminal is not None:
            streams = dict.fromkeys(streams, terminal)
        process: Process
        if cold or self.server is None:
            folder = folder or self.folder
            if namespace:
                line = ["ip", "netns", "exec", namespace, *line]
            if terminal is not None:
                streams["preexec_fn"] = take_terminal
            process = subprocess.Popen(line, cwd=folder, env=env, text=True, **streams)
        else:
            place: dict[str, Any] = {"cwd": folder or self.folder, "namespace": namespace}
            process = self.server.start(line, env=env, **place, **streams)
        self._started.append(process)
        return process

    def pipeworker(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        process = self.python(*COMMAND[1:], *words, **options)
        stdout, stderr = process.communicate(timeout=90)
        assert process.returncode is not None
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def start(self, *words: str, source: str = JOB, **options: Any) -> tuple[Process, Path]:
        """Start ``pipeworker launch WORDS job.py``; return the process and its run directory."""
        job_file = self.write(source)
        self._count += 1
        run_dir = self.folder / f"run-{self._count}"
        line = [*COMMAND[1:], "launch", "--run-dir", str(run_dir)]
        line += [*_before(words), str(job_file), *_after(words)]
        return self.python(*line, **options), run_dir

    def run(self, *words: str, source: str = JOB, timeout: float = 90, **options: Any) -> Run:
        """Run a job to its end."""
        return ended(*self.start(*words, source=source, **options), None, timeout)

    def train(self, *words: str, source: str = JOB, **options: Any) -> Run:
        """Run a job that must succeed."""
        run = self.run(*words, source=source, **options)
        assert run.status == 0, run.stderr
        return run

    def outputs(self) -> Iterator[tuple[str, str]]:
        """End all processes; yield the names and texts of their errors and logs."""
        for number, process in enumerate(self._started):
            with suppress(Exception):  # a test may have closed a stream, or read it
                process.kill()
                _, stderr = process.communicate(timeout=5)
                yield f"standard error of process {number}", stderr
        for log in sorted(self.folder.rglob("*.log")):
            yield f"last lines of {log.relative_to(self.folder)}", log.read_text()[-3000:]

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()


Reference = Callable[..., Record]
"""The type of the fixture `reference`, called as :meth:`Jobs.train`."""


def _before(words: tuple[str, ...]) -> list[str]:
    return list(words[: words.index("--")] if "--" in words else words)


def _after(words: tuple[str, ...]) -> list[str]:
    return list(words[words.index("--") :] if "--" in words else ())


def ended(process: Process, path: Path, status: int | None = 0, seconds: float = 60.0) -> Run:
    """Wait for the end of a launcher; return its run, which must have this status if any."""
    stdout, stderr = process.communicate(timeout=seconds)
    assert process.returncode is not None
    assert process.returncode == status or status is None, stdout + stderr
    return Run(path, process.returncode, stdout, stderr)


def steps_of(path: Path) -> int:
    """Return the number of steps that a run has recorded so far."""
    metrics = path / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def role_of(line: str) -> str:
    """Return what a process of :func:`processes_of` is: ``agent``, ``reader``, ...; else empty.

    The workers of an agent that is an interpreter are like it.
    """
    name, _, command = line.partition("\n")
    if name in ("coordinator", "agent", "hooks", "reader", "watcher"):
        return name
    command = command.partition(MODULE)[0]  # the test server's own has all names
    return next((role for module, role in _MODULES.items() if module in command), "")


def pids_of(folder: Path, role: str) -> list[int]:
    """Return the processes in a folder that have a role."""
    return sorted(pid for pid, line in processes_of(folder).items() if role_of(line) == role)


def processes_of(folder: Path) -> dict[int, str]:
    """Return the names and command lines of the processes that work in a folder (Linux), by pid.

    A forked one has the command line of the process that forked it, and a name of its own.
    """
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 (polled: in a fifth)
        try:
            if f"{os.readlink(f'/proc/{entry}/cwd')}/".startswith(f"{folder}/"):  # noqa: PTH115
                process = Path("/proc", entry)
                line = (process / "cmdline").read_bytes().decode(errors="replace")
                found[int(entry)] = (process / "comm").read_text() + line
        except OSError:
            continue  # it has ended meanwhile
    return found


def cpu_seconds(pid: int) -> float:
    """Return the seconds of CPU that a process has used (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until(
    condition: Callable[[], Any],
    seconds: float = 60.0,
    *,
    pause: float = 0.02,
    explain: Callable[[], str] = str,
) -> Any:
    """Poll until `condition` is true; return its value.

    Args:
        condition: what to wait for.
        seconds: the time limit.
        pause: the seconds between two polls.
        explain: returns what a failure shows besides the time limit.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not so within {seconds:g} s\n{explain()}"
        time.sleep(pause)
    return value
