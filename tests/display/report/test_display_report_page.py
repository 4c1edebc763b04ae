"""The page of a run: one file that loads nothing, with what the view has."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from typing import Any

import pytest

from pipeworker.display.report.curves import Curve
from pipeworker.display.report.page import page
from pipeworker.display.report.view import Box, MemoryView, ReportView, StepView
from pipeworker.plan.actions import Kind
from pipeworker.trace.causes import Breakdown, WorkerTime


def times(worker: int, forward: float, waited: float) -> WorkerTime:
    found = WorkerTime(worker, (worker,), forward=forward)
    found.idle["fill_drain"] = waited
    return found


@pytest.fixture
def view() -> ReportView:
    curve = Curve.of("loss", [1, 2], [2.0, 1.0])
    assert curve is not None
    boxes = [Box(Kind.FORWARD, 0, 3, 0.001, 0.002), Box("save", -1, -1, 0.002, 0.0035)]
    step = StepView("step 2, a usual one", 0.004, [boxes, [Box(Kind.RECOMPUTE, 1, 3, 0.0, 0.001)]])
    return ReportView(
        "run & <b>",
        "</script><script>alert(1)</script>",
        [("steps", "2"), ("loss", "1.0")],
        [curve],
        ["worker 0: stage 0", "worker 1: stage 1"],
        [step],
        None,
        [MemoryView("worker 0: stage 0", [0.001, 0.002], [5 << 20, 6 << 20], 7 << 20, None)],
        Breakdown(0.008, (1, 2), (times(0, 0.002, 0.006), times(1, 0.004, 0.004))),
        None,
        [("2026-11-26 07:00:00", "began on <host>"), ("", "done")],
    )


def data_of(text: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    data: dict[str, Any] = json.loads(found)
    return data


def test_a_page_loads_nothing(view: ReportView) -> None:
    text = page(view)
    assert "default-src 'none'" in text
    assert set(re.findall(r"(\w+://[^\"'\s<>)]+)", text)) == {
        "http://www.w3.org/2000/svg"  # the name of a format
    }
    assert not re.search(r"@import|\burl\(|\bsrc=|<link|\bfetch\(|XMLHttpRequest", text)


def test_what_others_have_written_is_text(view: ReportView) -> None:
    text = page(replace(view, workers=["</script><script>alert(2)</script>", "b"]))
    assert "<script>alert" not in text
    assert "<b>" not in text
    assert "<host>" not in text
    assert data_of(text)["workers"][0] == "</script><script>alert(2)</script>"


def test_the_script_gets_every_box(view: ReportView) -> None:
    data = data_of(page(view))
    names = [kind["name"] for kind in data["kinds"]]
    (step,) = data["steps"]
    forward, other = step["rows"][0][:5], step["rows"][0][5:]
    assert names[forward[0]] == "forward"
    assert forward[1:] == [0, 3, 1000, 1000]
    assert names[other[0]] == "snapshot, checkpoint or evaluation"
    assert other[1:] == [-1, -1, 2000, 1500]
    assert data["planned"] is None
    values = {name: [2, 1] for name in ("low", "mean", "high")}
    assert data["curves"] == [{"first": 1, "steps": [1, 2], **values}]


def test_tables_have_the_shares_of_each_worker_and_their_mean(view: ReportView) -> None:
    text = unescape(re.sub(r"<title>.*?</title>|<[^>]+>", " ", page(view)))
    for label, shares in (
        ("worker 0: stage 0", "25.0% 75.0%"),
        ("worker 1: stage 1", "50.0% 50.0%"),
        ("mean", "37.5% 62.5%"),
    ):
        assert f"{label} {shares}" in " ".join(text.split())


def test_a_plan_is_shown_beside_what_was_measured(view: ReportView) -> None:
    without = page(view)
    assert 'id="planned"' not in without
    assert "Where it goes as planned" not in without
    text = page(replace(view, planned=view.steps[0], foreseen=view.found))
    assert 'id="planned"' in text
    assert "Where it goes as planned" in text
    assert data_of(text)["planned"]["seconds"] == 0.004
    assert "planned 7.3" in text
