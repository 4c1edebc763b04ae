"""What is lost is replaced, and the job gives what it would have given."""

from __future__ import annotations

import json
import os
import re
import signal
from functools import partial

import pytest

from support.compare import assert_same
from support.forked import Server
from support.jobs import Jobs, Run, processes_of, until
from support.sources import DIES, JOB

WENT_ON = r"warning: the coordinator was killed; went on after step \d, .* repeated, in \d+\.\d s"
WORDS = ("--stages", "3", "--microbatches", "4", "--steps", "7")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, server: Server | None) -> Run:
    """Without a fault."""
    jobs = Jobs(tmp_path_factory.mktemp("quiet"), server)
    return jobs.train(*WORDS, source=DIES)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", "the worker of stage 1 was killed by signal 9 (stage 1, layer 2 (Dies), "),
        ("exit", "the worker of stage 1 exited with status 0 (stage 1, layer 2 (Dies), "),
        ("stop", "has not answered for 3 s (stage 1"),
        ("raise", "layer 2 (Dies) raised ConnectionError: no route"),
    ],
)
def test_a_worker_that_is_lost_is_replaced(jobs: Jobs, quiet: Run, how: str, said: str) -> None:
    run = jobs.train(*WORDS, "--worker-timeout", "3", "--", how, source=DIES)
    assert (jobs.folder / "died").exists()
    assert_same(run, quiet)
    assert [row["step"] for row in run.metrics] == [*range(1, 8)]
    (cause,) = run.summary["causes"]
    assert said in cause
    assert how == "stop" or cause.endswith("(stage 1, layer 2 (Dies), micro-batch 0, step 4)")
    assert run.summary["restarts"] == 1
    (line,) = [line for line in run.stderr.splitlines() if "went on" in line]
    assert line.startswith(f"warning: {cause}; went on after step ")


def test_what_happens_again_at_the_same_place_ends_the_job(jobs: Jobs) -> None:
    run = jobs.run(*WORDS, "--", "always", source=DIES)
    assert run.status == 1
    assert "layer 2 (Dies) raised ConnectionError: no route" in run.stderr
    assert "it happened again at the same place" in run.log("coordinator")
    assert run.summary["restarts"] == 1
    assert run.summary["steps"] == 3


def test_without_restarts_the_first_loss_ends_the_job(jobs: Jobs) -> None:
    run = jobs.run(*WORDS, "--restarts", "0", "--", "kill", source=DIES)
    assert run.status == 1
    assert "the worker of stage 1 was killed by signal 9" in run.stderr
    assert (run.summary["restarts"], run.summary["steps"]) == (0, 3)


def test_a_coordinator_that_is_lost_is_replaced(jobs: Jobs, quiet: Run) -> None:
    process, path = jobs.start(*WORDS, "--", "kill", source=DIES)
    until(lambda: (path / "metrics.jsonl").exists() and (path / "metrics.jsonl").read_text())
    there = processes_of(jobs.folder).items()
    (pid,) = [pid for pid, line in there if line.startswith("coordinator\n")]
    left = [path / "checkpoints" / name for name in (".step-00000099.partial", ".step-0.gone")]
    for folder in left:  # as one in the middle of a commit
        folder.mkdir(parents=True)
    os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    run = Run(0, "", stderr, path)
    assert_same(run, quiet)
    assert [row["step"] for row in run.metrics] == [*range(1, 8)]
    assert re.search(WENT_ON, stderr)
    assert run.summary["causes"][0] == "the coordinator was killed"
    assert not any(folder.exists() for folder in left)


HANDS = """
    import fcntl
    import os
    import time

    HELD = []
    for number in range(2 if os.path.exists("broken") else 9):
        HELD.append(open(f"hand-{number}", "w"))
        try:
            fcntl.flock(HELD[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            HELD.pop()
    else:
        os._exit(7)
"""
"""A job file that two workers can load, as long as there is a file ``broken``."""


def test_a_job_goes_on_with_fewer_hands_and_grows_again(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPEWORKER_TIMINGS", "grow=0.5")
    slow = JOB.replace("x = torch.randn(10", "time.sleep(0.2); x = torch.randn(10")
    words = ("--microbatches", "4", "--steps", "40")
    process, path = jobs.start(
        *("--stages", "3", "--elastic", "2", "--restarts", "9", *words), source=HANDS + slow
    )
    log = path / "logs" / "coordinator.log"

    def stages() -> list[int]:
        found: list[int] = [
            s["pid"] for s in json.loads((path / "plan.json").read_text())["stages"]
        ]
        return found

    until(lambda: (path / "metrics.jsonl").exists() and (path / "metrics.jsonl").read_text())
    (jobs.folder / "broken").touch()
    os.kill(stages()[1], signal.SIGKILL)
    until(lambda: len(stages()) == 2)
    (jobs.folder / "broken").unlink()
    until(lambda: "tries to go on with 3 stages again" in log.read_text() and len(stages()) == 3)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    run = Run(0, "", stderr, path)
    lines = [line for line in stderr.splitlines() if "went on after" in line]
    assert len(lines) == 2
    assert "killed by signal 9" in lines[0]
    assert "exited with status 7" in lines[0]
    assert "; the job goes on with 2 stages; went on after step " in lines[0]
    assert_same(run, jobs.train("--stages", "1", *words, source=HANDS + JOB))


def test_a_job_that_runs_is_asked_for_a_checkpoint(jobs: Jobs) -> None:
    gated = JOB.replace(
        "x = torch.randn(10",
        """import pathlib, time
            while _ == 5 and not pathlib.Path("go").exists():
                time.sleep(0.02)
            x = torch.randn(10""",
    )
    process, path = jobs.start("--stages", "2", source=gated)
    until(lambda: (path / "metrics.jsonl").exists() and (path / "metrics.jsonl").read_text())
    asking = jobs.python("-m", "pipeworker", "checkpoint", str(path))
    until(lambda: "a checkpoint is asked for" in (path / "logs" / "coordinator.log").read_text())
    (jobs.folder / "go").touch()
    stdout, stderr = asking.communicate(timeout=60)
    assert asking.returncode == 0, stderr
    assert (path / "checkpoints" / stdout.strip().rpartition("/")[2]).is_dir()
    process.communicate(timeout=60)
    assert process.returncode == 0
    done = jobs.pipeworker("checkpoint", str(path))
    assert (done.returncode, done.stderr) == (2, f"error: no job runs in {path}\n")


def _kill_coordinator(jobs: Jobs, before: int = 0) -> int:
    """Another one than that before it, as soon as it has begun; returns its pid."""

    def found() -> int:
        lines = processes_of(jobs.folder).items()
        pids = {pid for pid, line in lines if line.startswith("coordinator\n")} - {before}
        return pids.pop() if len(pids) == 1 else 0

    pid: int = until(found)
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_coordinator_that_is_lost_behind_an_interrupt_is_replaced_to_save(jobs: Jobs) -> None:
    gated = JOB.replace(
        "x = torch.randn(10",
        """import pathlib, time
            while _ == 5 and not pathlib.Path("go").exists():
                time.sleep(0.02)
            x = torch.randn(10""",
    )
    process, path = jobs.start("--stages", "2", "--snapshot-every", "1", source=gated)
    rows = path / "metrics.jsonl"
    until(lambda: rows.exists() and rows.read_text().count("\n") > 3)
    process.send_signal(signal.SIGINT)
    log = path / "logs" / "coordinator.log"
    until(lambda: "interrupted: stopping at the end of the step" in log.read_text())
    _kill_coordinator(jobs)
    (jobs.folder / "go").touch()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    run = Run(130, "", stderr, path)
    assert run.summary["causes"] == ["the coordinator was killed"]
    assert run.checkpoint.manifest.step > 2  # what is in memory


def test_what_was_lost_before_a_coordinator_that_is_not_replaced_is_in_the_summary(
    jobs: Jobs,
) -> None:
    process, path = jobs.start("--stages", "2", "--steps", "1000000", "--restarts", "1", source=JOB)
    rows = path / "metrics.jsonl"
    until(lambda: rows.exists() and rows.read_text())
    first = _kill_coordinator(jobs)
    until(lambda: "all ranks joined" in (path / "logs/coordinator.log").read_text()[-4000:])
    _kill_coordinator(jobs, first)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert "warning: the job does not go on: 1 restarts within an hour are all used" in stderr
    summary = Run(1, "", stderr, path).summary
    assert (summary["status"], summary["error"]) == ("failed", "the coordinator was killed")
    assert (summary["restarts"], summary["causes"]) == (1, ["the coordinator was killed"])


def test_a_run_that_goes_on_survives_its_coordinator_when_its_first_checkpoint_is_gone(
    jobs: Jobs,
) -> None:
    source = DIES.replace("done() == 3", "done() == 30")
    words = (*WORDS[:-1], "12", "--checkpoint-every", "3", "--checkpoint-busy", "wait")
    run = jobs.train(*words, source=source)
    line = ("launch", "--resume", "--run-dir", str(run.path), "--steps", "1000000")
    process = jobs.python("-m", "pipeworker", *line, str(jobs.folder / "job.py"))
    began = run.path / "checkpoints" / "step-00000012"
    until(lambda: not began.exists())

    def coordinators() -> set[int]:
        found = processes_of(jobs.folder).items()
        return {pid for pid, line in found if line.startswith("coordinator\n")}

    (pid,) = coordinators()
    os.kill(pid, signal.SIGKILL)
    until(lambda: coordinators() - {pid})
    rows = (run.path / "metrics.jsonl").read_bytes().count(b"\n")
    until(lambda: (run.path / "metrics.jsonl").read_bytes().count(b"\n") > rows)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    summary = json.loads((run.path / "summary.json").read_text())
    assert (summary["status"], summary["restarts"]) == ("interrupted", 1)


def _is_gone(jobs: Jobs, pid: int) -> bool:
    return pid not in processes_of(jobs.folder)


def test_a_coordinator_and_the_fork_server_that_are_lost_at_once_are_replaced(
    jobs: Jobs, quiet: Run
) -> None:
    """What the fork server's memory held of a job is gone, also before its workers are again."""
    process, path = jobs.start(*WORDS, "--", "raise", source=DIES)
    metrics = path / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
    there = processes_of(jobs.folder).items()
    os.kill(process.pid, signal.SIGSTOP)
    for name in ("coordinator\n", "forkserver\n"):  # of which the launcher hears in this order
        pid = min(pid for pid, line in there if line.startswith(name))  # workers are its forks
        os.kill(pid, signal.SIGKILL)
        until(partial(_is_gone, jobs, pid))
    os.kill(process.pid, signal.SIGCONT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert_same(Run(0, "", stderr, path), quiet)
    # Another coordinator hears of the fork server, or begins behind that.
    fork_server = "the fork server of this host was killed.*; "
    lost = f"warning: the coordinator was killed; ({fork_server})?went on"
    assert re.search(lost, stderr)
