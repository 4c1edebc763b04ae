"""``pipeworker top``: what it shows of the file that a running job writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeworker.errors import UsageError
from pipeworker.record.rundir import Request, RunDir
from pipeworker.runs import top

WORKER = {
    "worker": 0,
    "replica": 0,
    "host": "here",
    "stages": [0, 2],
    "phase": "forward",
    "step": 7,
    "microbatch": 3,
    "layer": 4,
    "class": "Linear",
    "waits": False,
    "memory_bytes": 3 << 20,
    "held": 2,
    "silent_seconds": 0.5,
}
IDLE = {"worker": 1, "stages": [1], "step": -1, "microbatch": -1, "layer": -1, "memory_bytes": 0}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return the directory of a job that runs until it has been asked three times."""
    run_dir, runs = RunDir(tmp_path), iter([True, True, True])
    monkeypatch.setattr(top, "running", lambda _: run_dir)
    monkeypatch.setattr("pipeworker.record.lock.is_locked", lambda _: next(runs, False))
    monkeypatch.setenv("COLUMNS", "200")
    return run_dir


def write(run: RunDir, *workers: dict[str, Any], rows: str = "") -> None:
    now = {"time": 1e9, "generation": 1, "restarts": 2, "doing": "stepping", "workers": workers}
    run.now.write_text(json.dumps(now))
    run.metrics.write_text(rows)


def shown(run: RunDir, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """Yield the lines, each with one space between words."""
    top.show_once(run.path)
    for line in capsys.readouterr().out.splitlines():
        yield " ".join(line.split())


def test_it_shows_the_last_step_and_what_each_worker_does(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"loss": 0.25, "samples_per_second": 8.0, "seconds": 0.5}
    lines = [json.dumps({"step": step, **row}) + "\n" for step in (1, 2)]
    silent = {**WORKER, **IDLE, "waits": True, "silent_seconds": 65.0}
    write(run, WORKER, silent, rows="".join(lines))
    head, columns, first, second = shown(run, capsys)
    assert head == "step 2 done loss 0.2500 8 samples/s 500 ms a step stepping losses of workers: 2"
    assert columns == "worker stages does step micro-batch layer held memory host"
    assert first == "0 0, 2 forward 7 3 4 Linear 2 3.0M here"
    assert second == "1 1 waits 2 here silent for 1:05"
    assert run.requested(Request.WATCH)


def test_replicas_have_a_column_and_no_step_no_figures(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, WORKER, {**WORKER, "worker": 1, "replica": 1})
    head, columns, _, second = shown(run, capsys)
    assert head == "stepping losses of workers: 2"
    assert columns.startswith("worker replica stages does")
    assert second.startswith("1 1 0, 2 forward")


def test_rows_that_no_job_has_written_are_shown_as_far_as_they_are_known(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"step": 1, "loss": "x", "samples_per_second": "y", "seconds": None}, {"step": 2}]
    for count, loss in ((1, "x"), (2, "nan")):
        lines = [json.dumps(row) + "\n" for row in rows[:count]]
        write(run, WORKER, rows="".join(lines))
        head, *_ = shown(run, capsys)
        assert head.startswith(f"step {count} done loss {loss} 0 samples/s 0 µs a step")


def test_the_facts_are_strict_json(run: RunDir) -> None:
    write(run, WORKER, rows='{"step": 1, "loss": NaN}\n')
    found = top.snapshot(run.path)
    assert found["workers"] == [WORKER]
    assert found["last"] == {"step": 1, "loss": None, "samples_per_second": 0, "seconds": 0}


def test_a_job_that_ends_meanwhile_and_one_that_does_not_answer_are_mistakes(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(UsageError, match="the job has ended; pipeworker show has its results"):
        top.show_once(run.path)
    monkeypatch.setattr("pipeworker.record.lock.is_locked", lambda _: True)
    moments = iter([0.0, 9.0, 11.0])
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    with pytest.raises(UsageError, match="the job does not say what it does; it may be starting"):
        top.show_once(run.path)
