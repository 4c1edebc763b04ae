"""Hooks of real jobs: called once for each record, whatever happens to the job or to them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import torch

from support.real_jobs.compare import assert_same, plain_loop
from support.real_jobs.jobs import Jobs, Reference, pids_of, processes_of, until
from support.real_jobs.ranks import Scripts, script
from support.real_jobs.sources import DIES, JOB
from support.real_jobs.torchrun import Torchrun
from support.slow import slow

SEEN = """
    def seen(text):
        with open("seen", "a") as file:
            file.write(f"{text} ")

    def on_step(row):
        torch.rand(3)  # changes nothing
        assert row["loss"] > 0 and row["samples"] > 0
        seen(f"s{row['step']}")

    def on_evaluation(row):
        print("evaluated", row["step"])
        seen(f"e{row['step']}")

    def on_checkpoint(path):
        assert (path / "manifest.json").exists()
        seen(f"c{path.name[-1]}")

    def evaluation():
        return [(torch.ones(4, 8), torch.ones(4, dtype=torch.long))]
"""
FAILS = """
    import subprocess, time

    def on_step(row):
        raise ValueError(f"no {row['step']}")

    def on_checkpoint(path):
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
"""
KILLED = """
    import os

    def on_checkpoint(path):
        os.kill(os.getpid(), 9)
"""
WORDS = ("--microbatches", "4", "--evaluate-every", "2", "--checkpoint-every", "3", "--keep", "9")


def seen(folder: Path) -> tuple[str, str]:
    """Return the rows that hooks were called with, and the checkpoints, which complete later."""
    words = (folder / "seen").read_text().split()
    rows, checkpoints = (
        [word for word in words if (word[0] == "c") is is_checkpoint]
        for is_checkpoint in (False, True)
    )
    return " ".join(rows), " ".join(checkpoints)


def test_each_record_is_passed_on_once(jobs: Jobs, reference: Reference) -> None:
    """A worker is lost, then the run is resumed from a checkpoint before its last step."""
    # Whatever the load: nothing is skipped while a checkpoint is written, and no step is repeated.
    always = ("--checkpoint-busy", "wait", "--snapshot-every", "1")
    words = ("--stages", "1", *WORDS, *always, "--steps", "5", "--", "kill")
    run = jobs.train(*words, source=DIES + SEEN)
    assert (jobs.folder / "died").exists()
    assert seen(jobs.folder) == ("s1 s2 e2 s3 s4 e4 s5", "c2 c3 c5")
    assert "[hooks] evaluated 2\n" in run.stdout
    assert (run.log("hooks")) == "evaluated 2\nevaluated 4\n"
    shutil.rmtree(run.path / "checkpoints" / "step-00000005")
    resume = ("--resume", "--run-dir", str(run.path), "--stages", "1", *always, "--steps", "7")
    again = jobs.pipeworker("launch", *resume, str(jobs.folder / "job.py"))
    assert again.returncode == 0, again.stderr
    assert "from step 3" in again.stdout
    assert seen(jobs.folder) == ("s1 s2 e2 s3 s4 e4 s5 s6 e6 s7", "c2 c3 c5 c6 c7")
    quiet = reference("--stages", "1", "--microbatches", "4", "--steps", "5", source=DIES)
    assert [row["loss"] for row in run.metrics][:5] == [row["loss"] for row in quiet.metrics]


def test_a_hook_that_fails_or_hangs_is_a_warning(jobs: Jobs) -> None:
    env = {**os.environ, "PIPEWORKER_TIMINGS": "hooks=1.5"}
    words = ("--stages", "1", "--microbatches", "4", "--steps", "3")
    run = jobs.train(*words, source=JOB + FAILS, env=env)
    first, last = [line for line in run.stderr.splitlines() if line.startswith("warning: ")]
    log = run.path / "logs" / "hooks.log"
    assert first == (
        "warning: on_step(): raised ValueError: no 1 after step 1; the job continues, and "
        f"on_step() is called again; {log} has the traceback"
    )
    assert last == (
        "warning: hooks: they have not finished within 1.5 s and were ended; --resume continues "
        "with the records that are left"
    )
    assert "raise ValueError(f\"no {row['step']}\")" in log.read_text()
    assert "on_step(): raised ValueError: no 3 after step 3" in log.read_text()
    assert "[hooks]" not in run.stdout
    assert json.loads((run.path / "hooks.json").read_text())["on_checkpoint"] == [0, 0]
    until(lambda: not processes_of(jobs.folder), 5)  # the watcher ends a moment later
    losses, weights, _ = plain_loop(jobs.write(JOB), microbatches=4, steps=3)
    assert [row["loss"] for row in run.metrics] == losses
    assert all(torch.equal(value, weights[key]) for key, value in run.weights.items())


def test_the_death_of_the_process_of_hooks_is_a_warning_at_the_end_of_the_job_too(
    jobs: Jobs,
) -> None:
    run = jobs.train("--stages", "1", "--microbatches", "4", "--steps", "3", source=JOB + KILLED)
    expected = "warning: hooks: their process was killed by SIGKILL; none is called any more"
    assert expected in run.stderr.splitlines()


def test_nothing_is_left_of_hooks_when_the_launcher_is_killed(jobs: Jobs) -> None:
    source = f"{JOB.replace('range(6)', 'range(10**6)')}{FAILS}\n    on_step = on_checkpoint\n"
    process, _ = jobs.start("--stages", "1", source=source)
    until(lambda: any("sleep" in line for line in processes_of(jobs.folder).values()))
    assert pids_of(jobs.folder, "hooks")
    process.send_signal(signal.SIGKILL)
    until(lambda: not processes_of(jobs.folder))


@slow
def test_hooks_under_torchrun_and_of_a_script(
    jobs: Jobs, torchrun: Torchrun, scripts: Scripts
) -> None:
    run = torchrun("--steps", "3", *WORDS, source=JOB + SEEN).end()
    assert run.status == 0, run.stderr
    expected = ("s1 s2 e2 s3", "c2 c3")
    assert seen(jobs.folder) == expected
    train = """
        def fails(row):
            on_step(row)
            raise ValueError("no")

        pipeworker.train(
            model, loss=loss, optimizer=optimizer, data=data, evaluation=evaluation,
            on_step=fails, on_evaluation=on_evaluation, on_checkpoint=on_checkpoint,
            run_dir="run", steps=3, microbatches=4, evaluate_every=2, checkpoint_every="3", keep=9,
        )
    """
    started = scripts.start(script(JOB, SEEN, train), 2)
    (by_train, _) = started.succeed()
    assert seen(by_train.path.parent) == expected
    assert_same(by_train, run)
    assert by_train.stderr.count("warning: on_step(): raised ValueError: no after step 1") == 1
    assert by_train.stderr.count("warning: ") == 1
