"""The ranks of a user's script: processes that a test starts itself."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes.ports import reserve_port
from support.real_jobs.jobs import Jobs, Process, Run, ended

PREAMBLE = """
    import json, os, sys
    from pathlib import Path
    import pipeworker
    rank = int(os.environ.get("RANK", "0"))

    def report(**values):
        Path(f"report-{rank}.json").write_text(json.dumps(values))
"""
"""The beginning of all scripts."""
LOOP = """
    with pipeworker.Pipeline(
        model, loss=loss, optimizer=optimizer, microbatches=4, run_dir=os.environ["RUN_DIR"],
        **json.loads(os.environ.get("OPTIONS", "{}"))
    ) as pipe:
        results = [pipe.step(batch) for batch in data()]
    report(loss=[r.loss for r in results], norm=[r.grad_norm for r in results])
"""


def script(*parts: str) -> str:
    """Return the text of a script."""
    return "\n".join(textwrap.dedent(part) for part in (PREAMBLE, *parts))


@dataclass
class Ranks:
    """The processes of a script, one for each rank."""

    processes: list[Process]
    run_dir: Path

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def end(self, seconds: float = 60) -> list[Run]:
        """Wait for the end of all processes; return their runs."""
        return [ended(process, self.run_dir, None, seconds) for process in self.processes]

    def succeed(self) -> list[Run]:
        """Wait for the end of all processes, and check that they have succeeded."""
        return [ended(process, self.run_dir) for process in self.processes]

    def reported(self, rank: int) -> dict[str, Any]:
        """Return what the script of a rank wrote with ``report``, once all have succeeded."""
        reported: dict[str, Any] = json.loads(
            (self.run_dir.parent / f"report-{rank}.json").read_text()
        )
        return reported


class Scripts(ExitStack):
    """A starter of scripts, each in a folder of its own and at a port of its own."""

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
        """Start a script on some ranks; with `alone`, its environment names no others."""
        self._count += 1
        path = self._jobs.write(source, f"script-{self._count}/loop.py")
        port = str(reserve_port(self))
        place = {"WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
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
