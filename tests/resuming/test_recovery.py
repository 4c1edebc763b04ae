"""Recovery of real jobs: lost processes are replaced, and the results stay the same."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
from functools import partial

import pytest

from pipeworker.plan.actions import Kind, parse_actions
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import (
    Jobs,
    Record,
    Reference,
    ended,
    pids_of,
    processes_of,
    steps_of,
    until,
)
from support.real_jobs.sources import CALM, DIES, JOB, gated
from support.slow import slow

PTRACE_SEIZE = 0x4206
RESUMED = r"warning: the coordinator was killed; resumed after step \d, .* repeated, in \d+\.\d s"
WORDS = ("--stages", "3", "--microbatches", "4", "--steps", "7")
HELD = gated(DIES, "length = random", "_ == 3")
"""In its third step it waits for the test."""


@pytest.fixture
def quiet(reference: Reference) -> Record:
    """Return a run without a fault."""
    return reference(*WORDS, source=DIES)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("kill", "the worker of stage 1 was killed by SIGKILL (layer 2 (Dies), "),
        pytest.param(
            "exit", "the worker of stage 1 exited with status 0 (layer 2 (Dies), ", marks=slow
        ),
        pytest.param("stop", "has not answered for 3 s", marks=slow),
        pytest.param("raise", "layer 2 (Dies) raised ConnectionError: no route", marks=slow),
    ],
)
def test_a_lost_worker_is_replaced(jobs: Jobs, quiet: Record, how: str, cause: str) -> None:
    run = jobs.train(*WORDS, "--worker-timeout", "3", "--", how, source=DIES)
    assert (jobs.folder / "died").exists()
    assert_same(run, quiet)
    assert [row["step"] for row in run.metrics] == [*range(1, 8)]
    (recorded,) = run.summary["causes"]
    assert cause in recorded
    assert how == "stop" or recorded.endswith("layer 2 (Dies), micro-batch 0, step 4)")
    assert run.summary["restarts"] == 1
    (line,) = [line for line in run.stderr.splitlines() if "resumed after" in line]
    assert line.startswith(f"warning: {recorded}; resumed after step ")
    rows = [json.loads(line) for line in (run.path / "timeline/worker-1.jsonl").open()]
    (place,) = [place for place, row in enumerate(rows) if "lost" in row]
    lost = rows[place]
    text = next(row["actions"] for row in reversed(rows[:place]) if "actions" in row)
    assert lost["step"] == 4
    assert len(lost["times"]) % 2 == 1  # it has begun one action more than it has ended
    assert parse_actions(text)[len(lost["times"]) // 2].kind is Kind.FORWARD


def test_a_lost_worker_that_a_debugger_holds_costs_no_snapshot(jobs: Jobs) -> None:
    """It stays until the debugger lets it go, and its agent does not wait for that."""
    words = ("--stages", "2", "--microbatches", "1", "--snapshot-every", "1")
    process, path = jobs.start(*words, "--worker-timeout", "5", source=gated(JOB, when="_ == 5"))
    until(lambda: steps_of(path) == 4)
    pid = Record(path).plan["stages"][1]["pid"]
    if ctypes.CDLL(None).ptrace(PTRACE_SEIZE, pid, None, None):
        process.kill()
        pytest.skip("this user may trace no other processes")
    os.kill(pid, signal.SIGKILL)
    (jobs.folder / "go").touch()
    try:
        run = ended(process, path)
    finally:
        os.waitpid(pid, 0)  # the tracer has to, before the parent of the process can
    assert run.summary["restarts"] == 1
    assert "the agent" not in run.stderr
    assert "resumed after step 0" not in run.stderr


def test_a_repeated_failure_at_the_same_place_ends_the_job(jobs: Jobs) -> None:
    run = jobs.run(*WORDS, "--", "always", source=DIES)
    assert run.status == 1
    assert "layer 2 (Dies) raised ConnectionError: no route" in run.stderr
    assert "it failed again at the same place" in run.log("coordinator")
    assert run.summary["restarts"] == 1
    assert run.summary["steps"] == 3


@slow
def test_a_job_file_that_is_edited_while_the_job_runs_is_a_warning(jobs: Jobs) -> None:
    source = gated(JOB.replace("def loss", "FACTOR = 1\n\n    def loss"), when="_ == 3")
    process, path = jobs.start("--stages", "2", "--microbatches", "1", source=source)
    until(lambda: steps_of(path) == 2)
    jobs.write(source.replace("FACTOR = 1", "FACTOR = 2"))
    os.kill(Record(path).plan["stages"][1]["pid"], signal.SIGKILL)
    (jobs.folder / "go").touch()
    run = ended(process, path)
    assert run.stderr.startswith("warning: job.py: changed while the job runs; from here on ")


@slow  # test_errors.py loses a worker without restarts
def test_without_restarts_the_first_loss_ends_the_job(jobs: Jobs) -> None:
    run = jobs.run(*WORDS, "--max-restarts", "0", "--", "kill", source=DIES)
    assert run.status == 1
    assert "the worker of stage 1 was killed by SIGKILL" in run.stderr
    assert (run.summary["restarts"], run.summary["steps"]) == (0, 3)


def test_a_lost_coordinator_is_replaced(jobs: Jobs, quiet: Record) -> None:
    process, path = jobs.start(*WORDS, "--", "kill", source=HELD)
    until(lambda: steps_of(path))
    (pid,) = pids_of(jobs.folder, "coordinator")
    left = [path / "checkpoints" / name for name in (".step-00000099.partial", ".step-0.gone")]
    for folder in left:  # as a coordinator leaves them in the middle of a commit
        folder.mkdir(parents=True)
    os.kill(pid, signal.SIGKILL)
    (jobs.folder / "go").touch()
    run = ended(process, path)
    assert_same(run, quiet)
    assert [row["step"] for row in run.metrics] == [*range(1, 8)]
    assert re.search(RESUMED, run.stderr)
    assert run.summary["causes"][0] == "the coordinator was killed"
    assert not any(folder.exists() for folder in left)


@slow
def test_a_coordinator_lost_behind_a_stopped_launcher_is_replaced(jobs: Jobs) -> None:
    """The launcher has not read of the last snapshots: the one of which it has is still there."""
    endless = gated(JOB.replace("range(6)", "range(400)"), when="_ == 390")
    process, path = jobs.start(
        "--stages", "2", "--microbatches", "1", "--snapshot-every", "1", source=endless
    )
    until(lambda: steps_of(path) > 3)
    process.send_signal(signal.SIGSTOP)
    stopped = steps_of(path)
    until(lambda: steps_of(path) >= 380)
    _kill_coordinator(jobs)
    (jobs.folder / "go").touch()
    process.send_signal(signal.SIGCONT)
    run = ended(process, path)
    (resumed,) = re.findall(r"the coordinator was killed; resumed after step (\d+), ", run.stderr)
    assert stopped < int(resumed) < 380
    assert [row["step"] for row in run.metrics] == [*range(1, 401)]


LIMITED = """
    import fcntl
    import os
    import time

    LOCKS = []
    for number in range(2 if os.path.exists("broken") else 9):
        LOCKS.append(open(f"lock-{number}", "w"))
        try:
            fcntl.flock(LOCKS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            LOCKS.pop()
    else:
        os._exit(7)
"""
"""The start of a job file that only two workers can load while a file ``broken`` exists."""


def test_a_job_continues_with_fewer_workers_and_grows_again(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPEWORKER_TIMINGS", "grow=0.5")
    job = JOB.replace("def data():", "def data(start=0):")  # no reader loads the job file
    job = job.replace("yield x", "if _ >= start: yield x")
    slow = job.replace(
        "x = torch.randn(10", "time.sleep(0 if os.path.exists('go') else 0.4); x = torch.randn(10"
    )
    words = ("--microbatches", "4", "--steps", "20")
    process, path = jobs.start(
        *("--stages", "3", "--min-stages", "2", "--max-restarts", "9", *words),
        source=LIMITED + slow,
    )
    log = path / "logs" / "coordinator.log"

    def stages() -> list[int]:
        return [stage["pid"] for stage in Record(path).plan["stages"]]

    until(lambda: steps_of(path))
    (jobs.folder / "broken").touch()
    os.kill(stages()[1], signal.SIGKILL)
    until(lambda: len(stages()) == 2)
    (jobs.folder / "broken").unlink()
    until(lambda: "tries again with all 3 workers" in log.read_text() and len(stages()) == 3)
    (jobs.folder / "go").touch()
    run = ended(process, path)
    lines = [line for line in run.stderr.splitlines() if "resumed after" in line]
    assert len(lines) == 2
    assert "killed by SIGKILL" in lines[0]
    assert "exited with status 7" in lines[0]
    assert "; the job continues with 2 workers; resumed after step " in lines[0]
    assert_same(run, jobs.train("--stages", "1", *words, source=LIMITED + job))


def test_a_checkpoint_of_a_running_job_is_requested(jobs: Jobs) -> None:
    process, path = jobs.start("--stages", "2", source=gated(JOB))
    until(lambda: steps_of(path))
    request = jobs.python("-m", "pipeworker", "checkpoint", str(path))
    until(lambda: "a checkpoint was requested" in (path / "logs" / "coordinator.log").read_text())
    (jobs.folder / "go").touch()
    written = ended(request, path).stdout.strip()
    assert (path / "checkpoints" / written.rpartition("/")[2]).is_dir()
    ended(process, path)
    done = jobs.pipeworker("checkpoint", str(path))
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {path}: no job is running there; give the directory of a running job\n",
    )


def _kill_coordinator(jobs: Jobs, before: int = 0) -> int:
    """Kill the coordinator, once there is another one than `before`, and return its pid."""

    def found() -> int:
        pids = {*pids_of(jobs.folder, "coordinator")} - {before}
        return pids.pop() if len(pids) == 1 else 0

    pid: int = until(found)
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_coordinator_lost_after_an_interrupt_is_replaced_to_save(jobs: Jobs) -> None:
    process, path = jobs.start("--stages", "2", "--snapshot-every", "1", source=gated(JOB))
    until(lambda: steps_of(path) > 3)
    process.send_signal(signal.SIGINT)
    log = path / "logs" / "coordinator.log"
    until(lambda: "interrupted: stopping at the end of the step" in log.read_text())
    _kill_coordinator(jobs)
    (jobs.folder / "go").touch()
    run = ended(process, path, 130)
    assert run.summary["causes"] == ["the coordinator was killed"]
    assert run.checkpoint.manifest.step > 2  # of the last snapshot


@slow
def test_evaluations_of_thousands_of_metrics_are_recorded_once(jobs: Jobs) -> None:
    evaluated = """
    def evaluation():
        yield torch.ones(10, 8), torch.ones(10).long()

    def metrics(output, target):
        return {f"metric_{number:04}": number for number in range(3000)}
"""
    words = ("--stages", "2", "--evaluate-every", "2", "--snapshot-every", "100")
    process, path = jobs.start(*words, source=gated(JOB) + evaluated)
    rows = path / "evaluation.jsonl"
    until(lambda: rows.exists() and rows.read_text().count("\n") == 2)
    _kill_coordinator(jobs)
    (jobs.folder / "go").touch()
    ended(process, path)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["step"], len(row)) for row in found] == [(2, 3002), (4, 3002), (6, 3002)]
    shown = json.loads(jobs.pipeworker("show", "--json", str(path)).stdout)
    assert shown["evaluation"] == found[-1]


def test_the_summary_has_the_losses_before_a_coordinator_that_is_not_replaced(
    jobs: Jobs,
) -> None:
    process, path = jobs.start(
        "--stages", "2", "--steps", "1000000", "--max-restarts", "1", source=CALM
    )
    until(lambda: steps_of(path))
    first = _kill_coordinator(jobs)
    until(lambda: "all ranks joined" in (path / "logs/coordinator.log").read_text()[-4000:])
    _kill_coordinator(jobs, first)
    run = ended(process, path, 1)
    assert "warning: the job is not restarted: the one restart within an hour is used" in run.stderr
    summary = run.summary
    assert (summary["status"], summary["error"]) == ("failed", "the coordinator was killed")
    assert (summary["restarts"], summary["causes"]) == (1, ["the coordinator was killed"])


@slow
def test_a_resumed_run_survives_its_coordinator_after_its_first_checkpoint_is_deleted(
    jobs: Jobs,
) -> None:
    source = DIES.replace("done() == 3", "done() == 30").replace(
        "length = random", "__import__('time').sleep(0.01); length = random"
    )
    words = (*WORDS[:-1], "12", "--checkpoint-every", "3", "--checkpoint-busy", "wait")
    run = jobs.train(*words, source=source)
    line = ("launch", "--resume", "--run-dir", str(run.path), "--steps", "1000000")
    process = jobs.python("-m", "pipeworker", *line, str(jobs.folder / "job.py"))
    began = run.path / "checkpoints" / "step-00000012"
    until(lambda: not began.exists())

    (pid,) = pids_of(jobs.folder, "coordinator")
    os.kill(pid, signal.SIGKILL)
    until(lambda: {*pids_of(jobs.folder, "coordinator")} - {pid})
    before = steps_of(run.path)
    until(lambda: steps_of(run.path) > before)
    process.send_signal(signal.SIGINT)
    summary = ended(process, run.path, None).summary
    assert (summary["status"], summary["restarts"]) == ("interrupted", 1)


def _is_gone(jobs: Jobs, pid: int) -> bool:
    return pid not in processes_of(jobs.folder)


@slow
def test_a_coordinator_and_an_agent_lost_at_once_are_replaced(jobs: Jobs, quiet: Record) -> None:
    """The snapshots in the agent's memory are lost, even before new workers start."""
    process, path = jobs.start(*WORDS, "--", "raise", source=HELD)
    until(lambda: steps_of(path) > 1)
    pids = [pids_of(jobs.folder, name)[0] for name in ("coordinator", "agent")]
    os.kill(process.pid, signal.SIGSTOP)
    for pid in pids:  # the launcher notices them in this order
        os.kill(pid, signal.SIGKILL)
        until(partial(_is_gone, jobs, pid))
    (jobs.folder / "go").touch()
    os.kill(process.pid, signal.SIGCONT)
    run = ended(process, path)
    assert_same(run, quiet)
    # The new coordinator learns of the agent's loss, or starts after it.
    agent = "the agent of this host was killed.*; "
    lost = f"warning: the coordinator was killed; ({agent})?resumed after"
    assert re.search(lost, run.stderr)


HANGS = """
import sys
import time
from pathlib import Path

class Hangs:
    def find_spec(self, name, *_):
        first = name == "torch" and not Path("hangs").exists()
        if first and "pipeworker.host.agent" in sys.orig_argv:
            Path("hangs").touch()
            time.sleep(1000)

sys.meta_path.insert(0, Hangs())
"""
"""The first agent never finishes the import of torch."""


@slow
def test_an_agent_that_hangs_in_its_import_is_replaced_soon(jobs: Jobs) -> None:
    jobs.write(HANGS, "hooks/sitecustomize.py")
    env = {**os.environ, "PYTHONPATH": str(jobs.folder / "hooks")}
    run = jobs.train("--stages", "2", "--worker-timeout", "5", cold=True, env=env)
    cause = run.summary["causes"][0]
    text = r"the agent of this host \(pid \d+\) stands still in its start after .* for 5 s"
    assert re.match(text, cause)


WAITS = (
    JOB
    + """
    import time
    from pathlib import Path

    class Waits(nn.Linear):
        def __init__(self):
            while not Path("go").exists():
                time.sleep(0.01)
            super().__init__(8, 3)

    def model():
        return [lambda: nn.Linear(8, 8), Waits]
"""
)


def test_a_note_shows_the_stage_and_the_line_at_which_building_hangs(jobs: Jobs) -> None:
    words = ("--stages", "2", "--balance", "1,1", "--steps", "2", "--worker-timeout", "5")
    process, path = jobs.start(*words, source=WAITS)
    stderr = process.stderr
    assert stderr is not None
    until(lambda: "has made no progress" in stderr.readline())
    lines = [stderr.readline() for _ in range(2)]
    assert lines[0] == "Stack (most recent call last):\n"
    assert re.search(r'File ".*/job.py", line \d+, in __init__', lines[1])
    jobs.write("", "go")
    ended(process, path)
