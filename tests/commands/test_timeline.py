"""The timeline in a run directory: the workers of real jobs recorded it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeworker.plan.actions import COMPUTE, RECEIVES, SENDS, edge_of, parse_actions
from pipeworker.record.rundir import RunDir
from pipeworker.trace.clocks import aligned
from pipeworker.trace.recorder import EVALUATION, SAVE, UPDATE, seconds
from pipeworker.trace.ring import Ring
from pipeworker.trace.timeline import read_timeline
from support.clusters.hosts import Host
from support.real_jobs.jobs import Jobs, Run, processes_of, steps_of, until
from support.real_jobs.ranks import Scripts, script
from support.real_jobs.sources import JOB
from support.real_jobs.torchrun import TOKEN, Torchrun
from support.slow import slow

EVALUATED = (
    JOB
    + """
    def evaluation():
        return data()
"""
)
WORDS = ("--stages", "2", "--microbatches", "4")


def timelines(path: Path, workers: int = 2) -> list[list[Any]]:
    files = [path / "timeline" / f"worker-{rank}.jsonl" for rank in range(workers)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def test_every_action_of_every_step_is_recorded_with_trace(jobs: Jobs) -> None:
    words = ("--steps", "3", "--evaluate-every", "2", "--trace")
    run = jobs.train(*WORDS, *words, source=EVALUATED)
    for rank, (start, program, *rest) in enumerate(timelines(run.path)):
        assert start["worker"] == rank
        assert start["stages"] == str(rank)
        actions = parse_actions(program["actions"])
        assert {a.kind for a in actions} & COMPUTE
        steps = [row for row in rest if "times" in row]
        assert [row["step"] for row in steps] == [1, 2, 3]
        last = 0.0
        for row in steps:
            times = seconds(row["began"], row["times"])
            assert len(times) == 2 * len(actions)
            assert last <= row["received"] <= row["began"] <= times[0] <= times[-1]
            assert times[-1] <= row["answered"]
            last = row["answered"]
        names = [name for row in rest for name, *_ in row.get("spans", ())]
        assert names.count(UPDATE) >= 3  # and what evaluations change
        assert names.count(EVALUATION) == 1
        assert names.count(SAVE) == 1


ROOT = Path(__file__).parents[2]
SLEEPING = """
    import time

    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(0.015)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(0.015)
            return gradient

    class Sleeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return Sleep.apply(x * self.scale)

    def model():
        return [Sleeping] * 6

    def loss(output, target):
        return (output - target).pow(2).mean()

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.01)

    def data():
        while True:
            yield torch.ones(8, 4), torch.zeros(8, 4)
"""


READING = (
    JOB
    + """
    read = data

    def data():
        import time

        for batch in read():
            time.sleep(0.6)
            yield batch
"""
)


def test_all_workers_wait_for_a_slow_data(jobs: Jobs) -> None:
    words = ("--stages", "2", "--microbatches", "4", "--steps", "4", "--trace")
    run = jobs.train(*words, source=READING)
    found = json.loads(jobs.pipeworker("report", str(run.path), "--json").stdout)
    assert found["advice"]["text"].startswith("data() takes ")
    idle = [worker["idle"] for worker in found["workers"]]
    assert [max(causes, key=causes.__getitem__) for causes in idle] == ["data"] * 2
    assert all(0 < causes["data"] <= idle[0]["data"] for causes in idle)


def median_step(run: Run) -> float:
    return float(statistics.median(row["seconds"] for row in run.metrics[2:]))


@slow
def test_the_advice_of_a_report_is_worth_what_it_says(jobs: Jobs) -> None:
    shape = ("--stages", "2", "--microbatches", "6", "--steps", "5")
    words = (*shape, "--schedule", "zb-h1", "--recompute", "never")
    run = jobs.train(*words, "--balance", "5,1", source=SLEEPING)
    text = jobs.pipeworker("report", str(run.path)).stdout
    found = json.loads(jobs.pipeworker("report", str(run.path), "--json").stdout)
    advice = found["advice"]
    first = rf"stage 0 takes 6\d% longer than the mean: {advice['option']} would give 1\.\d+ times"
    assert re.match(first, text), text
    assert advice["option"] == "--balance 3,3"
    for worker in found["workers"]:
        parts = [worker[name] for name in ("forward", "recompute", "backward", "optimizer")]
        assert sum(parts) + sum(worker["idle"].values()) == pytest.approx(
            found["seconds"], rel=0.01
        )
    assert found["steps"] == [2, 3, 4, 5]
    idle = found["workers"][1]["idle"]
    assert idle["imbalance"] > 0.4 * found["seconds"]
    better = jobs.train(*words, *advice["option"].split(), source=SLEEPING)
    both = jobs.pipeworker("report", str(run.path), "--compare", str(better.path)).stdout
    assert re.match(rf"a step of {better.path} takes \d+% less time than one of {run.path}", both)
    assert both.splitlines()[3].split()[0] == "imbalance"  # the largest difference
    gained = median_step(run) / median_step(better)
    assert gained - 1 == pytest.approx(advice["gain"] - 1, rel=1 / 3)


@slow
def test_the_time_for_which_a_job_was_suspended_is_named(jobs: Jobs) -> None:
    words = ("--stages", "2", "--microbatches", "4", "--steps", "25", "--trace")
    process, path = jobs.start(*words, source=SLEEPING)
    until(lambda: steps_of(path))
    every = [psutil.Process(pid) for pid in processes_of(path.parent)]
    for one in every:
        one.suspend()
    time.sleep(4)
    for one in every:
        one.resume()
    assert process.wait(timeout=60) == 0
    found = json.loads(jobs.pipeworker("report", str(path), "--json").stdout)
    assert 2 < found["suspended"] < 5
    for worker in found["workers"]:
        assert worker["idle"]["other"] > found["suspended"]
        assert worker["forward"] + worker["backward"] < found["seconds"] - found["suspended"]
    assert "\nthe job was suspended for " in jobs.pipeworker("report", str(path)).stdout


def test_what_the_workers_of_a_running_job_do_is_shown(jobs: Jobs) -> None:
    words = ("--stages", "2", "--microbatches", "4", "--steps", "100000")
    process, path = jobs.start(*words, source=SLEEPING)
    until(lambda: steps_of(path))
    found = json.loads(jobs.pipeworker("top", str(path), "--json").stdout)
    assert [one["stages"] for one in found["workers"]] == [[0], [1]]
    assert found["doing"] == "stepping"
    assert all(one["step"] > 0 and one["memory_bytes"] > 0 for one in found["workers"])
    assert all(0 <= one["held"] <= 4 for one in found["workers"])
    assert found["last"]["step"] > 0
    page = (ROOT / "docs" / "schema.md").read_text().partition("## `top`")[2]
    assert {*found, *found["last"], *found["workers"][0]} <= {*re.findall(r"`(\w+)`", page)}
    assert found["last"]["samples_per_second"] > 0

    def shows_held() -> bool:
        now = json.loads(jobs.pipeworker("top", str(path), "--json").stdout)
        return any(one["held"] for one in now["workers"])

    until(shows_held)
    text = jobs.pipeworker("top", str(path)).stdout
    assert re.search(r"step \d+ done  loss [\d.e-]+  .* samples/s", text)
    assert re.search(r"^worker +stages +does +step", text, re.MULTILINE)
    assert text.endswith("\n")
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert not {".watch", ".now.json"} & {entry.name for entry in path.iterdir()}
    over = jobs.pipeworker("top", str(path))
    assert over.returncode == 2
    assert "no job is running there" in over.stderr


def test_a_request_that_comes_with_the_end_is_withdrawn(jobs: Jobs) -> None:
    """The coordinator looks for it at intervals that are longer than the rest of the job."""
    source = (
        JOB
        + """
    def loss(output, target):
        from pathlib import Path
        for run in Path().glob("run-*"):
            (run / ".watch").touch()
        return nn.functional.cross_entropy(output, target)
"""
    )
    run = jobs.train("--stages", "1", "--steps", "3", source=source)
    assert not (run.path / ".watch").exists()


def stopped_within_a_step(pid: int, ring: Path) -> bool:
    """Stop a worker, and let it run again if it has no action to finish."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    times = Ring.in_file(ring).unfinished()
    if times is not None and times.times:
        return True
    os.kill(pid, signal.SIGCONT)
    return False


@slow
def test_ranks_without_an_agent_leave_what_they_did_last(jobs: Jobs, torchrun: Torchrun) -> None:
    started = torchrun("--microbatches", "4", "--steps", "100000", source=SLEEPING)
    pid = started.training(5)["stages"][1]["pid"]
    until(lambda: stopped_within_a_step(pid, started.path / "timeline" / "worker-1.ring"))
    os.kill(pid, signal.SIGKILL)
    assert started.end().status == 1
    _, rows = timelines(started.path)
    (lost,) = [row for row in rows if row.get("lost")]
    assert lost["times"]
    assert lost["step"] > max(row["step"] for row in rows if "times" in row and row is not lost)
    assert not [*started.path.glob("timeline/*.ring")]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--schedule", name, *more), id=name)
        for name, *more in (
            ("gpipe", "--recompute", "always"),
            ("1f1b",),
            ("interleaved-1f1b",),
            ("zb-h1",),
            ("zbv", "--replicas", "2"),
            ("v-half",),
            ("v-min",),
            ("dualpipev",),
        )
    ],
)
@slow
def test_every_schedule_has_a_report_a_page_and_a_trace(
    jobs: Jobs, words: tuple[str, ...], users_defaults: None
) -> None:
    count = 16 if "--replicas" in words else 8
    launch = ("--stages", "2", "--microbatches", str(count), "--steps", "4", "--trace", *words)
    run = jobs.train(*launch, source=SLEEPING.replace("(48,", "(64,"))
    path = str(run.path)
    report = json.loads(jobs.pipeworker("report", path, "--json").stdout)
    assert len(report["workers"]) == (4 if "--replicas" in words else 2)
    for worker in report["workers"]:
        parts = [worker[part] for part in ("forward", "recompute", "backward", "optimizer")]
        assert sum([*parts, *worker["idle"].values()]) == pytest.approx(report["seconds"], rel=0.01)
        assert worker["forward"] > 0
        assert worker["backward"] > 0
        assert (worker["recompute"] > 0) is ("always" in words)
    assert report["planned"] is not None
    page = jobs.pipeworker("report", path, "--html", "report.html")
    assert page.returncode == 0, page.stderr
    assert "Where it goes as planned" in (jobs.folder / "report.html").read_text()
    traced = jobs.pipeworker("trace", path, "-o", "trace.json")
    assert traced.returncode == 0, traced.stderr
    events = json.loads((jobs.folder / "trace.json").read_text())["traceEvents"]
    named = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert {"planned: worker 0", "planned: worker 1"} <= named.keys()
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"live", "memory", "graphs, as planned"}
    assert min(e["args"]["bytes"] for e in events if e["name"] == "memory") > 1e6


@slow
def test_a_loop_of_the_users_has_a_report(jobs: Jobs, scripts: Scripts) -> None:
    loop = """
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=4, run_dir="run", trace=True
        ) as pipeline:
            for batch in data():
                pipeline.step(batch)
    """
    (made, _) = scripts.start(script(JOB, loop), 2).succeed()
    run = str(made.path)
    report = json.loads(jobs.pipeworker("report", run, "--json").stdout)
    assert len(report["workers"]) == 2
    assert jobs.pipeworker("report", run, "--html", "report.html").returncode == 0


SKEW = 1000.0


@slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_clocks_of_two_hosts_that_differ_are_aligned(
    jobs: Jobs, torchrun: Torchrun, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second host's clocks are in a time namespace of its own, and 1,000 s ahead."""
    monkeypatch.setenv(TOKEN, uuid.uuid4().hex)
    words = ("--microbatches", "4", "--steps", "15", "--trace")
    skewed = ("unshare", "--time", "--monotonic", str(int(SKEW)), "--fork")
    both = torchrun.nodes(*words, hosts=hosts, ranks=1, source=SLEEPING, prefixes=((), skewed))
    head, tail = (started.end(90) for started in both)
    assert head.status == tail.status == 0, head.stderr + tail.stderr
    read = read_timeline(RunDir(head.path))
    first, second = read.lives
    assert first.clock != second.clock
    assert second.now - first.now == pytest.approx(SKEW, abs=20)
    samples = second.samples
    assert samples
    assert all(-sample.offset == pytest.approx(SKEW, abs=20) for sample in samples)
    assert min(sample.error for sample in samples) < 0.05
    here, there = aligned(read.lives)
    error = max(sample.error for sample in samples)
    sent: dict[tuple[int, Any, int], float] = {}
    for life in (here, there):
        for command in life.commands:
            for action, begin, _ in command.actions:
                if action.kind in SENDS:
                    sent[command.step, edge_of(action), action.microbatch] = begin
    received = 0
    for life in (here, there):
        for command in life.commands:
            for action, _, end in command.actions:
                if action.kind in RECEIVES:
                    begin = sent[command.step, edge_of(action), action.microbatch]
                    assert begin - error <= (end or begin)
                    received += 1
    assert received > 100
