"""Jobs as users start them: commands and interpreters of their own, whatever lies beside them."""

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
from support.jobs import Jobs, Run, processes_of, until
from support.neighbours import IMPORTS, SAID, write_neighbours
from support.sources import JOB

TOKEN = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
NEEDED = {"torch._dynamo", "pipeworker.worker.service"}
GATED = (
    f"{IMPORTS}\n    import sys\n    print('there', {NEEDED} <= sys.modules.keys())\n"
    + JOB.replace(
        "x = torch.randn(10",
        """if _ == 3:
                import pathlib, time
                while not pathlib.Path("go").exists():
                    time.sleep(0.02)
            x = torch.randn(10""",
    )
)


@dataclass(frozen=True)
class Seen:
    """What was seen of a job from outside.

    Attributes:
        processes: by pid, their command lines and environments while it trained.
        log: of the first stage, at that time.
    """

    run: Run
    processes: dict[int, bytes]
    log: str


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """One job, beside files with our names: nothing of it is forked by the tests' server."""
    jobs = Jobs(tmp_path_factory.mktemp("seen"), None)
    write_neighbours(jobs)
    env = {name: value for name, value in os.environ.items() if not TOKEN.search(value.encode())}
    env["OMP_NUM_THREADS"] = "1"
    env.pop("PYTHONUNBUFFERED", None)
    try:
        process, path = jobs.start("--stages", "2", source=GATED, env=env)
        metrics = path / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
        processes = {
            pid: Path(f"/proc/{pid}/cmdline").read_bytes()
            + Path(f"/proc/{pid}/environ").read_bytes()
            for pid in processes_of(jobs.folder)
        }
        log = (path / "logs" / "stage-0.log").read_text()
        (jobs.folder / "go").touch()
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
        yield Seen(Run(process.returncode, stdout, stderr, path), processes, log)
    finally:
        jobs.close()


def test_neighbours_with_our_names_are_the_users(seen: Seen) -> None:
    assert "done: 6 steps" in seen.run.stdout
    assert all(SAID in seen.run.log(f"stage-{stage}") for stage in (0, 1))


def test_what_is_printed_is_in_the_log_at_once(seen: Seen) -> None:
    """And from there it is shown."""
    assert SAID in seen.log
    assert seen.run.stdout.count(SAID) == 2


def test_the_command_shows_no_token(seen: Seen) -> None:
    """Nothing that looks like a token in `ps`, in an environment or in a file."""
    assert TOKEN.fullmatch(new_token().encode())
    assert len(seen.processes) == 5  # the command, coordinator, fork server, two workers
    assert not any(TOKEN.search(shown) for shown in seen.processes.values())
    job = hashlib.sha256((seen.run.path / "job.py").read_bytes()).hexdigest().encode()
    for file in seen.run.path.rglob("*"):
        found = TOKEN.findall(file.read_bytes()) if file.is_file() else []
        assert found == ([job] if file.name == "run.json" else []), file
    assert not TOKEN.search((seen.run.stdout + seen.run.stderr).encode())


def test_the_fork_server_imports_what_every_worker_would(seen: Seen) -> None:
    """A second for each of them: any torch optimizer imports torch._dynamo when it is built."""
    assert all("there True" in seen.run.log(f"stage-{stage}") for stage in (0, 1))


@pytest.mark.parametrize("beside", [True, False])
def test_a_command_with_neighbours_that_have_our_names(jobs: Jobs, beside: bool) -> None:
    """The installed script, whose own folder is first on its import path."""
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
    assert SAID in (jobs.folder / "run" / "logs" / "stage-0.log").read_text()
