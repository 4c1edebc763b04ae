"""The page of a run: one file that loads nothing, with what the view has."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from typing import Any
from xml.etree import ElementTree

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


def body_of(text: str) -> ElementTree.Element:
    """Return the body of a page, which is well-formed XML too, without its scripts."""
    body = text[text.index("<body>") : text.index("</html>")].replace(' xmlns="', ' format="')
    return ElementTree.fromstring(re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL))


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+", text)]


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


def test_all_of_a_view_is_shown(view: ReportView) -> None:
    odd = "<b> & </b>"
    steps = [replace(view.steps[0], title=f"{title} {odd}") for title in ("usual", "slowest")]
    assert view.found is not None
    made = replace(
        view,
        title=odd,
        answer=odd,
        figures=[(f"best {odd}", odd)],
        curves=[replace(view.curves[0], name=odd, others={1: 1.5}, others_name=odd)],
        workers=[odd, odd],
        steps=steps,
        memory=[replace(view.memory[0], label=odd)],
        foreseen=replace(view.found, steps=()),
        happened=[(odd, odd)],
    )
    body = body_of(page(made))
    assert [one.text for one in body.iter("h2")] == [
        "By step",
        "A step, to scale",
        "Where the time went",
        "Where it goes as planned",
        "Memory of each worker over a step",
        "What happened",
    ]
    assert body.findtext("p[@class='answer']") == odd
    assert [one.text for one in body.findall("dl[@class='figures']/div/")] == [f"best {odd}", odd]
    assert len(body.findall("div[@class='curves']/figure/svg")) == 1
    assert [one.text for one in body.iter("option")] == [step.title for step in steps]
    assert [one.attrib["id"] for one in body.iter("button")] == [
        *("zoom-in", "zoom-out", "earlier", "later", "whole")
    ]
    assert [one[0].tail for one in body.findall("ul[@class='legend']/li")] == [
        *("forward", "recompute", "snapshot, checkpoint or evaluation")
    ]
    shares = "Shares of 2 recorded steps of 4.00 ms.", "Shares of 8.00 ms."
    assert [one.text for one in body.iter("p")][-3:-1] == [*shares]
    assert len(body.findall("div[@class='shares']//table")) == 2
    label = body.findtext("div[@class='memory']/figure/svg/title")
    assert label == f"{odd}: 6.3 MB, planned 7.3 MB"
    assert [(one[0].text, one[0].tail) for one in body.findall("ul[@class='happened']/li")] == [
        (odd, odd)
    ]
    assert "<select" not in page(view)


def test_a_bar_has_the_parts_of_a_time_side_by_side(view: ReportView) -> None:
    bar, *_ = body_of(page(view)).findall(".//svg[@class='bar']")
    assert [(box.attrib["x"], box.attrib["width"], box.findtext("title")) for box in bar] == [
        ("0.0", "250.0", "forward: 25.0%"),
        ("250.0", "750.0", "fill, drain: 75.0%"),
    ]


def test_the_memory_of_all_workers_is_drawn_to_one_scale(view: ReportView) -> None:
    """A limit is drawn where it is near."""
    memory = [
        MemoryView("0", [0.5, 1.0], [8_000_000, 12_000_000], 16_000_000, 17_000_000),
        MemoryView("1", [0.5, 1.0], [10_000_000, 24_000_000], None, 99_000_000),
    ]
    body = body_of(page(replace(view, memory=memory)))
    pictures = body.findall("div[@class='memory']/figure/svg")
    for picture, one in zip(pictures, memory, strict=True):
        name, *scale, seconds = picture.findall("text")
        labels = ["4.0 MB", "14.5 MB", "25.0 MB", "1.00 s"]
        assert [label.text for label in (*scale, seconds)] == labels
        assert name.text == picture.findtext("title")
        bottom, _, top = heights = [float(label.attrib["y"]) - 4 for label in scale]
        assert (heights, seconds.attrib["y"]) == ([110, 67, 24], "126")
        used, *lines = picture.findall("path")
        shown = {line.attrib["class"]: numbers(line.attrib["d"]) for line in lines}

        def y_of(size: int, bottom: float = bottom, top: float = top) -> Any:
            return pytest.approx(bottom + (size / 1e6 - 4) / 21 * (top - bottom), abs=0.1)

        left, width, (first, second) = 64, 288, map(y_of, one.sizes)
        half, right = left + width / 2, left + width
        area = [half, bottom, half, first, right, second, right, bottom]
        assert numbers(used.attrib["d"]) == area
        near = [("planned", 16_000_000), ("limit", 17_000_000)] if one is memory[0] else []
        assert shown == {name: [left, y_of(size), width] for name, size in near}
    assert body_of(page(replace(view, memory=[MemoryView("0", [0.0], [0])])))


def test_a_step_without_duration_or_without_end_is_drawn(view: ReportView) -> None:
    box = Box(Kind.FORWARD, 0, 0, 0.0, 1e300)
    (step,) = data_of(page(replace(view, steps=[StepView("", 0.0, [[box]])])))["steps"]
    assert (step["seconds"], step["rows"]) == (1e-6, [[0, 0, 0, 0, 10**15]])
