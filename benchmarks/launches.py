"""Programs and runs of pipeworker that benchmarks measure, and the figures that runs record."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SKIPPED_STEPS = 3


def python(
    *words: object,
    timeout: float = 600,
    core: int | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a Python program, on one core if `core` is given; return its output."""
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    pinned = [] if core is None else ["taskset", "--cpu-list", str(core)]
    line = [*pinned, sys.executable, *map(str, words)]
    done = subprocess.run(
        line,
        env={**os.environ, **quiet, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(line)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def result(*words: object, timeout: float = 600) -> Any:
    """Return the JSON in the last line of a Python program's output."""
    return json.loads(python(*words, timeout=timeout).strip().splitlines()[-1])


def planned(
    job: Path, options: str, *words: object, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the plan of a job as JSON; its stages are in order."""
    line = ("plan", *options.split(), "--json", job, "--", *words)
    plan: dict[str, Any] = json.loads(python("-m", "pipeworker", *line, env=env))
    plan["stages"].sort(key=lambda stage: stage["stage"])
    return plan


def balance_of(plan: dict[str, Any]) -> list[int]:
    """Return the layers of each stage of a plan."""
    return [stage["layers"][1] - stage["layers"][0] for stage in plan["stages"]]


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    path: Path

    def read(self, name: str) -> Any:
        """Return the content of one of its JSON files: ``plan`` or ``summary``."""
        return json.loads((self.path / f"{name}.json").read_text())

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The row of each step."""
        return [json.loads(row) for row in (self.path / "metrics.jsonl").open()]

    @property
    def seconds(self) -> float:
        """The median seconds of a step."""
        return float(statistics.median(row["seconds"] for row in self.rows[SKIPPED_STEPS:]))

    @property
    def peaks(self) -> list[int]:
        """The peak bytes of each worker."""
        found: list[int] = self.read("summary")["peak_memory_bytes"]
        return found

    def log(self, rank: int) -> str:
        """Return what a worker has printed."""
        return (self.path / "logs" / f"worker-{rank}.log").read_text()


@contextmanager
def launched(
    job: Path | str,
    options: str,
    *words: object,
    timeout: float = 600,
    core: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Run]:
    """Run `pipeworker launch`; yield the run, which is removed at the end of the context.

    `job` is the path of a job file, or its text; `words` are its arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = job if isinstance(job, Path) else Path(folder, "job.py")
        if isinstance(job, str):
            path.write_text(job)
        run = Path(folder, "run")
        line = ("launch", *options.split(), "--run-dir", run, path, "--", *words)
        python("-m", "pipeworker", *line, timeout=timeout, core=core, env=env)
        yield Run(run)


def step_seconds(
    job: Path | str,
    stages: int,
    microbatches: int,
    steps: int,
    recompute: str,
    *words: object,
    options: str = "",
) -> float:
    """Return the median seconds of a step of `pipeworker launch`, with further `options`."""
    shape = f"--stages {stages} --microbatches {microbatches} --steps {steps}"
    with launched(job, f"{shape} --recompute {recompute} {options}", *words) as run:
        return run.seconds
