"""Jobs as users start them: with new interpreters, and beside files with the names of ours."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeworker.wire.keys import new_token
from support.processes.neighbours import IMPORTS, PRINTED, write_neighbours
from support.real_jobs.jobs import Jobs, Run, ended, processes_of, steps_of, until
from support.real_jobs.sources import JOB, gated
from support.slow import slow

TOKEN = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
NEEDED = {"torch._dynamo", "pipeworker.worker.worker"}
GATED = f"{IMPORTS}\n    import sys\n    print('there', {NEEDED} <= sys.modules.keys())\n" + gated(
    JOB, when="_ == 3"
)


@dataclass(frozen=True)
class Seen:
    """A job as seen from outside.

    Attributes:
        run: the finished job.
        processes: the command lines and environments of its processes during training, by pid.
        log: the log of the first stage during training.
    """

    run: Run
    processes: dict[int, bytes]
    log: str


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Run one job beside files with our names; the tests' server forks none of its processes."""
    jobs = Jobs(tmp_path_factory.mktemp("seen"), None)
    write_neighbours(jobs)
    env = {name: value for name, value in os.environ.items() if not TOKEN.search(value.encode())}
    env["OMP_NUM_THREADS"] = "1"
    env.pop("PYTHONUNBUFFERED", None)
    try:
        process, path = jobs.start("--stages", "2", source=GATED, env=env)
        until(lambda: steps_of(path) >= 2)
        processes = {
            pid: Path(f"/proc/{pid}/cmdline").read_bytes()
            + Path(f"/proc/{pid}/environ").read_bytes()
            for pid in processes_of(jobs.folder)
        }
        log = (path / "logs" / "worker-0.log").read_text()
        (jobs.folder / "go").touch()
        yield Seen(ended(process, path), processes, log)
    finally:
        jobs.close()


@slow
def test_a_job_file_imports_the_users_modules_with_our_names(seen: Seen) -> None:
    assert "done: 6 steps" in seen.run.stdout
    assert all(PRINTED in seen.run.log(f"worker-{stage}") for stage in (0, 1))


@slow
def test_printed_text_is_in_the_log_at_once(seen: Seen) -> None:
    """The display shows it from there."""
    assert PRINTED in seen.log
    assert seen.run.stdout.count(PRINTED) == 2


@slow
def test_a_job_shows_no_token(seen: Seen) -> None:
    """No command line, environment or file contains text that has the form of a token."""
    assert TOKEN.fullmatch(new_token().encode())
    # The command, coordinator, agent, its watcher, two workers, and the process that reads data().
    assert len(seen.processes) == 7
    assert not any(TOKEN.search(shown) for shown in seen.processes.values())
    job = hashlib.sha256((seen.run.path / "job.py").read_bytes()).hexdigest().encode()
    for file in seen.run.path.rglob("*"):
        found = TOKEN.findall(file.read_bytes()) if file.is_file() else []
        assert found == ([job] if file.name == "run.json" else []), file
    assert not TOKEN.search((seen.run.stdout + seen.run.stderr).encode())


@slow
def test_the_agent_imports_modules_for_all_workers(seen: Seen) -> None:
    """It saves each worker a second: any torch optimizer imports torch._dynamo when it is built."""
    assert all("there True" in seen.run.log(f"worker-{stage}") for stage in (0, 1))


@pytest.mark.parametrize("beside", [True, pytest.param(False, marks=slow)])
def test_the_command_runs_beside_modules_with_our_names(jobs: Jobs, beside: bool) -> None:
    """It is the installed script, whose own folder is first on its import path."""
    write_neighbours(jobs)
    folder = jobs.folder if beside else jobs.folder / "elsewhere"
    folder.mkdir(exist_ok=True)
    command = str(Path(sys.executable).with_name("pipeworker"))
    words = ["launch", "--stages", "1", "--steps", "1", "--run-dir", str(jobs.folder / "run")]
    line = [command, *words, str(jobs.write(IMPORTS + JOB))]
    process = jobs.python(*line, folder=folder, env=jobs.forking, cold=True)
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 0, stderr
    assert "done: 1 step in" in stdout
    assert PRINTED in (jobs.folder / "run" / "logs" / "worker-0.log").read_text()
