"""Jobs run for real: the command, its processes, its sockets, its files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

COMMAND = [sys.executable, "-m", "pipeworker"]

JOB = """
    import torch
    from torch import nn

    def model():
        return nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
        )

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.1)

    def data():
        generator = torch.Generator().manual_seed(7)
        for _ in range(6):
            x = torch.randn(10, 8, generator=generator)
            yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
"""
"""A small job of five layers and six mini-batches of ten samples."""


@dataclass(frozen=True)
class Run:
    """A finished job."""

    status: int
    stdout: str
    stderr: str
    path: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").open()]

    @property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return loaded

    @property
    def plan(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / "plan.json").read_text())
        return loaded

    def log(self, name: str) -> str:
        return (self.path / "logs" / f"{name}.log").read_text()

    def parts(self) -> list[dict[str, Any]]:
        """What the stages saved at the end, by stage."""
        (checkpoint,) = (self.path / "checkpoints").glob("step-*")
        files = sorted(checkpoint.glob("stage-*.pt"), key=lambda p: int(p.stem.split("-")[1]))
        return [torch.load(file, weights_only=True) for file in files]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {key: value for part in self.parts() for key, value in part["weights"].items()}

    @property
    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        return {
            key: value for part in self.parts() for key, value in part["optimizer"]["state"].items()
        }


class Jobs:
    """Writes job files into a folder of the test's own and runs them there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self._count = 0

    def write(self, source: str, name: str = "job.py") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    def start(
        self, *words: str, source: str = JOB, command: list[str] = COMMAND, **options: Any
    ) -> tuple[subprocess.Popen[str], Path]:
        """Start ``pipeworker launch WORDS job.py``; returns the process and its run directory."""
        job_file = self.write(source)
        self._count += 1
        run_dir = self.folder / f"run-{self._count}"
        options = {"cwd": self.folder, **options}
        line = [*command, "launch", "--run-dir", str(run_dir)]
        line += [*_before(words), str(job_file), *_after(words)]
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        self._started.append(process)
        return process, run_dir

    def run(self, *words: str, source: str = JOB, timeout: float = 90, **options: Any) -> Run:
        """Run a job to its end."""
        process, run_dir = self.start(*words, source=source, **options)
        stdout, stderr = process.communicate(timeout=timeout)
        return Run(process.returncode, stdout, stderr, run_dir)

    def train(self, *words: str, source: str = JOB, **options: Any) -> Run:
        """Run a job that must succeed."""
        run = self.run(*words, source=source, **options)
        assert run.status == 0, run.stderr
        return run

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()


def _before(words: tuple[str, ...]) -> list[str]:
    return list(words[: words.index("--")] if "--" in words else words)


def _after(words: tuple[str, ...]) -> list[str]:
    return list(words[words.index("--") :] if "--" in words else ())


def processes_of(folder: Path) -> dict[int, str]:
    """The processes that work in a folder (Linux), by pid: what they were started as."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink().is_relative_to(folder):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it ended while we looked
    return found


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Poll until `condition` is true; returns its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not so within {seconds:g} s"
        time.sleep(0.02)
    return value


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Real jobs; at the end no process of theirs may be left."""
    made = Jobs(tmp_path)
    try:
        yield made
        until(lambda: not processes_of(tmp_path), 10)
    finally:
        made.close()
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)
