"""The ranks of a user's script: processes that a test starts itself."""

from __future__ import annotations

import json
import os
import socket
import textwrap
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.jobs import Jobs, Process, Run

PREAMBLE = """
    import json, os, sys
    from pathlib import Path
    import pipeworker
    rank = int(os.environ.get("RANK", "0"))

    def tell(**what):
        Path(f"told-{rank}.json").write_text(json.dumps(what))
"""
"""What scripts begin with."""
LOOP = """
    with pipeworker.Pipeline(
        model, loss=loss, optimizer=optimizer, microbatches=4, run_dir=os.environ["RUN_DIR"],
        **json.loads(os.environ.get("OPTIONS", "{}"))
    ) as pipe:
        results = [pipe.step(batch) for batch in data()]
    tell(loss=[r.loss for r in results], norm=[r.grad_norm for r in results])
"""


def script(*parts: str) -> str:
    return "\n".join(textwrap.dedent(part) for part in (PREAMBLE, *parts))


@dataclass
class Ranks:
    """The processes of a script, one a rank."""

    processes: list[Process]
    run_dir: Path

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def end(self, seconds: float = 60) -> list[Run]:
        runs = []
        for process in self.processes:
            stdout, stderr = process.communicate(timeout=seconds)
            assert process.returncode is not None
            runs.append(Run(process.returncode, stdout, stderr, self.run_dir))
        return runs

    def succeed(self) -> list[Run]:
        runs = self.end()
        for run in runs:
            assert run.status == 0, run.stderr
        return runs

    def told(self, rank: int) -> dict[str, Any]:
        """What the script of a rank said with ``tell``, once all have succeeded."""
        told: dict[str, Any] = json.loads((self.run_dir.parent / f"told-{rank}.json").read_text())
        return told


class Scripts(ExitStack):
    """Starts scripts, each in a folder of its own and at a port that nobody else is given."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__()
        self._jobs = jobs
        self._count = 0

    def start(
        self,
        source: str,
        ranks: int = 2,
        *,
        alone: bool = False,
        also: Mapping[str, str] | None = None,
        **variables: str,
    ) -> Ranks:
        """Start a script on some ranks; `alone`, its environment knows of no others."""
        self._count += 1
        path = self._jobs.write(source, f"script-{self._count}/loop.py")
        place = {"WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._port()}
        base = {**os.environ, "OMP_NUM_THREADS": "1", "RUN_DIR": "run"}
        processes = [
            self._jobs.python(
                path.name,
                folder=path.parent,
                env={
                    **base,
                    **({} if alone else {**place, "RANK": f"{rank}"}),
                    **variables,
                    **(also or {}),
                },
            )
            for rank in range(ranks)
        ]
        return Ranks(processes, path.parent / "run")

    def _port(self) -> str:
        """A free port: held, so that nobody is given it, yet who asks for it by number gets it."""
        holder = self.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        return str(holder.getsockname()[1])
