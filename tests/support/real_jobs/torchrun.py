"""Torchrun jobs, ``torchrun … -m pipeworker job.py``, on one node or several."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.clusters.hosts import Host
from support.processes.interpreter import COLD_RANKS
from support.processes.ports import reserve_port
from support.real_jobs.jobs import Jobs, Process, Record, Run, ended, steps_of, until
from support.real_jobs.sources import JOB

TORCHRUN = ("-m", "torch.distributed.run")
TOKEN = "PIPEWORKER_TOKEN"


@dataclass
class Started:
    """An agent of torchrun that runs."""

    process: Process
    path: Path

    def end(self, seconds: float = 60) -> Run:
        """Wait for the end of the agent; return its run."""
        return ended(self.process, self.path, None, seconds)

    def training(self, rows: int = 3) -> dict[str, Any]:
        """Wait until the job has done some steps; return its plan."""
        until(lambda: steps_of(self.path) >= rows)
        return Record(self.path).plan


class Torchrun(ExitStack):
    """A starter of torchrun's agents."""

    def __init__(self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._jobs = jobs
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun prints a long warning otherwise
        monkeypatch.delenv(TOKEN, raising=False)

    def __call__(
        self,
        *words: str,
        ranks: int = 2,
        source: str = JOB,
        options: Sequence[str] = ("--standalone",),
        host: Host | None = None,
        run_dir: str = "run-torchrun",
        cold: bool = False,
        job: str = "job.py",
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> Started:
        """Start ``PREFIX torchrun OPTIONS -m pipeworker job.py WORDS``.

        With `cold`, ranks are separate interpreters, and torchrun's children; so they are with a
        prefix, and torchrun too.
        """
        job_file = self._jobs.write(source, job)
        path = self._jobs.folder / run_dir
        line = [*TORCHRUN, *options, "--nproc-per-node", str(ranks), "-m", "pipeworker"]
        line += [str(job_file), "--run-dir", str(path), *words]
        env = {**os.environ, **({COLD_RANKS: "1"} if cold or prefix else {}), **(env or {})}
        namespace = host.name if host else ""
        process = self._jobs.python(
            *line, env=env, namespace=namespace, prefix=prefix, cold=bool(prefix)
        )
        return Started(process, path)

    def nodes(
        self,
        *words: str,
        hosts: Sequence[Host] = (),
        envs: Sequence[Mapping[str, str]] = ({}, {}),
        prefixes: Sequence[Sequence[str]] = ((), ()),
        **options: Any,
    ) -> list[Started]:
        """Start two nodes of a job, with a static rendezvous at the first one's address."""
        address = hosts[0].address if hosts else "127.0.0.1"
        ports = ("--nnodes", "2", "--master-addr", address, "--master-port", self.port(bool(hosts)))
        return [
            self(
                *words,
                options=(*ports, "--node-rank", str(index)),
                host=hosts[index] if hosts else None,
                env=envs[index],
                prefix=prefixes[index],
                **options,
            )
            for index in range(2)
        ]

    def port(self, alone: bool = False) -> str:
        """Return a reserved port; with `alone`, one of a network where all ports are free."""
        return "29500" if alone else str(reserve_port(self))
