"""The report of a run: of which steps it tells."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.job.options import Options
from pipeworker.plan.simulate import Costs
from pipeworker.record import run_record
from pipeworker.record.rundir import RunDir
from pipeworker.runs.report import report
from pipeworker.trace.advice import Advice
from support.pure.orders import build
from support.pure.timelines import lives_of, write_lives

MICROBATCHES = 4


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
