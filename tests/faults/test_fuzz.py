"""Drawn jobs under drawn faults, each compared with a quiet run of one stage: ``make fuzz``.

Everything of a case is drawn from its seed: network, optimizer, options, faults and their moments.
Rows, weights, buffers and the state of optimizers and schedulers must be equal bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeworker.record.checkpoint.manifest import file_names
from support.faults.fault_injection import (
    AT_START,
    IN_COMMIT,
    IN_RECOVERY,
    TIMEOUT,
    Fault,
    FaultInjector,
)
from support.faults.observed_job import ObservedJob
from support.real_jobs.compare import assert_identical
from support.real_jobs.drawn_job import DrawnJob, draw_job
from support.real_jobs.jobs import Jobs, Record, Run, steps_of, until
from support.real_jobs.ranks import Ranks, Scripts
from support.real_jobs.sources import JOB
from support.real_jobs.torchrun import Started, Torchrun
from support.slow import slow

CASES = int(os.environ.get("FUZZ_CASES", 0))
SEED = int(os.environ.get("FUZZ_SEED", 0))
ENDLESS = ("--steps", "1000000", "--max-restarts", "1000000")
PACE = "0.02" if CASES else "0.1"
_OF_LAUNCHER = ("--stages", "--snapshot-every", "--min-stages")
STARTING = ("loading", "building", "restoring", "connecting")


class Fuzz(FaultInjector):
    """An injector of faults that do not depend on what the job is."""

    def __init__(self, job: ObservedJob, chance: random.Random) -> None:
        super().__init__(job, chance, None, 0.3)
        self.layout: tuple[str, ...] = ()
        self._methods |= {
            "pause": self._pause_process,
            "resume": self._change_layout,
            "shrink": self._take_workers_away,
        }

    def _pause_process(self, fault: Fault) -> None:
        """Stop a process for less than the timeout: nothing is lost."""
        pid = self.job.pids[fault.where]
        os.kill(pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        time.sleep(self._chance.uniform(0, 1))
        os.kill(pid, signal.SIGCONT)
        step = self.job.step
        self.job.until(lambda: self.job.step > step)

    def _change_layout(self, fault: Fault) -> None:
        """End the job, and resume it with another layout."""
        self.end(fault.where)
        self.resume(*self.layout)

    def _take_workers_away(self, fault: Fault) -> None:
        """Let one stage fewer start in each replica, until the job has adapted twice."""
        limit, before = self.job.jobs.folder / "limit", self.workers
        limit.write_text(f"{(before - 1) * int(fault.where)}")
        os.kill(self.job.pids["stage 0"], signal.SIGKILL)
        self.job.until(lambda: self.workers == before - 1)
        step = self.job.step
        self.job.until(lambda: self.job.step > step)
        limit.unlink()
        self.job.until(lambda: self.workers == before)
        step = self.job.step
        self.job.until(lambda: self.job.step > step)

    def end(self, how: str) -> None:
        if how == "killed":
            os.kill(self.job.process.pid, signal.SIGKILL)
            assert self.job.end() == -signal.SIGKILL
            return
        os.kill(self.job.process.pid, signal.SIGINT)
        assert self.job.end() == 130, "\n".join(line.text for line in self.job.lines[-20:])


def draw_fault(fuzz: Fuzz, job: DrawnJob, chance: random.Random) -> Fault:
    """Draw a fault that can occur in this job as it is now."""
    ranks = fuzz.workers * job.replicas
    rank = chance.randrange(ranks)
    actions = [*map(str, fuzz.actions)]
    action = chance.choice(actions)
    writing = ranks if "--shard-optimizer" in job.layout else fuzz.workers
    file = chance.choice(file_names(chance.randrange(writing), writing))
    shrinks = int(job.layout[job.layout.index("--min-stages") + 1]) < fuzz.workers
    # A single worker has joined before a line reports that it has.
    recovery = [*(one for one in IN_RECOVERY if ranks > 1 or one != "send Joined"), AT_START]
    faults = [
        *(Fault(f"worker: {how}", how, action) for how in ("kill", "exit", "terminate", "kill")),
        Fault("worker: stop", "stop", action),
        Fault("worker: kill", "kill", f"update@{rank}"),
        Fault("worker: kill again", "kill again", f"{chance.choice(STARTING)}@{rank}"),
        Fault("control connection cut", "cut control", action),
        Fault("worker killed while its part is written", "orphan", file),
        Fault("writer killed", "kill writer", file),
        Fault("coordinator killed", "kill coordinator", chance.choice(IN_COMMIT)),
        Fault("coordinator killed", "kill coordinator", chance.choice(recovery)),
        Fault("coordinator killed", "kill coordinator", "sent Advance"),
        Fault("coordinator stopped", "stop coordinator", "sent Advance"),
        Fault("agent killed", "kill agent", "any time"),
        Fault("agent killed", "kill agent", f"fork {rank}"),
        Fault("agent stopped", "stop agent", "any time"),
        Fault("all but the launcher killed", "kill all"),
        Fault("paused", "pause", chance.choice([*fuzz.job.pids])),
        Fault("paused", "pause", chance.choice([*fuzz.job.pids])),
        Fault("layout changed", "resume", chance.choice(("killed", "interrupted"))),
        Fault("layout changed", "resume", chance.choice(("killed", "interrupted"))),
        *([Fault("data connections cut", "cut data", action)] if ranks > 1 else []),
        *([Fault("fewer workers", "shrink", f"{job.replicas}")] * 8 if shrinks else []),
    ]
    return chance.choice(faults)


def announce(seed: int, job: DrawnJob, folder: Path, *more: str) -> None:
    """Print what a failure shows; a case that succeeds removes its folder."""
    print(f"\nFUZZ_SEED={seed}, in {folder}", *more, job, sep="\n")


def quiet_run(jobs: Jobs, job: DrawnJob, steps: int) -> Run:
    """Run the job with one stage, and without a fault."""
    words = (*job.bits, "--stages", "1", "--steps", f"{steps}")
    return jobs.train(*words, source=job.source, timeout=60 + steps)


def with_last_pass(jobs: Jobs, job: DrawnJob, run: Record) -> Record:
    """Return an interrupted run with the evaluation of its last step, if that was left to do."""
    if run.checkpoint.manifest.evaluation_due:
        words = ("--resume", "--run-dir", str(run.path), "--steps", f"{run.summary['steps']}")
        jobs.train(*job.bits, *job.layout, *words, source=job.source)
    return Record(run.path)


def train_under_faults(
    jobs: Jobs, seed: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[DrawnJob, Fuzz]:
    chance = random.Random(seed)
    job = draw_job(chance)
    monkeypatch.setenv("PAUSE", PACE)
    monkeypatch.setenv("PIPEWORKER_TIMINGS", "grow=0.5")
    observed = ObservedJob(jobs, job.source, (*job.bits, *job.layout, *ENDLESS))
    fuzz = Fuzz(observed, chance)
    announce(seed, job, jobs.folder)
    fuzz.start()
    for _ in range(chance.randint(1, 4) if CASES else 1):
        fault = draw_fault(fuzz, job, chance)
        print(f"step {observed.step}: {fault}")
        if fault.how == "resume":
            job = job.with_layout(chance)
            fuzz.layout = job.layout
            print(*job.layout)
        fuzz.inject(fault)
    fuzz.end("interrupted")
    print(f"step {observed.saved}: interrupted")
    if chance.random() < 0.5:
        job = job.with_layout(chance)
        print(*job.layout)
        observed.resume(*job.layout, "--steps", f"{observed.saved + 3}")
        fuzz.succeed()
    monkeypatch.delenv("PAUSE")
    return job, fuzz


@slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(SEED, SEED + (CASES or 1)))
def test_a_drawn_job_under_faults_equals_a_quiet_run_of_one_stage(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    job, fuzz = train_under_faults(jobs, seed, monkeypatch)
    run = with_last_pass(jobs, job, fuzz.job.run)
    steps = run.summary["steps"]
    assert [row["step"] for row in run.metrics] == [*range(1, steps + 1)]
    assert_identical(run, quiet_run(jobs, job, steps), skip=("data",))
    shutil.rmtree(jobs.folder)


@slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(SEED, SEED + (CASES or 1)))
def test_torchrun_restarts_a_drawn_job(
    jobs: Jobs, torchrun: Torchrun, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """torchrun starts all ranks again, which resume from the last checkpoint."""
    chance = random.Random(f"torchrun {seed}")
    job = draw_job(chance)
    announce(seed, job, jobs.folder, f"torchrun --nproc-per-node {job.workers}")
    monkeypatch.setenv("PAUSE", PACE)
    words = (*job.bits, *without(job.layout, *_OF_LAUNCHER), *ENDLESS[:2])
    started = torchrun(
        *words,
        *("--worker-timeout", f"{TIMEOUT:g}"),
        ranks=job.workers,
        source=job.source,
        options=("--standalone", "--max-restarts", "9", "--monitor-interval", "0.1"),
    )
    for _ in range(chance.randint(1, 3) if CASES else 1):
        plan = started.training(steps_of(started.path) + chance.randint(1, 6))
        pids = {stage["pid"] for stage in plan["stages"]}
        ways = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]
        if CASES and len(pids) > 1:  # torchrun waits 30 s for one that is stopped, alone for ever
            ways.append(signal.SIGSTOP)
        how = chance.choice(ways)
        pid = chance.choice(sorted(pids))
        print(f"row {steps_of(started.path)}: {how.name} of a rank")
        os.kill(pid, how)
        until(partial(replaced, started, pids))
    started.training(steps_of(started.path) + 2)
    started.process.send_signal(signal.SIGTERM)
    run = started.end()
    monkeypatch.delenv("PAUSE")
    assert run.summary["status"] == "interrupted", run.stderr
    steps = run.summary["steps"]
    assert_identical(with_last_pass(jobs, job, run), quiet_run(jobs, job, steps), skip=("data",))
    shutil.rmtree(jobs.folder)


def replaced(started: Started, pids: set[int]) -> bool:
    """Return whether other processes train now than these."""
    assert started.process.poll() is None, started.end().stderr
    try:
        plan = Record(started.path).plan
    except (FileNotFoundError, ValueError):
        return False
    return not pids & {stage["pid"] for stage in plan["stages"]}


def without(words: tuple[str, ...], *names: str) -> list[str]:
    """Return the words without some options and their values."""
    found, skipped = [], False
    for word in words:
        if word.startswith("--"):
            skipped = word in names
        if not skipped:
            found.append(word)
    return found


OWN_LOOP = """
import itertools
import json

names = {"scheduler", "before_update", "tied"} & {*globals()}
if BUILT:
    torch.manual_seed(SEED)
    model = model()
with pipeworker.Pipeline(
    model, loss=loss, optimizer=optimizer, sample=next(data())[0], run_dir="run",
    **{name: globals()[name] for name in names}, **json.loads(os.environ["OPTIONS"]),
) as pipe:
    done = pipe.load(os.environ["FROM"]) if os.environ["FROM"] else 0
    batches = itertools.chain.from_iterable(data() for _ in itertools.count())
    for item in itertools.islice(batches, done, STEPS):
        done = pipe.step(item).step
        if done % EVERY == 0 and done < STEPS:
            pipe.save()
"""
_OF_JOB = ("--checkpoint-every", "--checkpoint-busy", "--keep")


def as_arguments(words: list[str]) -> dict[str, Any]:
    """Return the keyword arguments of ``Pipeline`` that correspond to options."""
    found: dict[str, Any] = {}
    for word, value in zip(words, [*words[1:], "--"], strict=True):
        name = word.removeprefix("--").replace("-", "_")
        if not word.startswith("--"):
            continue
        if value.startswith("--"):
            found[name.removeprefix("no_")] = not name.startswith("no_")
        elif name == "balance":
            found[name] = value
        elif name.startswith("clip"):
            found[name] = float(value)
        else:
            found[name] = int(value) if value.isdigit() else value
    return found


@slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(SEED, SEED + (CASES or 1)))
def test_a_drawn_loop_of_the_users_own_equals_a_quiet_run_of_one_stage(
    jobs: Jobs, scripts: Scripts, seed: int
) -> None:
    """Ranks are killed; other ranks, of which there may be more or fewer, load a checkpoint."""
    chance = random.Random(f"own loop {seed}")
    job = draw_job(chance, alone=True)
    steps, every = chance.randint(15, 40) if CASES else 9, chance.randint(1, 4)
    built = "lambda" not in job.source.partition("def model")[2].partition("def loss")[0]
    built = built and chance.random() < 0.5
    number = as_arguments([*job.bits])["seed"]
    values = f"BUILT, SEED, STEPS, EVERY = {built}, {number}, {steps}, {every}\n"
    script = job.source + "\n" + values + OWN_LOOP
    announce(seed, job, jobs.folder, values)
    checkpoint = ""
    for left in reversed(range(chance.randint(2, 3) if CASES else 2)):
        job = job.with_layout(chance)
        options = as_arguments(without((*job.bits, *job.layout), *_OF_LAUNCHER, *_OF_JOB))
        ranks = scripts.start(
            script, job.workers, OPTIONS=json.dumps(options), FROM=checkpoint, PAUSE=PACE
        )
        print(f"{job.workers} ranks from {checkpoint or 'the beginning'}: {options}")
        if not left:
            break
        until(partial(has_rows, ranks, chance.randint(1, 5)))
        paused = chance.choice(ranks.pids)
        os.kill(paused, signal.SIGSTOP)
        time.sleep(chance.uniform(0, 0.5))
        os.kill(paused, signal.SIGCONT)
        os.kill(chance.choice(ranks.pids), signal.SIGKILL)
        statuses = [run.status for run in ranks.end()]
        assert -signal.SIGKILL in statuses, statuses
        assert 0 not in statuses, statuses
        saved = sorted((ranks.run_dir / "checkpoints").glob("step-*"))
        checkpoint = str(saved[-1]) if saved else checkpoint
    run = ranks.succeed()[0]
    quiet = quiet_run(jobs, job, steps)
    done = [row["step"] for row in run.metrics]
    assert done == [*range(done[0], steps + 1)]
    assert_identical(run, quiet, skip=("epoch", "data"))
    shutil.rmtree(jobs.folder)


def has_rows(ranks: Ranks, count: int) -> bool:
    """Return whether so many steps are on record; fail if a rank has ended."""
    assert all(one.poll() is None for one in ranks.processes), [r.stderr for r in ranks.end()]
    return steps_of(ranks.run_dir) >= count


@pytest.mark.skipif(not CASES, reason="takes half a minute: make fuzz")
def test_a_network_of_3000_layers_trains(jobs: Jobs) -> None:
    source = JOB.replace("nn.Linear(16, 16)", "*(nn.Linear(16, 16) for _ in range(2996))")
    words = ("--microbatches", "2", "--steps", "2")
    run, quiet = (jobs.train("--stages", k, *words, source=source) for k in ("3", "1"))
    assert_identical(run, quiet)
    assert max(run.summary["peak_memory_bytes"]) < 400 << 20  # torch alone takes 250 MB
    assert max(row["seconds"] for row in run.metrics) < 30
