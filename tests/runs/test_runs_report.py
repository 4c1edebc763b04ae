"""The report of a run: of which steps it tells."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeworker.display.report.view import ReportView
from pipeworker.errors import UsageError
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.job.options import Options
from pipeworker.plan.actions import Kind
from pipeworker.plan.simulate import Costs
from pipeworker.record import run_record
from pipeworker.record.run_record import RunRecord, write_summary
from pipeworker.record.rundir import RunDir
from pipeworker.runs import report_page
from pipeworker.runs.report import report
from pipeworker.runs.report_page import write_page
from pipeworker.trace.advice import Advice
from pipeworker.trace.recorder import UPDATE
from pipeworker.wire.lines import Verdict
from support.in_process.checkpoints import complete
from support.pure.facts import layer, network
from support.pure.orders import build
from support.pure.timelines import lives_of, write_lives, write_records

MICROBATCHES = 4
SCHEDULE = build("gpipe", 2, MICROBATCHES, "never")
FACTS = replace(network([layer(0.05, 0.1, flops=6 * 10**11)] * 2), device="NVIDIA H100 80GB HBM3")


def run_of(
    path: Path, facts: NetworkFacts | None = FACTS, forward: float = 0.05, steps: int = 4
) -> RunDir:
    """Return a run of two workers whose backward takes twice as long as a forward."""
    path.mkdir()
    run_dir = RunDir(path)
    write_records(run_dir, facts)
    costs = Costs.even(2, forward, 2 * forward)
    write_lives(run_dir, SCHEDULE, lives_of(SCHEDULE, costs, steps=steps, late=0.006))
    row = {"loss": 1.0, "seconds": 2.0, "samples_per_second": 100.0, "tokens": 3000}
    lines = [json.dumps({"step": step, **row}) + "\n" for step in range(1, steps + 1)]
    run_dir.metrics.write_text("".join(lines))
    return run_dir


def test_a_report_shows_what_was_measured_and_what_was_planned(tmp_path: Path) -> None:
    path = run_of(tmp_path / "run").path
    advice, *lines = report(path).splitlines()
    assert advice.startswith("fill and drain of the schedule take 20% of a step: --schedule ")
    assert lines == [
        "",
        "100 samples/s, 1500 tokens/s, 120 TFLOP/s of the model, 90% of the devices' peak",
        "the last 3 recorded steps, of 0.766 s; shares of their time:",
        "worker  stages  forward  backward  optimizer  fill, drain  coordinator  other",
        "0       0         26.1%     52.2%       0.5%        19.6%         0.8%   0.8%",
        "1       1         26.1%     52.2%       0.5%        19.6%         0.8%   0.8%",
        "mean              26.1%     52.2%       0.5%        19.6%         0.8%   0.8%",
        "",
        "as planned, a step of 0.75 s:",
        "worker  stages  forward  backward  fill, drain",
        "0       0         26.7%     53.3%        20.0%",
        "1       1         26.7%     53.3%        20.0%",
        "mean              26.7%     53.3%        20.0%",
    ]
    found = json.loads(report(path, as_json=True))
    rates = ("samples_per_second", "tokens_per_second", "flops_per_second")
    assert [found[name] for name in rates] == [100, 1500, 120e12]
    assert found["peak_share"] == pytest.approx(120 / (2 * 67))
    assert (found["steps"], found["suspended"]) == ([2, 3, 4], 0)
    assert found["seconds"] == pytest.approx(3 * 0.766)
    assert found["planned"]["seconds"] == pytest.approx(0.75)
    for worker in found["workers"] + found["planned"]["workers"]:
        assert worker["stages"] == [worker["worker"]]
        assert worker["replica"] == 0
    forwards = [worker["forward"] for worker in found["planned"]["workers"]]
    assert forwards == pytest.approx([0.2, 0.2])


def test_a_report_without_measured_layers_has_no_plan(tmp_path: Path) -> None:
    for name, facts in (("none", None), ("counted", replace(FACTS, measured=False))):
        path = run_of(tmp_path / name, facts, steps=1).path
        assert json.loads(report(path, as_json=True))["planned"] is None
        assert "as planned" not in report(path)
        assert "\nthe last recorded step, of 0.766 s; shares of their time:\n" in report(path)


def test_the_plan_of_other_stages_gives_no_advice(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "run")
    run_dir.plan.write_text(json.dumps({"stages": [{"stage": 0, "layers": [0, 2]}]}))
    found = json.loads(report(run_dir.path, as_json=True))
    advice = "the plan of the run is not that of its last steps"
    assert found["advice"] == {"text": advice, "option": "", "gain": 1.0}
    assert found["planned"] is None


def test_the_steps_of_two_runs_are_compared(tmp_path: Path) -> None:
    first, second = run_of(tmp_path / "a").path, run_of(tmp_path / "b", forward=0.025).path
    lines = report(first, second).splitlines()
    assert lines[0] == (
        f"a step of {second} takes 49% less time than one of {first}; milliseconds of a step, the "
        "mean of all workers:"
    )
    assert lines[2].split() == [str(first), str(second), "difference"]
    assert [line.split() for line in [*lines[3:6], lines[-1]]] == [
        ["backward", "400.00", "200.00", "-200.00"],
        ["forward", "200.00", "100.00", "-100.00"],
        ["fill,", "drain", "150.00", "75.00", "-75.00"],
        ["step", "766.00", "391.00", "-375.00"],
    ]
    assert {line.split()[0] for line in lines[6:-1]} == {"coordinator", "optimizer", "other"}
    assert report(second, first).startswith(f"a step of {first} takes 96% more time than one of ")
    both = json.loads(report(first, second, as_json=True))["runs"]
    assert both == [json.loads(report(path, as_json=True)) for path in (first, second)]


def test_a_report_is_of_the_stages_that_a_job_has_had_last(tmp_path: Path) -> None:
    """The job has lost a worker of three, and continues with two."""
    run_dir, wide = RunDir(tmp_path), build("gpipe", 3, MICROBATCHES, "never")
    write_records(run_dir)
    write_lives(run_dir, wide, lives_of(wide, steps=3))
    narrow = [
        replace(life, generation=2, commands=life.commands[3:])
        for life in lives_of(SCHEDULE, steps=6)
    ]
    write_lives(run_dir, SCHEDULE, narrow)
    found = json.loads(report(run_dir.path, as_json=True))
    assert found["steps"] == [5, 6]
    assert [worker["stages"] for worker in found["workers"]] == [[0], [1]]
    assert all(worker["idle"]["recovery"] == 0 for worker in found["workers"])


def test_a_page_shows_what_happened_in_order(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "run")
    record = RunRecord.read(run_dir)
    record.add_resume(record.options, {"host": "there", "started": "2026-11-28"}, 2)
    for step, row in ((1, None), (2, {"step": 2, "loss": 0.5})):
        path = complete(run_dir, step, evaluation=row)
        os.utime(path, (2e9 + step, 2e9 + step))
    run_dir.logs.mkdir()
    run_dir.coordinator_log.write_text(
        "2026-11-27 10:00:00,123 WARNING worker 1 was lost: killed\n"
        "2026-11-27 10:00:00,123 WARNING dropped 3 messages\n"
        "2026-11-27 10:00:00,123 INFO continues\n"
        "2026-13-99 10:00:00,123 WARNING at no time\n"
    )
    verdict = Verdict("failed", 1, 4, 2.5, (), 0.25, "boom", ("killed", "no reply"))
    write_summary(run_dir, verdict, 2)
    write_page(run_dir.path, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    happened = (
        "lost: no reply",
        "began on here",
        "warning: worker 1 was lost: killed",
        "was resumed after step 2 on there",
        "checkpoint step-00000001<",
        "checkpoint step-00000002, loss 0.5000 in evaluation",
        "failed: boom, after 4 steps",
    )
    places = [text.index(one) for one in happened]
    assert places == sorted(places)
    for other in ("lost: killed<", "dropped 3", "continues", "at no time"):
        assert f">{other}" not in text
    assert "Where it goes as planned" in text
    run_dir.summary.unlink()
    run_dir.coordinator_log.unlink()
    write_page(run_dir.path, tmp_path / "page.html")
    assert "lost: its processes ended without a summary" in (tmp_path / "page.html").read_text()


def test_what_the_page_of_a_run_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = run_of(tmp_path / "run", steps=5)
    run_dir.evaluation.write_text('{"step": 2, "loss": 1.25, "accuracy": 0.5}\n')
    record = RunRecord.read(run_dir)
    record.add_resume({**record.options, "steps": 2000}, {"host": "there"}, 2)
    write_summary(run_dir, Verdict("done", 0, 5, 90.0, (), 0.25, None, ("killed",)), 2)
    pages: list[ReportView] = []

    def shown(view: ReportView) -> str:
        pages.append(view)
        return ""

    monkeypatch.setattr(report_page, "page", shown)
    write_page(run_dir.path, tmp_path / "page.html")
    (view,) = pages
    assert view.figures == [
        ("status", "done"),
        ("steps", "5 of 2,000"),
        ("loss", "1.0000"),
        ("best loss", "1.2500"),
        ("a step", "766 ms"),
        ("samples/s", "100"),
        ("tokens/s", "1500"),
        ("model", "120 TFLOP/s, 90% of the peak"),
        ("idle", "21.1%"),
        ("time", "1:30"),
        ("losses of workers", "1"),
    ]
    curves = [(one.name, one.mean, one.others, one.others_name) for one in view.curves]
    assert curves == [
        ("loss", [1.0] * 5, {2: 1.25}, "evaluation"),
        ("samples/s", [100.0] * 5, {}, ""),
        ("accuracy", [0.5], {}, ""),
    ]
    assert [one.title for one in view.steps] == [
        "step 4, a usual one",
        "step 5, the slowest that is recorded",
    ]
    assert view.planned is not None
    compute = [
        *(("F", m, 0.05 + 0.05 * m, 0.1 + 0.05 * m) for m in range(4)),
        *(("B", m, 0.25 + 0.1 * m, 0.35 + 0.1 * m) for m in range(4)),
    ]
    update, *measured = view.steps[0].rows[1]
    *planned, last = view.planned.rows[1]
    for boxes, start in ((measured, 0.01), (planned, 0)):
        for box, (kind, microbatch, begin, end) in zip(boxes, compute, strict=True):
            assert (box.kind, box.stage, box.microbatch) == (Kind(kind), 1, microbatch)
            assert (box.begin, box.end) == pytest.approx((start + begin, start + end))
    for box, times in ((update, (0.001, 0.005)), (last, (0.75, 0.75))):
        assert (box.kind, box.stage, box.microbatch) == (UPDATE, -1, -1)
        assert (box.begin, box.end) == pytest.approx(times)
    assert [box.kind for box in view.steps[0].rows[0]].count(Kind.LOAD) == 1
    assert [one.label for one in view.memory] == ["worker 0: stage 0", "worker 1: stage 1"]
    memory = view.memory[1]
    assert (memory.times[0], memory.times[-1]) == pytest.approx((0.06, 0.66))
    assert (memory.sizes[0], memory.planned, memory.limit) == (100 << 20, 0, None)


def test_a_step_that_took_no_time_is_not_reported(tmp_path: Path) -> None:
    """As in a damaged file; the shares of its time would be divisions by zero."""
    run_dir = run_of(tmp_path / "run", steps=1)
    for path in run_dir.timeline.iterdir():
        found = [json.loads(line) for line in path.read_text().splitlines()]
        for row in (row for row in found if "times" in row):
            still = {"began": row["received"], "times": [0] * len(row["times"]), "spans": []}
            row |= {**still, "answered": row["received"]}
        path.write_text("".join(json.dumps(row) + "\n" for row in found if row.get("first") != 1))
    with pytest.raises(UsageError, match="it has no recorded steps that all of its workers have"):
        report(run_dir.path)


def test_a_run_without_recorded_steps_has_no_report(tmp_path: Path) -> None:
    write_records(RunDir(tmp_path))
    with pytest.raises(UsageError, match="it has no recorded steps that all of its workers have"):
        report(tmp_path)


def test_a_step_has_all_of_its_mini_batches(tmp_path: Path) -> None:
    """The rows that are read begin and end within a step; the first whole step makes memory."""
    run_dir = RunDir(tmp_path)
    options = Options("job.py", 2, MICROBATCHES, recompute="never", accumulate=2)
    run_record.write(run_dir, asdict(options), {"host": "here", "pid": 1, "started": "2026-11-26"})
    stages = [{"stage": stage, "layers": [stage, stage + 1]} for stage in range(2)]
    run_dir.plan.write_text(json.dumps({"stages": stages}))
    schedule = build("gpipe", 2, MICROBATCHES, "never")
    lives = [
        replace(
            life,
            commands=tuple(
                replace(command, step=1 + place // 2, first=MICROBATCHES * (place % 2))
                for place, command in enumerate(life.commands)
            )[1:],
        )
        for life in lives_of(schedule, Costs.even(2, 0.05, 0.1), steps=9)
    ]
    write_lives(run_dir, schedule, lives)
    found = json.loads(report(run_dir.path, as_json=True))
    assert found["steps"] == [3, 4]
    assert found["seconds"] == pytest.approx(2 * 2 * 10)  # one mini-batch begins each 10 s


def test_advice_keeps_to_the_memory_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path)
    options = Options("job.py", 2, MICROBATCHES, recompute="never", memory=(1 << 30,))
    run_record.write(run_dir, asdict(options), {"host": "here", "pid": 1, "started": "2026-11-26"})
    stages = [{"stage": stage, "layers": [stage, stage + 1]} for stage in range(2)]
    run_dir.plan.write_text(json.dumps({"stages": stages}))
    schedule = build("gpipe", 2, MICROBATCHES, "never")
    write_lives(run_dir, schedule, lives_of(schedule, Costs.even(2, 0.05, 0.1)))
    limits = []

    def advise(facts: NetworkFacts, *_: object, **__: object) -> Advice:
        limits.append(facts.limits)
        return Advice("")

    monkeypatch.setattr("pipeworker.runs.report.advise", advise)
    report(run_dir.path)
    assert limits == [(1 << 30, 1 << 30)]
